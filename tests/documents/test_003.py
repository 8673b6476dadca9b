"""Document 003, a notebook: attention layers and an encoder-decoder, all with backward.

Its own gradient checks leave relative errors of up to 3.1e-8 for the layers and 3.2e-4 for the
encoder-decoder. Here every element of every gradient agrees to 1e-7, by the same metric:
max |a - b| / max(|a| + |b|, 1e-8).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numerical import TWO_POINT, numerical_gradient, relative_error
from printed import Printed

import xformer
from xformer import layers, reference_only, tree
from xformer.models import EncoderDecoder

PRINTED = Printed("003")
N, T, T_DEC, D, M, H = 3, 2, 4, 4, 3, 3

RTOL = 1e-7
# Rounding grows as the step shrinks, curvature and the kinks of ReLU count as it grows.
STEP = 1e-3


@functools.cache
def draws() -> SimpleNamespace:
    """The document's random arrays, in its order (and in the legacy generator it uses)."""
    rng = np.random.RandomState(42)
    s = SimpleNamespace(x=rng.randn(T, D))
    s.w_k, s.w_q, s.w_v = (rng.randn(D, M) for _ in range(3))
    s.w_o = rng.randn(H * M, D)
    s.memory, s.x_dec = rng.randn(T, D), rng.randn(T_DEC, D)
    s.allowed = np.array([[True, False], [True, True]])  # here True = may attend
    return s


def params(n_heads: int, w_o: np.ndarray | None) -> layers.AttentionParams:
    """`n_heads` equal heads, side by side."""
    s = draws()
    q, k, v = (layers.LinearParams(np.tile(w, n_heads), None) for w in (s.w_q, s.w_k, s.w_v))
    o = None if w_o is None else layers.LinearParams(w_o, None)
    return layers.AttentionParams(q, layers.KeyValueParams(k, v), o)


def heads(n_heads: int) -> layers.AttentionConfig:
    return layers.AttentionConfig(D, n_heads, d_head=M)


@functools.cache
@reference_only()
def arrays() -> dict[str, np.ndarray]:
    """Every array the document prints before its encoder-decoder, by this library's layers."""
    s = draws()
    out = {name: getattr(s, name) for name in ("x", "w_k", "w_q", "w_v", "w_o")}
    one, many, merged = params(1, None), params(H, s.w_o), params(H, None)
    batch = np.stack([s.x] * N)

    z, cache = layers.attention(s.x, one, config=heads(1))
    out["keys"], out["queries"] = cache.core.k[0, 0], cache.core.q[0, 0]
    out["values"] = out["values_masked"] = cache.core.v[0, 0]
    out["probs"] = cache.core.probs[0, 0]
    out["z_naive"] = out["z_one_product"] = out["z"] = z
    out["z_batch"] = layers.attention(batch, one, config=heads(1))[0]
    out["z_masked"] = layers.attention(
        batch,
        one,
        config=heads(1),
        context=layers.Context(mask=s.allowed),
    )[0]

    out["heads"] = layers.attention(batch, merged, config=heads(H))[0]
    out["heads_masked"] = layers.attention(
        batch,
        merged,
        config=heads(H),
        context=layers.Context(mask=s.allowed),
    )[0]
    out["z_heads"] = out["z_heads_naive"] = layers.attention(batch, many, config=heads(H))[0]
    out["z_heads_masked"] = layers.attention(
        batch,
        many,
        config=heads(H),
        context=layers.Context(mask=s.allowed),
    )[0]

    out["z_cross_naive"], _ = layers.attention(
        s.x_dec,
        one,
        layers.SideInputs(s.memory),
        config=heads(1),
    )
    x, memory = np.stack([s.x_dec] * 2), np.stack([s.memory] * 2)
    out["z_cross"] = layers.attention(x, one, layers.SideInputs(memory), config=heads(1))[0]
    out["heads_cross"] = layers.attention(x, merged, layers.SideInputs(memory), config=heads(H))[0]
    heads_cross = layers.attention(x, many, layers.SideInputs(memory), config=heads(H))[0]
    out["z_heads_cross"] = out["z_heads_cross_naive"] = heads_cross
    return out


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """The document's example: source (2, 4), target (2, 8)."""
    rng = np.random.RandomState(13)
    return rng.randint(0, 10, size=(2, 4)), rng.randint(0, 10, size=(2, 8))


def examples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The source, what the decoder reads of the target, and the token after each of them."""
    src, tgt = tokens()
    return src, tgt[:, :-1], tgt[:, 1:]


def test_every_printed_array_has_its_test() -> None:
    assert sorted(PRINTED.names) == sorted([*arrays(), "src", "tgt"])


@pytest.mark.parametrize("name", sorted(arrays()))
def test_forward(name: str) -> None:
    PRINTED.check(name, arrays()[name])


def test_example_tokens() -> None:
    for name, ids in zip(("src", "tgt"), tokens(), strict=True):
        PRINTED.check(name, ids)


# --- the layers' gradients --------------------------------------------------------------------


class Layer(NamedTuple):
    """A layer, its arguments in the document, and the largest error that is printed for it."""

    run: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    worst: float | None  # None where the document checks nothing


def attention(n_heads: int, **options: Any) -> Callable[..., Any]:
    def run(x: Any, params: Any, side: Any = layers.SideInputs()) -> Any:
        return layers.attention(x, params, side, config=heads(n_heads), **options)

    return run


class AroundAttention(NamedTuple):
    """Cache of `residual`, less the gradients of the norms and the scale it does not have."""

    cache: Any

    def backward(self, dy: np.ndarray) -> tuple[Any, ...]:
        dx, _, _, _, *rest = self.cache.backward(dy)
        return dx, *rest


def residual(x: np.ndarray, params: Any) -> tuple[np.ndarray, AroundAttention]:
    y, cache = layers.residual(
        x,
        None,
        lambda x: layers.attention(x, params, config=heads(H)),
    )
    return y, AroundAttention(cache)


def self_args(n: int, n_heads: int) -> Callable[[], tuple[Any, ...]]:
    w_o = draws().w_o if n_heads > 1 else None
    return lambda: (np.stack([draws().x] * n), params(n_heads, w_o))


def cross_args(n_heads: int) -> Callable[[], tuple[Any, ...]]:
    s = draws()
    w_o = s.w_o if n_heads > 1 else None
    side = layers.SideInputs(np.stack([s.memory] * 2))
    return lambda: (np.stack([s.x_dec] * 2), params(n_heads, w_o), side)


MASK = {"context": layers.Context(draws().allowed)}
LAYERS = {
    "self-attention": Layer(attention(1), self_args(1, 1), 3.938783e-09),
    "batched": Layer(attention(1), self_args(N, 1), 4.305619e-09),
    "masked": Layer(attention(1, **MASK), self_args(N, 1), 1.066312e-08),
    "multi-head": Layer(attention(H), self_args(N, H), 5.043319e-09),
    "masked multi-head": Layer(attention(H, **MASK), self_args(N, H), 8.872991e-09),
    "cross": Layer(attention(1), cross_args(1), 1.397881e-09),
    "multi-head cross": Layer(attention(H), cross_args(H), 3.060167e-08),
    "residual": Layer(residual, self_args(N, H), None),
}


def errors(layer: Layer, args: tuple[Any, ...], dz: Any) -> dict[str, float]:
    """Relative error of the gradient of sum(z * dz) by each array of `args`."""

    def loss(args: tuple[Any, ...]) -> float:
        return float(np.sum(layer.run(*args)[0] * dz))

    _, cache = layer.run(*args)
    grads = tree.flatten(cache.backward(dz)[: len(args)])
    return {
        name: relative_error(grads[name], numerical_gradient(loss, args, name, step=STEP))
        for name in tree.flatten(args)
    }


@pytest.mark.parametrize("name", LAYERS)
def test_layer_gradients_on_the_documents_input(name: str) -> None:
    """With its loss, the sum of the output; the errors it prints are the ones to beat."""
    layer = LAYERS[name]
    args = layer.args()
    errors_by_name = errors(layer, args, np.ones_like(layer.run(*args)[0]))
    assert max(errors_by_name.values()) < RTOL, errors_by_name
    if layer.worst is not None:
        assert max(errors_by_name.values()) < layer.worst, errors_by_name


@pytest.mark.parametrize("name", LAYERS)
def test_layer_gradients_on_random_input(name: str) -> None:
    """Examples, heads and upstream gradients all different: a mix-up among them shows."""
    layer = LAYERS[name]
    rng = np.random.default_rng(7)
    args = tree.map(lambda a: rng.standard_normal(a.shape), layer.args())
    errors_by_name = errors(layer, args, rng.standard_normal(layer.run(*args)[0].shape))
    assert max(errors_by_name.values()) < RTOL, errors_by_name


# --- the encoder-decoder ----------------------------------------------------------------------

# D, M and h of the document, two layers each, its vocabularies and widths of embeddings, and one
# key and one value projection of the encoder's output for all decoder layers. Its width of the
# feed-forward network is not said; 5 is a number it names "hidden" and uses nowhere.
SIZES: dict[str, Any] = {
    "src_vocab_size": 10,
    "tgt_vocab_size": 10,
    "src_width": 4,
    "tgt_width": 4,
    "d_model": 4,
    "d_head": 3,
    "n_heads": 5,
    "d_ff": 5,
    "n_encoder_layers": 2,
    "n_decoder_layers": 2,
    "max_len": 8,
    "pad_id": 0,
    "shared_memory": True,
}
# Of 1,200 seeds one whose 220 inputs of ReLU all keep away from 0 (by 0.025), while no derivative
# that is not 0 is so small (1.1e-5) that it drowns in rounding.
MODEL_SEED = 577
MODEL_STEP = 7e-4


def model_and_params(**options: Any) -> tuple[EncoderDecoder, Any]:
    """The model, and parameters that are `moved`: else all biases are 0 and all norms alike."""
    model = xformer.Transformer(**SIZES | options)
    return model, moved(model)


def moved(model: Any) -> Any:
    """Initial parameters, moved at random."""
    rng = np.random.default_rng(MODEL_SEED)
    start = model.init(seed=MODEL_SEED, dtype="float64")
    return tree.map(lambda p: p + 0.1 * rng.standard_normal(p.shape), start)


def model_loss(model: EncoderDecoder) -> Callable[[Any], float]:
    return lambda params: float(model.loss(params, *examples())[0])


@functools.cache
def model_gradients() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By hand, and by numbers, for each parameter."""
    model, params = model_and_params()
    _, cache = model.loss(params, *examples())
    loss = model_loss(model)
    return {
        name: (gradient, numerical_gradient(loss, params, name, step=MODEL_STEP))
        for name, gradient in tree.flatten(cache.backward()).items()
    }


PARAMETERS = tuple(tree.flatten(model_and_params()[1]))
# Adding one vector to all keys adds one number to all scores of a query: softmax does not move.
KEY_BIASES = tuple(name for name in PARAMETERS if name.endswith(".k.b"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in KEY_BIASES])
def test_model_gradient(name: str) -> None:
    by_hand, by_numbers = model_gradients()[name]
    assert relative_error(by_hand, by_numbers) < RTOL


@pytest.mark.slow
@pytest.mark.parametrize("name", KEY_BIASES)
def test_model_gradient_of_a_key_bias_is_zero(name: str) -> None:
    """So only rounding is left, and a relative error says nothing."""
    by_hand, by_numbers = model_gradients()[name]
    assert np.max(np.abs(by_hand)) < 1e-16
    assert np.max(np.abs(by_numbers)) < 1e-11


def test_shared_memory_has_the_documents_parameters() -> None:
    """Each decoder layer has its own cross-attention queries and output; keys and values: one."""
    cross = {name for name in PARAMETERS if ".cross." in name and name.endswith(".w")}
    assert cross == {f"decoder.blocks.{i}.cross.{p}.w" for i in (0, 1) for p in ("q", "o")}
    assert {"decoder.memory.k.w", "decoder.memory.v.w"} <= set(PARAMETERS)


@pytest.mark.slow
def test_the_documents_numerical_gradient_was_the_inexact_one() -> None:
    """Two points 1e-6 away leave 1e-6 to 1e-4 where four points 7e-4 apart leave 1e-8."""
    model, params = model_and_params()
    name = "encoder.blocks.0.attn.q.w"
    by_hand, by_numbers = model_gradients()[name]
    as_printed = numerical_gradient(model_loss(model), params, name, step=1e-6, rule=TWO_POINT)
    assert relative_error(by_hand, as_printed) > 1e-6
    assert relative_error(by_hand, by_numbers) < RTOL


@pytest.mark.parametrize("mode", ["concat", "add", "qkv"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_model_gradients_with_every_kind_of_positions(positions: str, mode: str) -> None:
    d_positions = 2 if mode == "concat" else None
    options = {"positions": positions, "position_mode": mode, "d_positions": d_positions}
    model, params = model_and_params(**options)
    xformer.gradcheck(lambda p: model.loss(p, *examples()), params, alone=False).require()


def test_model_gradients_with_a_feed_forward_of_one_map() -> None:
    """The names of its parameters allow for one weight in each network, here (D, D)."""
    model, _ = model_and_params()
    ffn = layers.FeedForwardConfig(model.encoder[0].d_model, "relu", down=False)
    blocks = (dataclasses.replace(model.encoder[0], ffn=ffn),) * 2
    model = dataclasses.replace(model, encoder=blocks, decoder=blocks)
    params = moved(model)
    names = {name.split(".", 3)[3] for name in tree.flatten(params) if ".ffn." in name}
    assert names == {"ffn.up.w", "ffn.up.b"}
    xformer.gradcheck(lambda p: model.loss(p, *examples()), params, alone=False).require()
