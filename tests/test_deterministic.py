"""The same work twice: on the stand-in blocks and threads run in another order each time."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from causal_models import causal
from libraries import ON_DEVICE, only

import xformer
from xformer import RandomKey, backends, tree
from xformer.backends import Backend
from xformer.cli import main
from xformer.cli import train as train_command
from xformer.dispatch.shapes import STORED
from xformer.training import TrainConfig, Windows, loss_of, start, train

V = 37  # of causal_models
GPT = xformer.GPT(vocab_size=V, n_layers=2, d_model=16, n_heads=2, max_len=20, dropout=0.2)
MODELS = {"gpt": lambda: (GPT, GPT.init(0)), "llama": lambda: causal("llama")}


def bits(library: Backend, found: Any) -> dict[str, bytes]:
    return {name: library.to_numpy(a).tobytes() for name, a in tree.flatten(found).items()}


@only(*ON_DEVICE)
@pytest.mark.parametrize("precision", [None, *STORED])
@pytest.mark.parametrize("name", MODELS)
def test_a_step(library: Backend, name: str, precision: str | None) -> None:
    """Loss and gradients; without it those of embeddings differ, and nothing else."""
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="there is no bfloat16: ml_dtypes is missing")
    model, params = MODELS[name]()
    params = tree.map(lambda p: library.asarray(p, "float32"), params)
    weights = library.cast_params(params, precision)
    ids = np.random.default_rng(1).integers(0, 5, (2, 20))
    tokens, targets = library.asarray(ids), library.asarray(ids + 1)
    options: Any = {"dropout_key": RandomKey(3, 1)} if name == "gpt" else {}

    def step() -> dict[str, bytes]:
        loss, cache = model.loss(weights, tokens, targets, **options)
        return bits(library, {"loss": loss, "grads": cache.backward()})

    def differ(context: Any) -> set[str]:
        with context:
            first, *others = (step() for _ in range(3))
        return {name for other in others for name in first if other[name] != first[name]}

    assert differ(library.deterministic()) == set()
    assert differ(nullcontext()) <= {"grads.embed.table"}
    # A device may well repeat itself, and float32 has room for sums of two-byte numbers.
    if library.name not in backends.NAMES and precision is None:
        assert differ(nullcontext())


@only(*ON_DEVICE)
@pytest.mark.parametrize("precision", [None, "float16"])
def test_training(library: Backend, precision: str | None) -> None:
    """A run with everything, twice."""
    text = np.random.default_rng(0).integers(0, 5, 300).astype(np.uint8)
    config = TrainConfig(
        steps=4, batch_size=2, accumulate=2, ema=0.9, eval_every=2, precision=precision
    )
    source = Windows(text, GPT.context, config.batch_size)
    held_out = list(source.held_out(2))

    def run() -> tuple[list[float], dict[str, bytes]]:
        state = start(tree.map(library.asarray, GPT.init(0)), config)
        options: Any = {"held_out": held_out, "donate": True, "deterministic": True}
        steps = list(train(loss_of(GPT), state, source, config, library, **options))
        numbers = [x for s in steps for x in (s.loss, s.norm, s.validation) if x is not None]
        last = steps[-1].state
        return numbers, bits(library, (last.params, last.ema))

    assert run() == run()


def test_the_command_asks_for_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a run may go on with it, or without."""
    asked = []
    real = train_command.train

    def watched(*args: Any, deterministic: bool, **options: Any) -> Any:
        asked.append(deterministic)
        return real(*args, **options)

    monkeypatch.setattr(train_command, "train", watched)
    folder, text = str(tmp_path / "run"), tmp_path / "fox.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    sizes = "--layers 1 --d-model 8 --heads 1 --max-len 8 --batch 2 --steps 4 --data"
    assert main(["train", *sizes.split(), str(text), "--out", folder]) == 0
    capsys.readouterr()
    other = folder + "-2"
    assert main(["train", *sizes.split(), str(text), "--out", other, "--deterministic"]) == 0
    assert asked == [False, True]
    assert main(["train", "--resume", folder, "--deterministic"]) == 0  # which has no steps left


def test_torch_is_asked_for_it() -> None:
    torch = pytest.importorskip("torch", reason="torch is missing")

    def switches() -> tuple[bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    before = switches()
    try:
        for given in ((False, False), (True, True)):
            torch.use_deterministic_algorithms(given[0], warn_only=given[1])
            with backends.get("torch").deterministic():
                assert switches() == (True, False)
            assert switches() == given
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_jax_must_have_been_started_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; XLA reads its flags once."""
    pytest.importorskip("jax", reason="jax is missing")
    place = backends.get("jax")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
    with place.deterministic():
        pass
    monkeypatch.setattr(type(place), "_device", lambda _: SimpleNamespace(platform="gpu"))
    with pytest.raises(ValueError, match="only with XLA_FLAGS=--xla_gpu_deterministic_ops=true"):
        place.deterministic()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to= --xla_gpu_deterministic_ops=true")
    with place.deterministic():
        pass
