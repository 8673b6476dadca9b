"""The accounts of a training step that is a program, against what NumPy allocates."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
from libraries import slow_but

pytest.importorskip("numba", reason="needs extra numba")

from xformer import GPT, backends, tree
from xformer.backends.numpy.threads import forget_scratch
from xformer.inspection.ledger import Same, ledger, program_ledger
from xformer.inspection.measure import arguments
from xformer.training import TrainConfig
from xformer.training.loop import start, train
from xformer.training.loss import loss_of

SIZES: dict[str, Any] = {"vocab_size": 256, "n_layers": 3, "d_model": 192, "n_heads": 4}
MODELS = {
    "GPT": GPT(**SIZES, max_len=64),
    "dropout": GPT(**SIZES, max_len=64, dropout=0.1),
    "large vocabulary": GPT(**SIZES | {"vocab_size": 12_000}, max_len=64),
}


def trained(model: Any, batch: int, length: int, config: TrainConfig) -> None:
    source = Same(arguments(model, batch, length, "float32")[1])
    state = [start(model.init(), config)]  # handed over, so that nothing here keeps it
    loss, place = loss_of(model), backends.get("numba")
    for _ in train(loss, state.pop(), source, config, place, donate=True):
        pass


def traced_peak(model: Any, batch: int, length: int, **options: Any) -> int:
    """The bytes that were allocated at most in some steps, of which the first one records."""
    config = TrainConfig(3, **options)
    trained(model, batch, length, config)  # compiles kernels
    gc.collect()
    forget_scratch()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        trained(model, batch, length, config)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
@pytest.mark.parametrize("name", slow_but(["GPT"], MODELS))
def test_the_peak_is_what_is_allocated(name: str, optimiser: str) -> None:
    found = program_ledger(MODELS[name], batch=8, length=64, optimiser=optimiser)
    peak = traced_peak(MODELS[name], 8, 64, optimiser=optimiser)
    assert found.peak == pytest.approx(peak, rel=0.1)  # a recording is some MB of Python


def test_parameters_and_state_are_those_of_the_ledger() -> None:
    for name, model in MODELS.items():
        found, plain = (fn(model, batch=2, length=8) for fn in (program_ledger, ledger))
        assert (found.params, found.state) == (plain.params, plain.state), name
        assert found.inputs > 2 * 2 * 8 * 8 - 1
    assert (
        tree.nbytes(MODELS["GPT"].init()) == program_ledger(MODELS["GPT"], batch=1, length=1).params
    )


def test_a_larger_batch_takes_a_larger_arena() -> None:
    small, large = (program_ledger(MODELS["GPT"], batch=n, length=64) for n in (4, 32))
    assert small.arena < large.arena and small[:2] == large[:2]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="ledger: batch must be an int of at least 1, got 0"):
        program_ledger(MODELS["GPT"], batch=0, length=8)
