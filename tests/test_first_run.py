"""What a first run on a GPU has to show, the riskiest first.

    python -m pytest --backend cupy -rs tests/test_first_run.py

Sizes are real ones on a GPU and toys on the stand-in; sizes around tiles, packs and blocks are in
test_cuda_*.py. Skips say which library is missing, and what cuBLASLt has no algorithm for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from devices import is_stand_in, placed
from libraries import ON_DEVICE, only
from nvidia import (
    asked,
    by_cublas,
    calling_cublaslt,
    calling_cudnn,
    require_algorithm,
    without_cudnn,
)
from stored import DTYPES, dtype_of, in_both, normal, on, require_exact, rounded

import xformer
from xformer import RandomKey, explain, layers, ops, tree
from xformer.backends import Backend
from xformer.backends.cupy import deterministic, flash, linear_cross_entropy, sdpa_cudnn
from xformer.backends.cupy import sdpa as tiles
from xformer.backends.cupy.cublaslt import multiply
from xformer.generation import generate
from xformer.layers import FeedForwardParams, LinearParams, NormConfig, NormParams
from xformer.training import Batch, TrainConfig, loss_of, start, train

pytestmark = only(*ON_DEVICE)

in_all = pytest.mark.parametrize("precision", ["float32", *DTYPES])


def sized(library: Backend, real: Any, toy: Any) -> Any:
    """The size on a GPU, or on the stand-in."""
    return toy if is_stand_in(library) else real


# ---- Attention: by cuDNN, by tensor cores, by float32; who is asked ----


class Size(NamedTuple):
    heads: tuple[int, int]  # of queries, and of keys and values
    width: int
    lengths: tuple[int, int]  # queries, keys


class Shape(NamedTuple):
    """On a GPU, and on the stand-in."""

    real: Size
    toy: Size

    def arrays(self, library: Backend) -> list[np.ndarray]:
        (h, g), width, (t, s) = sized(library, self.real, self.toy)
        shapes = ((2, n, length, width) for n, length in ((h, t), (g, s), (g, s)))
        return [normal(i, *shape) for i, shape in enumerate(shapes)]


GPT2 = Shape(Size((4, 4), 64, (512, 512)), Size((1, 1), 8, (64, 64)))
LLAMA = Shape(Size((4, 2), 128, (512, 512)), Size((2, 1), 16, (64, 64)))
LONGER = Shape(Size((4, 4), 64, (256, 512)), Size((1, 1), 8, (64, 128)))
UNEVEN = Shape(Size((2, 1), 40, (483, 517)), Size((2, 1), 8, (19, 23)))
TOKENS = Shape(Size((2, 2), 64, (3, 300)), Size((1, 1), 8, (3, 130)))
BOUNDS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (40, 0)})
CAPPED: dict[str, Any] = {"softcap": 5.0, "causal": True}
DROPPED: dict[str, Any] = {"dropout_rate": 0.2, "dropout_key": RandomKey(1, 2, 3), "causal": True}


def require_attention(
    library: Backend, precision: str, shape: Shape, run: Callable[..., Any], **options: Any
) -> None:
    """The gradients go by ctx as it is stored, which is one rounding more."""
    options |= {"run": run, "roundings": 1 if precision == "float32" else 2}
    options |= {"in_any_order": run is sdpa_cudnn.sdpa}
    require_exact(library, precision, ops.sdpa, *shape.arrays(library), **options)


@in_both
@pytest.mark.parametrize("options", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [GPT2, LLAMA, LONGER], ids=["gpt2", "llama", "longer"])
def test_attention_by_cudnn(library: Backend, shape: Shape, options: Any, precision: str) -> None:
    with calling_cudnn(library):
        q, k, v = (on(library, x, DTYPES[precision]) for x in shape.arrays(library))
        said = explain(ops.sdpa, q, k, v, **options).partition("\n")[0]
        assert said.endswith("sdpa_cudnn.sdpa"), said
        require_attention(library, precision, shape, sdpa_cudnn.sdpa, **options)


@in_both
@pytest.mark.parametrize("options", [*BOUNDS, CAPPED, DROPPED], ids=str)
@pytest.mark.parametrize("shape", [GPT2, LLAMA, UNEVEN], ids=["gpt2", "llama", "uneven"])
def test_attention_by_tensor_cores(
    library: Backend, shape: Shape, options: Any, precision: str
) -> None:
    with without_cudnn(library):
        require_attention(library, precision, shape, flash.sdpa, **options)


@in_all
@pytest.mark.parametrize("options", [*BOUNDS, CAPPED, DROPPED], ids=str)
@pytest.mark.parametrize("shape", [UNEVEN, TOKENS], ids=["uneven", "tokens"])
def test_attention_in_float32(library: Backend, shape: Shape, options: Any, precision: str) -> None:
    require_attention(library, precision, shape, tiles.sdpa, **options)


@in_both
def test_a_mask(library: Backend, precision: str) -> None:
    """With a query that sees nothing."""
    (t, s), rng = sized(library, *UNEVEN).lengths, np.random.default_rng(2)
    mask = rng.random((2, 1, t, s)) < 0.6
    mask[0, :, 11] = False
    require_exact(library, precision, ops.sdpa, *UNEVEN.arrays(library), roundings=2, mask=mask)


# ---- Products by cuBLASLt: layouts, sums, biases ----

SIZES = {  # rows, the sum's length, columns: on a GPU, and on the stand-in
    "feed-forward": ((256, 768, 3072), (16, 24, 32)),
    "a token": ((1, 768, 768), (1, 16, 24)),
    "a head": ((300, 768, 50257), (8, 16, 33)),
    "a head, aligned": ((256, 768, 50304), (8, 16, 64)),
}
KINDS = [("float32", "float32")]
KINDS += [(stored, out) for stored in DTYPES for out in (stored, "float32")]


@pytest.mark.parametrize("how", ["nn", "tn", "nt", "nn by columns"])
@pytest.mark.parametrize(("stored", "out"), KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_products(library: Backend, size: str, stored: str, out: str, how: str) -> None:
    m, k, n = sized(library, *SIZES[size])
    a, b = (rounded(normal(i, *shape), stored) for i, shape in enumerate(((m, k), (k, n))))
    bias = rounded(normal(2, n), out)
    exact, sums = a @ b, b.sum(axis=0)
    left = on(library, a.T.copy(), dtype_of(stored)).T if how[0] == "t" else None
    right = on(library, b.T.copy(), dtype_of(stored)).T if how[1] == "t" else None
    left = on(library, a, dtype_of(stored)) if left is None else left
    right = on(library, b, dtype_of(stored)) if right is None else right
    share = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[out]

    def require(got: Any, wanted: np.ndarray, length: int, roundings: int = 1) -> None:
        """Sums of numbers around 1 in float32, in any order."""
        off = np.abs(library.to_numpy(got).astype("f8") - wanted)
        allowed = 16 * np.finfo(np.float32).eps * length + roundings * share * np.abs(wanted)
        assert np.all(off <= allowed + roundings * share), f"{np.max(off):.1e}"

    def result() -> Any:
        unwritten = np.full((n, m) if "columns" in how else (m, n), np.nan)
        y = placed(library, unwritten.astype(dtype_of(out)))
        return y.T if "columns" in how else y

    with calling_cublaslt(library) as lt:
        multiply(left, right, y := result())
        require(y, exact, k)
        multiply(left, right, y, add=True)
        require(y, 2 * exact, 2 * k, 2)
        if "columns" not in how:
            multiply(left, right, y := result(), bias=on(library, bias, dtype_of(out)))
            require(y, exact + bias, k)
        row = placed(library, np.full(n, np.nan, dtype_of(out)))
        multiply(left, right, y := result(), sums=row)
        require(y, exact, k)
        require(row, sums, k)
        require_algorithm(lt)


def feed_forward(x: Any, w: Any, b: Any, w_down: Any, b_down: Any) -> Any:
    params = FeedForwardParams(LinearParams(w, b), LinearParams(w_down, b_down))
    y, cache = layers.feed_forward(x, params, activation="gelu_tanh")
    return y, Flat(cache)


class Flat(NamedTuple):
    """A cache whose gradients are no tree."""

    cache: Any

    def backward(self, *dys: Any) -> tuple[Any, ...]:
        return tuple(tree.flatten(self.cache.backward(*dys)).values())


@pytest.mark.parametrize("products", [calling_cublaslt, by_cublas])
@in_all
def test_feed_forward(library: Backend, precision: str, products: Any) -> None:
    """By cuBLASLt in bfloat16 GELU is made with the products."""
    rows, d, hidden = sized(library, (500, 768, 3072), (20, 16, 32))
    shapes = (rows, d), (d, hidden), (hidden,), (hidden, d), (d,)
    arrays = [normal(i, *shape) / shape[0] ** 0.5 for i, shape in enumerate(shapes)]
    arrays[0] *= rows**0.5
    with products(library) as lt:
        require_exact(library, precision, feed_forward, *arrays, roundings=4)
        if lt is not None and precision == "bfloat16":
            assert asked(lt)[0] == "GELU_AUX_BIAS"
            require_algorithm(lt)


@pytest.mark.parametrize("products", [calling_cublaslt, by_cublas])
@pytest.mark.parametrize("classes", [(50257, 515), (50304, 576)], ids=str)
@in_both
def test_a_head(library: Backend, precision: str, classes: Any, products: Any) -> None:
    """Tied to the table of embeddings; its logits are rounded, and so are their gradients.

    Of so many rows that those of 50,257 logits are padded.
    """
    (rows, d), n = sized(library, (300, 768), (300, 8)), sized(library, *classes)
    table = normal(1, n, d) / d**0.5
    assert rows >= linear_cross_entropy.ROWS
    options: Any = {"targets": np.random.default_rng(1).integers(0, n, rows), "roundings": 4}
    with products(library):
        require_exact(
            library, precision, ops.linear_cross_entropy, normal(2, rows, d), table.T, **options
        )


# ---- Graphs: captured beside call by call ----


class Turned:
    """Batches of one text, turned by a token each time."""

    def __init__(self, vocabulary: int) -> None:
        self.ids = np.random.default_rng(3).integers(0, vocabulary, (2, 65))

    def batch(self, i: int) -> Batch:
        rows = np.roll(self.ids, i, axis=1)
        arrays = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
        return Batch(arrays, {}, arrays[1].size, arrays[0].size)


def gpt(library: Backend) -> Any:
    """Whose head holds chunks of logits, and whose lengths cuDNN takes."""
    return xformer.GPT(*sized(library, (4104, 2, 256, 4), (40, 2, 16, 2)), max_len=64)


@pytest.mark.parametrize(
    ("precision", "attention"),
    [("bfloat16", calling_cudnn), ("bfloat16", without_cudnn), (None, without_cudnn)],
)
def test_captured_training(library: Backend, precision: str | None, attention: Any) -> None:
    """The same bits of every loss and norm, and no warning that there is no graph."""
    model = gpt(library)
    how: dict[str, Any] = {"precision": precision, "clip": 1.0, "ema": 0.9, "eval_every": 10**9}
    config = TrainConfig(sized(library, 6, 3), 2, **how)

    def numbers(compiled: bool) -> list[Any]:
        state = start(tree.map(library.asarray, model.init(0)), config)
        options: Any = {"compiled": compiled, "donate": True, "deterministic": True}
        steps = train(
            loss_of(model), state, Turned(model.embed.vocab_size), config, library, **options
        )
        return [(step.loss, step.norm) for step in steps]

    with calling_cublaslt(library), attention(library), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        wanted = numbers(False)
        assert np.isfinite(wanted).all() and wanted[-1][0] < wanted[0][0]
        assert numbers(True) == wanted


def test_captured_texts(library: Backend) -> None:
    model = gpt(library)
    params = tree.map(library.asarray, model.init(0))
    with calling_cublaslt(library), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        options: Any = {"max_new_tokens": sized(library, 20, 4)}
        wanted = generate(model, params, [[5, 6], [7]], **options)
        assert generate(model, params, [[5, 6], [7]], **options, compiled=True) == wanted


# ---- Ops ----


def add_norm(x: Any, r: Any, w: Any, b: Any = None) -> Any:
    """The norm of a sum, whose own gradient is that of the norm."""
    config = NormConfig("rms" if b is None else "layer")
    (_, y), cache = layers.add_norm(x, r, NormParams(w, b), config=config)

    class OfNorm(NamedTuple):
        of: Any

        def backward(self, dy: Any) -> Any:
            dx, dr, dparams = self.of.backward(None, dy)
            return dx, dr, dparams.w, *([] if b is None else [dparams.b])

    return y, OfNorm(cache)


ACTIVATIONS = ("gelu", "silu", "relu", "tanh", "erf", "quick_gelu", "sigmoid", "relu_squared")


def norms(library: Backend, require: Callable[..., None]) -> None:
    n, d = sized(library, (2000, 768), (40, 64))
    x, r, w, b = normal(1, n, d), normal(2, n, d), normal(3, d), normal(4, d)
    require(ops.layer_norm, x, w, b)
    require(ops.rms_norm, x, w)
    require(add_norm, x, r, w, b, roundings=2)
    require(add_norm, x, r, w, roundings=2)
    require(ops.layer_norm, x[:, :37], w[:37], b[:37])


def activations(library: Backend, require: Callable[..., None]) -> None:
    x, up = (normal(i, *sized(library, (2000, 768), (20, 64))) for i in (1, 2))
    for name in ACTIVATIONS:
        require(getattr(ops, name), 3 * x)
    require(ops.gelu, 3 * x, approximate="tanh")
    require(ops.glu, x, up)
    require(ops.dropout, x, rate=0.3, key=RandomKey(3, 1, 2))


def embeddings(library: Backend, require: Callable[..., None]) -> None:
    n, d = sized(library, (2000, 768), (40, 64))
    table, ids = normal(1, 50, d), np.random.default_rng(1).integers(0, 50, (4, n // 4))
    require(ops.embedding, table, ids=ids)
    with deterministic():
        require(ops.embedding, table, ids=ids)
    angles = np.random.default_rng(2).uniform(size=(n // 20, 32)).astype(np.float32)
    tables = {"cos": np.cos(angles), "sin": np.sin(angles)}
    for interleaved in (False, True):
        require(ops.rope, normal(2, 2, 3, n // 20, 64), **tables, interleaved=interleaved)


def losses(library: Backend, require: Callable[..., None]) -> None:
    options: Any = {"ignore_index": -1, "label_smoothing": 0.1, "z_loss": 0.01}
    for n in sized(library, (50257, 50304, 13), (65, 64, 13)):
        targets = np.random.default_rng(n).integers(-1, n, 24)
        require(ops.cross_entropy, 3 * normal(1, 24, n), targets=targets, **options)


def linear_maps(library: Backend, require: Callable[..., None]) -> None:
    n, d = sized(library, (2000, 768), (40, 64))
    x, w, b = normal(1, n, d), normal(2, d, 100) / d**0.5, normal(3, 100)
    for products in (calling_cublaslt, by_cublas):
        with products(library):
            require(ops.linear, x, w, b, roundings=2)
            require(ops.linear, x, (normal(4, 100, d) / d**0.5).T, roundings=2)


@in_all
@pytest.mark.parametrize("of", [linear_maps, losses, norms, activations, embeddings])
def test_ops(library: Backend, of: Callable[..., None], precision: str) -> None:
    def require(op: Any, *arrays: Any, roundings: int = 1, **options: Any) -> None:
        options |= {"roundings": 1 if precision == "float32" else roundings}
        require_exact(library, precision, op, *arrays, **options)

    of(library, require)
