"""Models that cannot be trained in two bytes are refused, with the reason, before a step runs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xformer import GPT, backends, layers, ops, training
from xformer.cli import main
from xformer.models.precision import require_reducible
from xformer.training import Streams, TrainConfig, Windows

NUMPY = backends.get("numpy")
SIZES: Any = {"vocab_size": 11, "n_layers": 2, "d_model": 8, "n_heads": 2, "max_len": 4}
SAID = {
    "reversible": "reversible: backward rebuilds the input of each block from its output",
    "residual_scale": "residual_scale: ops.scale has no kernel for it; train in float32",
    "xl": "attn.xl: ops.xl_attention has no kernel for it; train in float32",
}
OPTIONS: dict[str, Any] = {
    "reversible": {"reversible": True},
    "residual_scale": {"residual_scale": 0.0},
    "xl": {"positions": "xl", "memory_len": 4},
}


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_training_is_refused(name: str, precision: str) -> None:
    gpt = GPT(**SIZES, **OPTIONS[name])
    config = TrainConfig(steps=1, batch_size=2, precision=precision)
    loss: Any = training.segment_loss_of(gpt) if name == "xl" else training.loss_of(gpt)
    source = (Streams if name == "xl" else Windows)(np.arange(99) % 11, 4, 2)
    plain = TrainConfig(steps=1, batch_size=2)
    state = training.start(gpt.init(), plain, loss=loss)
    next(iter(training.train(loss, state, source, plain, NUMPY)))  # in float32 it trains
    message = f"train: precision {precision} excludes {SAID[name]}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        next(iter(training.train(loss, state, source, config, NUMPY)))


def test_a_fixed_multiplier_is_refused() -> None:
    network = GPT(**SIZES)
    block = dataclasses.replace(network.blocks[0], residual_multiplier=0.22)
    granite = dataclasses.replace(network, blocks=(block,) * 2)
    message = "train: precision bfloat16 excludes residual_multiplier: no kernel multiplies by it"
    with pytest.raises(ValueError, match=f"^{message}; train in float32$"):
        require_reducible("train", granite, "bfloat16")
    require_reducible("train", granite, None)


def test_other_models_pass() -> None:
    require_reducible("train", GPT(**SIZES), "bfloat16")
    require_reducible("train", GPT(**SIZES, reversible=True), None)
    require_reducible("train", None, "bfloat16")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--reversible"], "reversible"),
        (["--norm-placement", "none", "--residual-scale", "0"], "residual_scale"),
        (["--positions", "xl"], "xl"),
    ],
)
def test_the_command_refuses_before_it_makes_a_folder(
    options: list[str], name: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(backends.Backend, "require_precision", lambda *_: None)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question " * 400)
    out = tmp_path / "run"
    command = ["train", "--precision", "bfloat16", "--backend", "numpy", "--out", str(out)]
    assert main([*command, "--data", str(tmp_path / "text.txt"), *options]) != 0
    assert f"--precision: precision bfloat16 excludes {SAID[name]}" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_ops_and_layers_say_what_to_do(name: str) -> None:
    dtype: Any = np.float16
    if name == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="ml_dtypes is missing").bfloat16
    x = np.ones((2, 4, 8), dtype)
    with pytest.raises(
        TypeError,
        match=rf"^scale: x must be float32 or float64, got {name}, which no kernel of scale for "
        r"numpy reads; convert it to float32, or run the model without a precision$",
    ):
        ops.scale(x, np.ones(1, dtype))
    gpt = GPT(**SIZES, reversible=True)
    blocks = gpt.init().stack.blocks
    with pytest.raises(
        TypeError,
        match=r"^blocks: reversible blocks must be float32 or float64, since backward rebuilds "
        rf"their inputs, got {name}$",
    ):
        layers.blocks(x, blocks, configs=gpt.blocks, context=layers.Context(causal=True))
