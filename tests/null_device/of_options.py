"""A small GPT: every optimiser, and what a model and a run may be asked for."""

from __future__ import annotations

from typing import Any

from null_device import stand_ins, work
from null_device.cases import Numbers, case
from null_device.device import refusing
from xformer import GPT, optim
from xformer.optim import OPTIMISERS, Rule, grouped

SIZES: dict[str, Any] = {"vocab_size": 64, "n_layers": 2, "d_model": 32, "n_heads": 2}
SIZES["max_len"] = 16
SMALL = GPT(**SIZES)
IDS = work.ids(64, 2, 16)

BY: dict[str, Any] = {name: {"optimiser": name} for name in OPTIMISERS}
BY["grouped"] = {"by": grouped(Rule("*blocks*", "muon", min_ndim=2), Rule("*", "lion"))}
# What the products of an optimiser are made by: CuPy's, by cuBLAS, cannot be captured.
BY_CUBLAS = ("muon", "grouped")

RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dropout": (GPT(**SIZES, dropout=0.1), {}),
    "activation checkpointing": (GPT(**SIZES, activation_checkpointing=True), {}),
    "gelu": (GPT(**SIZES, activation="gelu"), {}),
    "relu": (GPT(**SIZES, activation="relu"), {}),
    "silu": (GPT(**SIZES, activation="silu"), {}),
    "post-norm": (GPT(**SIZES, norm_placement="post"), {}),
    "untied": (GPT(**SIZES, tied=False), {}),
    "two batches a step": (SMALL, {"accumulate": 2}),
    "moving average": (SMALL, {"ema": 0.99}),
    "without clipping": (SMALL, {"clip": None}),
    "deterministic": (SMALL, {"fixed": True}),
    "label smoothing": (SMALL, {"loss": {"label_smoothing": 0.1, "z_loss": 1e-4}}),
}


def add(group: str, name: str, model: Any, config: dict[str, Any], refused: str | None) -> None:
    @case(group, name)
    def run() -> Numbers:
        """Steps of the loop, which looks once at the loss and the norm of each."""
        with stand_ins.using("cublaslt"), work.warned() as said:
            seen = work.steady(work.Looped(model, IDS, precision="bfloat16", **config))
        assert not said, said
        return work.of_loop(seen)

    @case(f"{group} captured", name)
    def captured() -> Numbers:
        with stand_ins.using("cublaslt"), work.warned() as said:
            looped = work.Looped(model, IDS, compiled=True, precision="bfloat16", **config)
            seen = work.steady(looped)
        return work.of_graph(seen, said, refused)


for _name, _config in BY.items():
    add("optimisers", _name, SMALL, _config, "cuBLAS" if _name in BY_CUBLAS else None)
for _name, (_model, _config) in RUNS.items():
    add("options", _name, _model, _config, None)


@case("options", "float16")
def scaled() -> Numbers:
    """The scale of the loss goes by the gradients: one look more (docs/cuda-precision.md)."""
    with stand_ins.using("cublaslt"):
        seen = work.steady(work.Looped(SMALL, IDS, precision="float16"))
    assert seen.calls("D2H") == seen.calls("wait") == 2
    return work.numbers(seen)


@case("options", "float16 captured")
def scaled_captured() -> None:
    """Is not, which is said."""
    with stand_ins.using("cublaslt"), work.warned() as said:
        work.steady(work.Looped(SMALL, IDS, precision="float16", compiled=True))
    assert len(said) == 1 and "float16" in said[0], said


@case("options", "clipping and a moving average by hand")
def by_hand() -> Numbers:
    """In a loop of one's own nothing is looked at."""

    class Clipped(work.Steps):
        average: Any = None

        def __call__(self) -> None:
            _, cache = self.model.loss(self.params, *self.arrays)
            grads, _ = optim.clip_by_global_norm(cache.backward(), max_norm=1.0, donate=True)
            self.params, self.state = optim.adamw(self.params, grads, self.state, lr=1e-3)
            self.average = optim.ema(self.average or self.params, self.params, decay=0.9)

    with stand_ins.using(), refusing(*work.LOOKS):
        return work.numbers(work.steady(Clipped(SMALL, IDS)))
