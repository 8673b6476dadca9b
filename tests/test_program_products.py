"""Functions of the array API without an op of their own: products, gathering, sorting, sums."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy
import numpy as np
import pytest

pytest.importorskip("numba", reason="needs extra numba")

from programs import THREADS, names, record

from xformer.backends.numba.program import namespace as xp
from xformer.backends.numba.program.run import Recorded, layout_of

NUMPY: Any = array_api_compat.numpy  # whose argsort has `descending`


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def require(fn: Any, arrays: list[np.ndarray], threads: int = 2, *, tolerance: float = 0) -> None:
    """fn(xp, *arrays) natively, as NumPy has it, and twice the same bits."""
    run = record(lambda *own: [fn(xp, *own)], arrays, threads)
    assert not names(run, native=False)
    (found,), (again,), wanted = run(*arrays), run(*arrays), fn(NUMPY, *arrays)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(found, again)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("threads", [*THREADS, 2])
@pytest.mark.parametrize(
    ("x", "w"),
    [
        (normal(301, 67), normal(67, 45)),
        (normal(2, 3, 51, 17), normal(17, 60)),
        (normal(32, 1, 128), normal(32, 128, 384)),
        (normal(1, 1, 128), normal(1, 128, 385)),
        (normal(1, 301, 40), normal(1, 40, 29)),
        (normal(2, 3, 33, 19), normal(2, 3, 19, 130)),
        (normal(2, 33, 3, 19).swapaxes(1, 2), normal(2, 3, 130, 19).mT),  # heads of rows
        (normal(3, 33, 19), normal(2, 1, 19, 13)),  # broadcast
        (normal(4, 7, 1), normal(4, 1, 5)),
        (normal(4, 7, 0), normal(4, 0, 5)),
    ],
    ids=lambda x: str(x.shape),
)
def test_products(x: np.ndarray, w: np.ndarray, threads: int) -> None:
    require(lambda xp, x, w: xp.matmul(x, w), [x, w], threads, tolerance=1e-4)


def test_products_of_what_lies_apart() -> None:
    arrays = [normal(4, 7, 24), normal(4, 12, 5)]
    require(lambda xp, x, w: xp.matmul(x[:, :, 1::2], w), arrays, tolerance=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_take(axis: int, dtype: str) -> None:
    x, ids = (10 * normal(5, 7, 66)).astype(dtype), np.array([4, 0, 0, 3, 1])
    require(lambda xp, x, ids: xp.take(x, ids, axis=axis), [x, ids])
    require(lambda xp, x: xp.take(x, xp.asarray(ids.tolist()), axis=axis), [x])


def test_take_along_axis() -> None:
    x, ids = normal(403, 37), np.random.default_rng(0).integers(0, 37, (403, 11))
    for own in (x, (100 * x).astype(np.int64)):
        require(lambda xp, x, ids: xp.take_along_axis(x, ids[:, ::2], axis=-1), [own, ids])


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("width", [1, 2, 5, 8, 37, 1000])
def test_argsort(width: int, descending: bool) -> None:
    """Of equal numbers, infinities, zeros of both signs and NaN too, in order."""
    x = np.round(3 * np.abs(normal(41, width)) ** -0.5)
    x[::3, :: max(width // 4, 1)] = np.nan
    x[1::3, width // 2], x[2::3, -1], x[4::5, 0] = -np.inf, np.inf, -0.0
    require(lambda xp, x: xp.argsort(x, axis=-1, descending=descending, stable=True), [x])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_cumulative_sum(axis: int, dtype: str) -> None:
    x = (10 * normal(33, 20, 17)).astype(dtype)
    require(lambda xp, x: xp.cumulative_sum(x, axis=axis), [x])


@pytest.mark.parametrize("axis", [0, 1, 2, (0, 2), (1,), (0, 1), None])
@pytest.mark.parametrize("name", ["sum", "max", "min", "mean"])
def test_any_axes(name: str, axis: Any) -> None:
    """Of arrays in other orders of axes, too."""
    for turned in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):

        def fn(xp: Any, x: Any, turned: Any = turned) -> Any:
            return getattr(xp, name)(xp.permute_dims(x, turned), axis=axis, keepdims=True)

        require(fn, [normal(31, 20, 17)], tolerance=1e-4)
    if name != "mean":
        require(lambda xp, x: getattr(xp, name)(x, axis=1), [np.arange(60).reshape(3, 4, 5)])


def test_powers() -> None:
    x, n = np.abs(normal(5, 7)), np.array(3)
    require(lambda xp, x: x**2, [x])
    require(lambda xp, x: x**0.5, [x.astype(np.float64)], tolerance=1e-15)
    require(lambda xp, x: x**-1.5, [x], tolerance=1e-3)
    require(lambda xp, n: 0.9**n, [n], tolerance=1e-15)


@pytest.mark.parametrize("repetitions", [(3,), (2, 1), (2, 3, 2)])
def test_tile(repetitions: tuple[int, ...]) -> None:
    require(lambda xp, x: xp.tile(x, repetitions), [normal(4, 5)])
    require(lambda xp, x: xp.tile(x, repetitions), [normal(4, 5) > 0])


@pytest.mark.parametrize("lends", [False, True])
def test_what_is_empty_is_not_computed(lends: bool) -> None:
    x = np.zeros((0, 5), np.float32)

    def fn(x: Any) -> list[Any]:
        return [xp.exp(x), xp.sum(x, axis=0), xp.concat([x, x + 1], axis=0)]

    run = Recorded(fn, [layout_of(x)], lends=lends)
    assert not run.code
    empty, total, both = run(x)
    assert empty.shape == both.shape == (0, 5) and total.tolist() == [0.0] * 5
