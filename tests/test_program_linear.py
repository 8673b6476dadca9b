"""Linear maps in programs: products by rows, by columns and of vectors, as their weights lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_api_compat import array_namespace

pytest.importorskip("numba", reason="needs extra numba")

from programs import THREADS, judged, names, record

from xformer import ops, tree
from xformer.backends.numba.kernels.gemm import matrix_strides
from xformer.base.tree import Frozen
from xformer.layers import LinearParams, linear_many

SIZES = [(1, 7, 5), (1, 300, 301), (3, 513, 130), (37, 24, 65), (130, 65, 33), (401, 96, 130)]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return rng.normal(size=shape).astype(np.float32)


def laid(x: np.ndarray, layout: str) -> np.ndarray:
    return np.asfortranarray(x) if layout == "columns" else x


def mapped(*arrays: Any, trainable: bool = True) -> list[Any]:
    """y and gradients of x, w, b; arrays: x, w, dy, or with b."""
    x, w, *b, dy = arrays
    y, cache = ops.linear(x, w, *b, trainable=trainable)
    return [y, *(grad for grad in cache.backward(dy) if grad is not None)]


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize(("n", "i", "o"), SIZES)
def test_linear(n: int, i: int, o: int, layout: str) -> None:
    arrays = [normal(n, i), laid(normal(i, o), layout), normal(o), normal(n, o, seed=1)]
    for threads in THREADS:
        run = judged(mapped, arrays, threads)
    np.testing.assert_array_equal(run.results[2].strides, arrays[1].strides)


def test_more_axes_no_bias_and_frozen_weights() -> None:
    x, w, dy = normal(3, 5, 24), normal(24, 33), normal(3, 5, 33)
    judged(mapped, [x, w, dy])
    run = judged(lambda *arrays: mapped(*arrays, trainable=False), [x, w, dy])
    assert names(run) == ["linear", "linear dx"]


def test_no_rows_and_no_columns() -> None:
    for n, i, o in (0, 5, 7), (4, 0, 7), (4, 5, 0):
        judged(mapped, [normal(n, i), normal(i, o), normal(o), normal(n, o)])


def test_what_lies_otherwise_is_copied() -> None:
    """x of transposed axes and of every second column."""

    def fn(x: Any, w: Any, dy: Any) -> list[Any]:
        turned = array_namespace(x).permute_dims(x, (1, 0, 2))
        return [*mapped(turned, w, dy), *mapped(x[:, :, ::2], w[:12, ::2], dy[:, :, ::2])]

    arrays = [normal(5, 5, 24), normal(24, 34), normal(5, 5, 34)]
    assert "copy" in names(judged(fn, arrays))


def test_a_slice_of_the_rows_is_read_in_place() -> None:
    arrays = [normal(64, 24), normal(24, 66), normal(64, 30)]
    run = judged(lambda x, w, dy: mapped(x[3:45, :], w[:, 5:35], dy[3:45, :]), arrays)
    assert not names(run, native=False)


def test_matrix_strides() -> None:
    x = normal(6, 8)
    assert matrix_strides(x) == (32, 4)
    assert matrix_strides(x.T) == (4, 32)
    assert matrix_strides(x[:, :3]) == (32, 4)
    assert matrix_strides(x[:1].T) == (4, 4)
    assert matrix_strides(x[:, :1]) == (32, 4)
    assert matrix_strides(x[::-1]) is None
    assert matrix_strides(x[:, ::2]) is None
    assert matrix_strides(np.broadcast_to(x[0], (6, 8))) is None


def test_nan_and_infinity_stay_in_their_rows() -> None:
    x, w = normal(30, 24), normal(24, 40)
    x[3, 5], x[7, 1] = np.nan, np.inf
    (y,) = record(lambda x, w: [ops.linear(x, w)[0]], [x, w])(x, w)
    assert np.isnan(y[3]).all() and not np.isfinite(y[7]).any()
    assert np.isfinite(np.delete(y, [3, 7], axis=0)).all()


def joined(frozen: bool) -> Callable[..., list[Any]]:
    """y and gradients of three maps, one without bias."""

    def fn(x: Any, *arrays: Any) -> list[Any]:
        (w0, b0, w1, w2, b2), dys = arrays[:5], arrays[5:]
        last = LinearParams(Frozen(w2), Frozen(b2)) if frozen else LinearParams(w2, b2)
        ys, cache = linear_many(x, (LinearParams(w0, b0), LinearParams(w1, None), last))
        return [*ys, *tree.flatten({"": cache.backward(*dys)}).values()]

    return fn


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shape", [(2, 31, 48), (1, 1, 300)])
def test_linears(shape: tuple[int, ...], frozen: bool) -> None:
    i = shape[-1]
    sizes = 48, 301, 33
    arrays = [normal(*shape)]
    arrays += [normal(i, 48), normal(48), normal(i, 301), np.asfortranarray(normal(i, 33))]
    arrays += [normal(33), *(normal(*shape[:-1], o, seed=2) for o in sizes)]
    for threads in THREADS:
        run = judged(joined(frozen), arrays, threads)
    assert names(run).count("linear dx") == 1
    assert names(run).count("linear dw") == (2 if frozen else 3)


def test_constants() -> None:
    """A map of known arrays is computed at once; its gradient of one that is traced is not."""

    def fn(x: Any) -> list[Any]:
        xp = x.__array_namespace__()
        ones = xp.ones((24, 3), dtype=np.float32)
        known, _ = ops.linear(xp.ones((2, 24), dtype=np.float32), ones)
        y, cache = ops.linear(x, ones, trainable=False)
        return [known, y, cache.backward(xp.ones((5, 3), dtype=np.float32))[0]]

    x = normal(5, 24)
    known, y, dx = record(fn, [x])(x)
    np.testing.assert_array_equal(known, 24)
    np.testing.assert_allclose(y, np.repeat(x.sum(1, keepdims=True), 3, axis=1), rtol=1e-4)
    np.testing.assert_array_equal(dx, 3)
