"""A layer of one's own in place of the feed-forward network; wrong layers are named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import xformer as xf
from xformer import layers, training
from xformer.base import tree
from xformer.finetune import lora

GPT = xf.GPT(vocab_size=7, n_layers=2, d_model=8, n_heads=2, max_len=6)
TOKENS, TARGETS = np.random.default_rng(0).integers(0, 7, (2, 3, 6))


@dataclass(frozen=True)
class BilinearConfig(layers.LayerConfig):
    units: int

    def init(self, rng: Any, d_model: int, *, draw: Any, out_scale: float = 1.0) -> BilinearParams:
        shape = (d_model, self.units)
        a, b = (layers.LinearParams.init(rng, shape, draw=draw, bias=False) for _ in range(2))
        out = layers.LinearParams.init(rng, shape[::-1], draw=draw, bias=False, scale=out_scale)
        return BilinearParams(a, b, rng.full((self.units,), 1.0), out)

    def forward(self, x: Any, params: Any, side: Any, norm: Any, context: Any) -> tuple[Any, Any]:
        (a, b), into = layers.linear_many(x, (params.a, params.b))
        gain = tree.value(params.gain)
        y, out = layers.linear(a * b * gain, params.out)
        return y, BilinearCache(into, a, b, gain, isinstance(params.gain, tree.Frozen), out)


class BilinearParams(NamedTuple):
    a: layers.LinearParams
    b: layers.LinearParams
    gain: Any
    out: layers.LinearParams


class BilinearCache(NamedTuple):
    into: Any
    a: Any
    b: Any
    gain: Any
    frozen: bool
    out: Any

    def backward(self, dy: Any) -> tuple[Any, BilinearParams]:
        dh, dout = self.out.backward(dy)
        dgain = None if self.frozen else (dh * self.a * self.b).sum(axis=(0, 1))
        dh = dh * self.gain
        dx, (da, db) = self.into.backward(dh * self.b, dh * self.a)
        return dx, BilinearParams(da, db, dgain, dout)


MODEL = replace(GPT, blocks=tuple(replace(b, ffn=BilinearConfig(12)) for b in GPT.blocks))


def loss(params: Any, model: Any = MODEL) -> Any:
    return model.loss(params, TOKENS, TARGETS)


def test_gradients() -> None:
    xf.gradcheck(loss, MODEL.init(0, dtype="float64"), alone=False).require()


def test_checkpointed_frozen_and_adapted() -> None:
    params = MODEL.init(0)
    wanted = tree.flatten(loss(params)[1].backward())
    again = loss(params, replace(MODEL, activation_checkpointing=True))[1].backward()
    assert all(np.array_equal(a, wanted[name]) for name, a in tree.flatten(again).items())
    frozen = tree.freeze(params, "*.ffn.*")
    got = tree.flatten(loss(frozen)[1].backward())
    assert got.keys() == {name for name in wanted if ".ffn." not in name}
    adapted = lora.attach(params, 2, 4.0, ("*.ffn.out",))
    assert any(".ffn.out.b" in name for name in tree.flatten(loss(adapted)[1].backward()))


def test_a_run_refuses_the_model_before_the_first_step(tmp_path: Path) -> None:
    config = training.TrainConfig(3, batch_size=2)
    start = training.start(MODEL.init(0), config)
    said = r"begin: the model must have .* got a BilinearConfig, .*; a Run without model= stores"
    run = training.Run(tmp_path / "run", "numpy", {}, model=MODEL)
    with run, pytest.raises(TypeError, match=said):
        run.begin(start)
    with training.Run(tmp_path / "run", "numpy", {}) as run:
        assert run.begin(start).step == 0


class Other:
    d_model = 8

    def forward(self) -> None:
        """Not of a layer."""


class Empty(layers.LayerConfig):
    pass


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn": Other()}, "block: attn must be an AttentionConfig or a layers.LayerConfig, got"),
        ({"ffn": Other()}, "block: ffn must be a FeedForwardConfig or a layers.LayerConfig, got"),
        (
            {"attn": Empty()},
            r"block: attn must have init, forward, d_model, got Empty without",
        ),
        ({"ffn": Empty()}, r"block: ffn must have init, forward, got Empty without init and forw"),
    ],
)
def test_what_is_no_layer(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        replace(GPT.blocks[0], **changes)


def test_gradients_of_another_type_are_named() -> None:
    class Cache(NamedTuple):
        params: Any

        def backward(self, dy: Any) -> Any:
            return {"v": dy}

    said = r"gradient of p.v, .*; the gradient of p must be of its type, LinearParams, got dict"
    with pytest.raises(ValueError, match=said):
        xf.gradcheck(lambda p: (p.w, Cache(p)), layers.LinearParams(np.ones((2, 2)), None))


def test_a_list_of_patterns() -> None:
    with pytest.raises(TypeError, match=r"freeze: each pattern must be a string, got \['a'\]"):
        tree.freeze({"a": np.ones(2)}, ["a"])  # type: ignore[arg-type]


def test_a_recurrent_state_without_a_convolution() -> None:
    """Beam search picks rows of it."""
    state = layers.RecurrentState(state=np.arange(6.0).reshape(3, 2))
    found = state.rows(np.array([2, 0, 2]))
    assert found.conv is None and np.array_equal(found.state, [[4, 5], [0, 1], [4, 5]])
