"""NumPy's kernels over several blocks on several threads, and at the ends of the number line.

The cases of the catalogue, on which tests/test_kernels.py tries every kernel, fill one block.
"""

from __future__ import annotations

import math
import re
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from test_kernels import contiguous, expanded, require_exact, sliced, transposed

from xformer import RandomKey, backends, explain, inference, ops, reference_only
from xformer.backends.numpy import linear_cross_entropy
from xformer.backends.numpy.rows import BLOCK
from xformer.backends.numpy.threads import forget_scratch, scratch_nbytes
from xformer.base.typing import Array
from xformer.dispatch import is_inference

NUMPY = backends.get("numpy")
KEY = RandomKey(2**40 + 3, 5, 7)
LEAD, WIDTH = (3, 241), 211  # primes
SHAPE = (*LEAD, WIDTH)
W = (WIDTH,)
CLASSES = 4099  # a prime, and enough for the kernel of linear_cross_entropy
assert 2 * BLOCK < math.prod(SHAPE) < 3 * BLOCK  # the last block is shorter


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        yield


def ids(shape: tuple[int, ...], high: int) -> Array:
    return np.random.default_rng(5).integers(0, high, shape)


CASES: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
    (ops.gelu, (SHAPE,), {"approximate": "none"}),
    (ops.gelu, (SHAPE,), {"approximate": "tanh"}),
    (ops.glu, (SHAPE, SHAPE), {}),
    (ops.dropout, (SHAPE,), {"rate": 0.3, "key": KEY}),
    (ops.layer_norm, (SHAPE, W, W), {}),
    (ops.layer_norm, (SHAPE, W, None), {"eps": 0.1, "eps_inside": False}),
    (ops.rms_norm, (SHAPE, W), {"offset": 1.0}),
    (ops.rms_norm, ((2, BLOCK + 1), (BLOCK + 1,)), {}),  # a row is more than a block
    (ops.embedding, ((503, 101),), {"ids": ids((7, 101), 503)}),
    (ops.cross_entropy, (SHAPE,), {"targets": ids(LEAD, WIDTH)}),
    (
        ops.cross_entropy,
        (SHAPE,),
        {
            "targets": ids(LEAD, WIDTH),
            "ignore_index": 3,
            "label_smoothing": 0.1,
            "z_loss": 0.01,
            "reduction": "none",
        },
    ),
)

CASES += tuple(
    (ops.linear_cross_entropy, ((7, 29, 67), (67, CLASSES), b), options)
    for b, options in (
        (None, {"targets": ids((7, 29), CLASSES)}),
        (
            (CLASSES,),
            {
                "targets": ids((7, 29), 5),
                "ignore_index": 3,
                "label_smoothing": 0.1,
                "z_loss": 0.01,
                "reduction": "sum",
            },
        ),
    )
)


@pytest.fixture(autouse=True)
def chunks_of_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 203 rows above; the last chunk is shorter."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", 50 * CLASSES)


ROWS, COLUMNS = (SHAPE, (WIDTH, 101), (101,)), ((3, WIDTH), (WIDTH, 1009), (1009,))
LINEAR: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
    (ops.linear, ROWS, {}),
    (ops.linear, (*COLUMNS[:2], None), {}),
    (ops.linear, COLUMNS, {"trainable": False}),
)


def named(case: tuple[Any, Any, dict[str, Any]]) -> str:
    return " ".join([case[0].__name__, *(f"{k} {v}" for k, v in case[2].items() if k != "targets")])


def drawn(shapes: tuple[Any, ...], dtype: str) -> tuple[Any, ...]:
    rng = np.random.default_rng(3)
    return tuple(s if s is None else rng.normal(0.3, 1, s).astype(dtype) for s in shapes)


@pytest.mark.parametrize("layout", [contiguous, sliced, transposed, expanded])
@pytest.mark.parametrize("case", CASES + LINEAR, ids=named)
def test_several_blocks_are_as_exact(case: Any, layout: Any) -> None:
    op, shapes, options = case
    args = tuple(x if x is None else layout(x) for x in drawn(shapes, "float32"))
    (kernel,) = op.import_kernels("numpy")
    require_exact(NUMPY, kernel, op, args, options, layout)


@pytest.mark.parametrize("case", CASES + LINEAR, ids=named)
def test_float64(case: Any) -> None:
    op, shapes, options = case
    args = drawn(shapes, "float64")
    (kernel,) = op.import_kernels("numpy")
    if kernel.unsupported is not None and (why := kernel.unsupported(*args, **options)):
        assert op is ops.gelu and "float32" in why
        return
    for got, wanted in zip(results(op, args, options), reference(op, args, options), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_any_number_of_threads_gives_the_same(case: Any) -> None:
    op, shapes, options = case
    args = drawn(shapes, "float32")
    several = results(op, args, options)
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        for one, other in zip(results(op, args, options), several, strict=True):
            np.testing.assert_array_equal(one, other)


def results(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[Array]:
    """The output and all gradients."""
    y, cache = op(*args, **options)
    dy = np.asarray(np.random.default_rng(4).normal(size=y.shape), args[0].dtype)
    grads = cache.backward(dy)
    return [a for a in (y, *(grads if isinstance(grads, tuple) else (grads,))) if a is not None]


def reference(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[Array]:
    with reference_only():
        return results(op, args, options)


# ---- The ends of the number line ----

FAR = [0.0, -0.0, 1e-40, 5.0, 50.0, 99.0, 101.0, 1e5, 1e30, 3e38, np.inf]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("op", "n_args", "options"),
    [
        (ops.gelu, 1, {"approximate": "none"}),
        (ops.gelu, 1, {"approximate": "tanh"}),
        (ops.glu, 2, {}),
    ],
)
def test_far_out(op: Any, n_args: int, options: dict[str, Any], dtype: str) -> None:
    """As the reference, without a warning; NaN stays NaN and does not spread."""
    x = np.asarray([*FAR, *(-a for a in FAR)], dtype)
    args = (x, *(np.ones_like(x) for _ in range(n_args - 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs = list(zip(results(op, args, options), reference(op, args, options), strict=True))
    for got, wanted in pairs:
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    x[3] = np.nan
    y, _ = op(*args, **options)
    assert np.flatnonzero(np.isnan(y)).tolist() == [3]


def test_exact_gelu_against_erf() -> None:
    x = np.linspace(-9, 9, 20_001).astype(np.float32)
    phi = np.asarray([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.astype(float)])
    y, cache = ops.gelu(x)
    slope = phi + x * np.exp(-0.5 * x.astype(float) ** 2) / math.sqrt(2 * math.pi)
    assert np.max(np.abs(y - x * phi) / np.maximum(1, np.abs(x))) < 2e-7
    assert np.max(np.abs(cache.backward(np.ones_like(x)) - slope)) < 4e-7


def test_a_gradient_that_is_not_finite_stays_where_it_is() -> None:
    x = np.asarray([-1.0, 1.0, -1.0, 1.0], np.float32)
    dy = np.asarray([np.inf, np.nan, np.nan, -np.inf], np.float32)
    options: Any = {"rate": 0.5, "key": RandomKey(1)}
    _, cache = ops.dropout(x, **options)
    with reference_only():
        _, judge = ops.dropout(x, **options)
    np.testing.assert_array_equal(cache.backward(dy), judge.backward(dy))


# ---- What one kernel alone promises ----


@pytest.mark.parametrize("rate", [1e-12, 1e-9, 0.1, 0.999, 1 - 1e-9, 1 - 2**-33])
@pytest.mark.parametrize("size", [1, 8, 13, 3 * BLOCK - 5])
def test_dropout_is_that_of_the_reference(rate: float, size: int) -> None:
    x = np.linspace(1, 2, size, dtype=np.float32)
    args: Any = (ops.dropout, (x,), {"rate": rate, "key": KEY})
    for got, wanted in zip(results(*args), reference(*args), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_ignored_tokens_may_be_nan() -> None:
    (logits,) = drawn((SHAPE,), "float32")
    targets = ids(LEAD, WIDTH)
    options = {"targets": targets, "ignore_index": 3, "reduction": "mean"}
    wanted = results(ops.cross_entropy, (logits,), options)
    logits[targets == 3] = np.nan
    for got, want in zip(results(ops.cross_entropy, (logits,), options), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_embedding_leaves_the_rows_of_others() -> None:
    (table,) = drawn(((7, 3),), "float32")
    _, cache = ops.embedding(table, ids=np.asarray([[5, 2], [5, 5]]))
    dtable = cache.backward(np.ones((2, 2, 3), np.float32))
    assert dtable[:, 0].tolist() == [0, 0, 1, 0, 0, 3, 0]


# ---- linear_cross_entropy, in chunks ----


def head(n: int = 203, d: int = 67, *, bias: bool = False) -> tuple[tuple[Array, ...], Any]:
    """x, w and b, and as many targets."""
    args = drawn(((n, d), (d, CLASSES), (CLASSES,) if bias else None), "float32")
    return args, ids((n,), CLASSES)


def test_a_loss_that_nothing_follows_is_not_multiplied() -> None:
    """By dloss = 1: the backward makes no array."""
    args, targets = head(bias=True)
    _, cache = ops.linear_cross_entropy(*args, targets=targets)
    grads = cache.backward(np.ones((), np.float32))
    for grad, again in zip(grads, cache.backward(np.ones((), np.float32)), strict=True):
        assert grad is again
    for grad, half in zip(grads, cache.backward(np.full((), 0.5, np.float32)), strict=True):
        np.testing.assert_array_equal(half, grad / 2)  # the cache is as it was


def test_a_gradient_lies_in_memory_as_its_weight() -> None:
    (x, w, _), targets = head()
    for own in (w, np.ascontiguousarray(w.T).T):
        dw = ops.linear_cross_entropy(x, own, targets=targets)[1].dw
        assert dw.flags.c_contiguous == own.flags.c_contiguous
        assert dw.flags.c_contiguous or dw.T.flags.c_contiguous


def test_ignored_rows_are_left_out() -> None:
    """Whatever they hold, and however many they are: also all."""
    (x, w, b), targets = head(bias=True)
    targets[::3] = -1
    options = {"targets": targets, "ignore_index": -1}
    wanted = results(ops.linear_cross_entropy, (x, w, b), options)
    spoiled = x.copy()
    spoiled[::3] = np.nan
    for got, want in zip(
        results(ops.linear_cross_entropy, (spoiled, w, b), options), wanted, strict=True
    ):
        np.testing.assert_array_equal(got, want)
    assert not wanted[1][::3].any() and wanted[1][1::3].any()
    options["targets"] = np.full_like(targets, -1)
    for got in results(ops.linear_cross_entropy, (x, w, b), options):
        assert not got.any()


def test_logits_are_there_one_chunk_at_a_time() -> None:
    (x, w, _), targets = head(n=1009)
    options = {"targets": targets}
    (small, kept), (large, _) = (
        held(x, w, options, context) for context in (nullcontext(), reference_only())
    )
    logits = 1009 * CLASSES * 4
    assert large > 2 * logits
    assert small < w.nbytes + logits / 5 and kept < w.nbytes + x.nbytes + 20_000
    with inference():
        ops.linear_cross_entropy(x, w, **options)
    alone, kept = held(x, w, options, inference())
    assert alone < logits / 5 and kept < 20_000


def held(x: Array, w: Array, options: Any, context: Any) -> tuple[int, int]:
    """The most that a loss and its backward held, where it has one, and what the loss left."""
    forget_scratch()
    tracemalloc.start()
    try:
        with context:
            loss, cache = ops.linear_cross_entropy(x, w, **options)
            kept = tracemalloc.get_traced_memory()[0] - scratch_nbytes()
            if not is_inference():
                cache.backward(np.ones_like(loss))
        return tracemalloc.get_traced_memory()[1], kept
    finally:
        tracemalloc.stop()


def test_few_classes_and_losses_apart_are_for_the_reference() -> None:
    (x, w, _), targets = head()
    for less, options, why in (
        (w[:, :4095], {}, "there are fewer than 4096 classes"),
        (w, {"reduction": "none"}, 'reduction "none" has a dloss for each token'),
    ):
        text = explain(ops.linear_cross_entropy, x, less, targets=targets % 4095, **options)
        assert "the reference" in text and why in text


def test_what_is_wrong_with_targets_is_said_in_the_same_words() -> None:
    (x, w, _), targets = head()
    for bad in (targets + CLASSES, targets - CLASSES, targets * 1.0, targets.tolist()):
        with reference_only(), pytest.raises((TypeError, ValueError)) as wanted:
            ops.linear_cross_entropy(x, w, targets=bad)
        with pytest.raises(wanted.type, match=f"^{re.escape(str(wanted.value))}$"):
            ops.linear_cross_entropy(x, w, targets=bad)
