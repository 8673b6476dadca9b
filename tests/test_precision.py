"""Training in a precision: weights and activations in two bytes, parameters in float32.

The kernels are in test_cuda_precision.py.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_configs import block_config
from devices import array_type
from libraries import ON_DEVICE, only

import xformer
from xformer import backends, optim, tree
from xformer.backends import Backend
from xformer.backends.cupy.module import driver_of
from xformer.cli import main
from xformer.cli import train as train_command
from xformer.dispatch.shapes import STORED
from xformer.generation import generate
from xformer.layers import EmbedConfig, RopeConfig
from xformer.models import LanguageModel
from xformer.optim import LossScale
from xformer.training import Diverged, TrainConfig, Windows, evaluate, load, loss_of, start, train
from xformer.training.state import read_state, write_state

pytest.importorskip("ml_dtypes", reason="there is no bfloat16: ml_dtypes is missing")

V, CONTEXT = 29, 8
GPT = xformer.GPT(V, n_layers=2, d_model=16, n_heads=2, max_len=CONTEXT, dropout=0.1)
BLOCK = block_config(
    16, n_heads=4, n_kv_heads=2, d_ff=24, activation="silu", gated=True, norm="rms", bias=False
)
LLAMA = LanguageModel(
    EmbedConfig(V, 16, 16, positions="none"), (BLOCK, BLOCK), rotary=RopeConfig(4)
)
MODELS = {"gpt": GPT, "llama": LLAMA}
# Of the losses of 12 steps, against float32: about four roundings.
WITHIN = {"bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11}
in_both = pytest.mark.parametrize("precision", STORED)
on_device = only(*ON_DEVICE)


def source() -> Windows:
    """A text that a model of 16 channels learns something of."""
    text = np.tile(np.random.default_rng(0).integers(0, V, 40), 12).astype(np.uint8)
    return Windows(text, CONTEXT, batch_size=2)


def config(precision: str | None, **options: Any) -> TrainConfig:
    return TrainConfig(
        **{"steps": 12, "lr": 1e-2, "warmup": 2, "eval_every": 6, **options}, precision=precision
    )


def begun(library: Backend, model: Any, how: TrainConfig) -> Any:
    return start(tree.map(library.asarray, model.init(0)), how)


def losses(library: Backend, model: Any, how: TrainConfig) -> tuple[list[float], Any]:
    """Of each step and of the validations; the last step."""
    data = source()
    options: Any = {"held_out": list(data.held_out(1)), "donate": True}
    steps = list(train(loss_of(model), begun(library, model, how), data, how, library, **options))
    validations = [step.validation for step in steps if step.validation is not None]
    return [*(step.loss for step in steps), *validations], steps[-1]


@on_device
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_near_those_of_float32(library: Backend, name: str) -> None:
    """In training and validation; it does learn, and what it keeps is float32."""
    model = MODELS[name]
    wanted, _ = losses(backends.get(), model, config(None, ema=0.5))
    assert wanted[11] < wanted[0] - 0.2
    for precision in STORED:
        got, last = losses(library, model, config(precision, ema=0.5))
        assert got == pytest.approx(wanted, rel=WITHIN[precision])
        assert got != pytest.approx(wanted, rel=1e-5)  # it is not float32 that ran
        weights = library.cast_params(last.state.averaged, precision)
        held_out = list(source().held_out(1))
        assert last.validation == evaluate(loss_of(model), weights, held_out, library)
        kept = tree.flatten((last.state.params, last.state.optimiser, last.state.ema))
        kinds = {a.dtype.name for a in kept.values() if hasattr(a, "dtype")}
        assert kinds == {"float32"}


@on_device
@in_both
@pytest.mark.parametrize("name", MODELS)
def test_what_is_stored_in_it(
    library: Backend, monkeypatch: pytest.MonkeyPatch, precision: str, name: str
) -> None:
    """All weights and activations; losses and gradients of parameters are float32."""
    kinds: dict[str, set[str]] = {}
    arrays = array_type(library)
    launch = driver_of(arrays).launch

    def noted(source: Any, name: str, like: Any, *rest: Any) -> None:
        kinds.setdefault(name, set()).add(like.dtype.name)
        launch(source, name, like, *rest)

    monkeypatch.setattr(driver_of(arrays), "launch", noted)
    model = MODELS[name]
    params = tree.map(library.asarray, model.init(0))
    weights = library.cast_params(params, precision)
    assert {w.dtype.name for w in tree.flatten(weights).values()} == {precision}
    tokens = library.asarray(np.arange(12).reshape(2, 6))
    loss, cache = model.loss(weights, tokens, tokens)
    grads = cache.backward()
    assert loss.dtype.name == "float32"
    optim.adamw(params, grads, optim.adamw_init(params), lr=0.1)  # which compares dtypes
    sums = {"column_sums", "token_total"}  # of what was summed in float32 before
    assert {k for k, dtypes in kinds.items() if "float32" in dtypes} <= sums | {"adamw"}
    assert {k for k, dtypes in kinds.items() if precision not in dtypes} <= sums | {"adamw"}


@on_device
def test_gradients_that_are_frozen(library: Backend) -> None:
    params = tree.freeze(tree.map(library.asarray, GPT.init(0)), "embed.*")
    how = config("bfloat16", steps=2)
    steps = list(train(loss_of(GPT), start(params, how), source(), how, library))
    assert steps[-1].params.embed.table is params.embed.table


# ---- The scale of the loss ----


@on_device
def test_gradients_that_overflow_are_left_out(library: Backend) -> None:
    """With as many steps as there are to be, of later batches; the scale is kept."""
    how = config("float16", steps=4)
    state = begun(library, GPT, how)
    assert state.loss_scale == LossScale(65536.0)
    state = state._replace(loss_scale=LossScale(2.0**26))
    steps = list(train(loss_of(GPT), state, source(), how, library))
    last = steps[-1].state
    assert [step.step for step in steps] == [1, 2, 3, 4]
    skipped = last.batches - 4
    assert 2 < skipped < 20
    assert last.loss_scale == LossScale(
        2.0 ** (26 - skipped), good_steps=last.loss_scale.good_steps
    )
    assert last.tokens == last.batches * 2 * CONTEXT
    assert all(np.isfinite(step.loss) and np.isfinite(step.norm) for step in steps)


@on_device
def test_the_scale_changes_nothing_but_the_range(library: Backend) -> None:
    """Gradients come out unscaled: those of float16 are near those of no scale."""
    how = config("float16", steps=1, clip=None)
    norms = []
    for scale in (1.0, 1024.0):
        state = begun(library, GPT, how)._replace(loss_scale=LossScale(scale))
        (step,) = train(loss_of(GPT), state, source(), how, library)
        norms.append(step.norm)
    assert norms[0] == pytest.approx(norms[1], rel=2e-3)


@on_device
def test_a_loss_that_is_no_number_ends_training(library: Backend) -> None:
    how = config("float16")
    params = tree.map(library.asarray, GPT.init(0))
    broken = params.embed._replace(table=library.asarray(np.full((V, 16), np.nan, np.float32)))
    state = start(params._replace(embed=broken), how)
    with pytest.raises(Diverged, match="the loss of step 1 is nan"):
        next(iter(train(loss_of(GPT), state, source(), how, library)))


@on_device
def test_gradients_that_no_scale_saves(library: Backend) -> None:
    class Endless:
        def backward(self, dloss: Any) -> Any:
            return {"w": dloss * float("inf")}

    how, params = config("float16"), {"w": library.asarray(np.ones((), np.float32))}

    def loss(weights: Any, *_: Any) -> Any:
        return library.asarray(np.ones((), np.float32)), Endless()

    with pytest.raises(Diverged, match="step 1: update: gradients are not finite at a scale of"):
        next(iter(train(loss, start(params, how), source(), how, library)))


# ---- A run in a precision ----


@on_device
@in_both
def test_it_goes_on_from_a_checkpoint(library: Backend, tmp_path: Path, precision: str) -> None:
    """The same losses; the file has float32 and the scale."""
    how = config(precision, steps=4)
    state = begun(library, LLAMA, how)
    steps = list(train(loss_of(LLAMA), state, source(), how, library))
    write_state(tmp_path / "state", steps[1].state, library)
    saved = read_state(tmp_path / "state")
    assert {a.dtype.name for a in saved.arrays.values()} == {"float32"}
    assert ("loss_scale.scale" in saved.numbers) == (precision == "float16")
    state = saved.restored(begun(library, LLAMA, how), library)
    assert state.loss_scale == steps[1].state.loss_scale
    again = list(train(loss_of(LLAMA), state, source(), how, library))
    # Additions at repeated ids come in another order on the stand-in each time.
    assert [s.loss for s in again] == pytest.approx([s.loss for s in steps[2:]], rel=1e-3)


@on_device
@in_both
@pytest.mark.parametrize("name", MODELS)
def test_generation(library: Backend, precision: str, name: str) -> None:
    """The likeliest ids of a model whose logits lie apart are those of float32."""
    model = MODELS[name]
    params = tree.map(lambda p: np.float32(3) * p if p.ndim > 1 else p, model.init(0))
    wanted = generate(model, params, [[1, 2, 3], [5]], max_new_tokens=4)
    weights = library.cast_params(tree.map(library.asarray, params), precision)
    assert generate(model, weights, [[1, 2, 3], [5]], max_new_tokens=4) == wanted


@on_device
def test_validation_is_in_the_precision_of_the_weights(library: Backend) -> None:
    params = tree.map(library.asarray, GPT.init(0))
    held_out = list(source().held_out(1))
    exact = evaluate(loss_of(GPT), params, held_out, library)
    found = evaluate(loss_of(GPT), library.cast_params(params, "bfloat16"), held_out, library)
    assert found == pytest.approx(exact, rel=WITHIN["bfloat16"])
    assert found != exact


@on_device
@in_both
def test_the_command(
    library: Backend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    precision: str,
) -> None:
    """A run, stopped and gone on with, and a text by what it keeps, which is float32."""
    text, folder = tmp_path / "fox.txt", str(tmp_path / "run")
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    monkeypatch.setattr(backends, "get", lambda *_: library)
    real, sample = train_command.train, train_command.stream_text
    shortly = partial(sample, max_new_tokens=3)
    monkeypatch.setattr(
        train_command, "stream_text", lambda *a, max_new_tokens, **options: shortly(*a, **options)
    )
    with monkeypatch.context() as patch:
        patch.setattr(train_command, "train", lambda *a, **o: islice(real(*a, **o), 2))
        sizes = (
            "--layers 1 --d-model 16 --heads 2 --max-len 8 --batch 2 --steps 4 --validate-every 2"
        )
        given = ["--data", str(text), "--out", folder, "--precision", precision]
        assert main(["train", *sizes.split(), *given]) == 0
    assert main(["train", "--resume", folder]) == 0
    assert "resuming after step 2" in capsys.readouterr().out
    _, params = load(folder, library)
    assert {p.dtype.name for p in tree.flatten(params).values()} == {"float32"}
    assert main(["generate", "--model", folder, "--prompt", "the ", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("the ")


def test_what_is_no_precision() -> None:
    with pytest.raises(ValueError, match="precision must be one of bfloat16, float16, got 'half'"):
        config("half")
    with pytest.raises(
        ValueError, match="backend numpy stores numbers in float32 and float64, not"
    ):
        start(GPT.init(0), config("bfloat16"))


@on_device
def test_without_the_dtype_of_bfloat16(library: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which CuPy works without; the error comes before the first step, and names the extras."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    params = tree.map(library.asarray, GPT.init(0))
    start(params, config("float16"))
    said = r"ml_dtypes is not installed: pip install 'xformer-array\[cuda13\]'"
    with pytest.raises(ImportError, match=said):
        start(params, config("bfloat16"))
    with pytest.raises(ImportError, match=said):
        library.cast_params(params, "bfloat16")


def test_the_command_refuses_it_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    command = ["train", "--preset", "tiny", "--out", str(folder), "--precision", "bfloat16"]
    assert main(command) != 0
    assert (
        "backend numpy stores numbers in float32 and float64, not bfloat16; backend cupy does"
        in capsys.readouterr().err
    )
    assert main([*command, "--dtype", "float64"]) != 0
    assert "--precision needs --dtype float32, got float64" in capsys.readouterr().err
    assert not folder.exists()
