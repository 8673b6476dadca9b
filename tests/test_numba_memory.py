"""Compiled kernels check addresses, strides and ids in the call that uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from numpy.lib.stride_tricks import as_strided
from test_kernels import require_exact
from test_numpy_kernels import drawn

from xformer import backends, inference, ops
from xformer.base.typing import Array
from xformer.dispatch import Kernel
from xformer.dispatch.checks import in_range

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.numba.kernels import gemm
from xformer.backends.numba.single_op import Eager

pytestmark = pytest.mark.usefixtures("numba_kernels")
NUMPY = backends.get("numpy")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A row is enough for a kernel then."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


# ---- Strides ----

STRIDES = (0, -4, 8, 1 << 34)  # of `v[None]`, `x[::-1][:1]`, and of slices of other arrays


def restrided(x: Array, stride: int) -> Array:
    """The same array, where every axis of length 1 has this stride."""
    steps = [stride if n == 1 else own for n, own in zip(x.shape, x.strides, strict=True)]
    return as_strided(x, x.shape, steps)


HEADS = [((n, d), (d, v), (v,)) for n in (1, 3) for d in (1, 7) for v in (1, 11)]
ROWS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    *((ops.linear_cross_entropy, s, {"targets": np.zeros(s[0][0], int)}) for s in HEADS),
    (ops.sdpa, ((1, 1, 67, 1), (1, 1, 1, 1), (1, 1, 1, 5)), {}),
    (ops.sdpa, ((1, 2, 67, 3), (1, 1, 1, 3), (1, 1, 1, 1)), {}),
    (ops.sdpa, ((1, 1, 67, 3), (1, 1, 70, 3), (1, 1, 70, 1)), {"causal": True}),
    (ops.gelu, ((1, 7),), {}),
    (ops.glu, ((1, 7), (1, 7)), {}),
    (ops.layer_norm, ((1, 7), (7,), (7,)), {}),
    (ops.rms_norm, ((1, 7), (7,)), {}),
    (ops.embedding, ((5, 1),), {"ids": np.array([3])}),
    (ops.embedding, ((1, 7),), {"ids": np.array([0])}),
]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("case", ROWS, ids=lambda case: f"{case[0].__name__} {case[1]}")
def test_the_stride_of_an_axis_of_length_1(case: Any, stride: int) -> None:
    op, shapes, options = case
    args = tuple(restrided(x, stride) for x in drawn(shapes, "float32"))
    eager = Eager(op, least=0)
    assert eager.unsupported(*args, **options) is None
    kernel = Kernel(eager, "numpy", eager.unsupported)
    require_exact(NUMPY, kernel, op, args, options, lambda x: restrided(x, stride))


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("sizes", [(1, 1, 7), (3, 7, 1), (5, 1, 1), (5, 7, 1)])
def test_that_stride_of_few_vectors(
    sizes: tuple[int, int, int], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, n_in, n_out = sizes
    monkeypatch.setattr(gemm, "LARGE", 1)
    x, w = drawn(((n, n_in), (n_in, n_out)), "float32")
    for own in (w, np.asfortranarray(w), w[:, ::-1]):
        with inference():
            y, _ = Eager(ops.linear, least=0)(restrided(x, stride), restrided(own, stride))
        np.testing.assert_allclose(y, x @ own, rtol=1e-5, atol=1e-6)


# ---- Ids ----

IDS, REFILL = np.array([[2, 0, 1], [1, 2, 0]]), 3  # which is an id too: nothing crashes


def head(ids: Array) -> Any:
    x, w = drawn(((2, 3, 5), (5, 7)), "float32")
    loss, cache = ops.linear_cross_entropy(x, w, None, targets=ids)
    return (loss, *cache.backward(np.ones((), np.float32))[:2])


def losses(ids: Array) -> Any:
    (logits,) = drawn(((2, 3, 7),), "float32")
    loss, cache = ops.cross_entropy(logits, targets=ids)
    return loss, cache.backward(np.ones((), np.float32))


def vectors(ids: Array) -> Any:
    y, cache = ops.embedding(drawn(((7, 5),), "float32")[0], ids=ids)
    return y, cache.backward(y)


def sums(ids: Array) -> Any:
    x, y = drawn(((7, 5), (6, 5)), "float32")
    return ops.index_add(x, y, ids=ids.reshape(-1))[:1]


def chosen(ids: Array) -> Any:
    x, gate, up, down, weights = drawn(((2, 5), (4, 5, 6), (4, 5, 6), (4, 6, 5), (2, 3)), "float32")
    y, cache = ops.experts(x, gate, up, down, weights, ids=ids)
    return (y, *cache.backward(y))


@pytest.mark.parametrize("compute", [head, losses, vectors, sums, chosen])
def test_ids_that_are_refilled_after_their_check(
    compute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, buffer = compute(IDS), IDS.copy()

    def refill(run: Any) -> Any:
        def checked(ids: Array, **options: Any) -> bool:
            answer: bool = run(ids, **options)
            buffer[...] = REFILL
            return answer

        return checked

    kernels = [k._replace(run=refill(k.run)) for k in in_range.import_kernels("numpy")]
    monkeypatch.setitem(in_range.kernels, "numpy", kernels)
    got = compute(buffer)
    assert (buffer == REFILL).all()
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
