"""Programs get odd arrays: the results are NumPy's, or the function itself is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xformer as xf
from xformer import backends, ops

pytest.importorskip("numba", reason="numba is not installed")

XP = backends.get("numpy").xp
X = np.arange(1, 41, dtype=np.float32).reshape(5, 8)


def unaligned(x: Any) -> Any:
    memory = np.zeros(x.nbytes + 1, np.uint8)
    y = np.ndarray(x.shape, x.dtype, memory, 1)
    y[...] = x
    return y


def read_only(x: Any) -> Any:
    y = x.copy()
    y.flags.writeable = False
    return y


CONVERTED: dict[str, Callable[[Any], Any]] = {
    "unaligned": unaligned,
    "negative strides": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "with gaps": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "column by column": np.asfortranarray,
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "read-only": read_only,
}


def step(x: Any, y: Any) -> Any:
    namespace = x.__array_namespace__()
    return namespace.sum(x * 2 + y, axis=0), namespace.concat([y, x])


@pytest.mark.parametrize("donate", [(), (0,)])
@pytest.mark.parametrize("name", CONVERTED)
def test_every_layout(name: str, donate: tuple[int, ...]) -> None:
    x = CONVERTED[name](X)
    for got, want in zip(xf.compile(step, donate=donate)(x, X), step(x, X), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", ">i8"])
def test_another_byte_order_calls_the_function_itself(dtype: str) -> None:
    x = X.astype(dtype)
    with pytest.warns(RuntimeWarning, match=f"an array of dtype {dtype} is not recorded"):
        got = xf.compile(step)(x, X)
    for a, b in zip(got, step(x, X), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [">f4", ">i8"])
def test_another_byte_order_of_a_constant(dtype: str) -> None:
    closed = X.astype(dtype)

    def fn(x: Any) -> Any:
        namespace = x.__array_namespace__()
        return namespace.asarray(closed) + x

    with pytest.warns(RuntimeWarning, match="an array that is no argument is read"):
        got = xf.compile(fn)(X)
    np.testing.assert_array_equal(got, closed + X)


@pytest.mark.parametrize("dtype", ["float16", "longdouble", "complex64", "complex128", "int8"])
def test_dtypes_that_no_kernel_has(dtype: str) -> None:
    x = X.astype(dtype)
    for got, want in zip(xf.compile(step)(x, x), step(x, x), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype


def test_records_are_no_numbers() -> None:
    x = np.zeros(3, [("a", "f4"), ("b", "i4")])
    with pytest.warns(RuntimeWarning, match="is not recorded"):
        got = xf.compile(lambda x, y: (x, y))(x, X)
    assert got[0] is x


def test_ops_refuse_another_byte_order_by_name() -> None:
    for context in ("numpy", "numba"):
        with xf.kernels(context), pytest.raises(TypeError, match="got >f4"):
            ops.gelu(np.ones((200, 200), ">f4"))


# ---- Indices ----

IDS = np.array([[0, 3, -1], [4, -5, 2]])


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "float16"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_take_and_a_wrong_index(axis: int, dtype: str) -> None:
    x, ids = X[:5, :5].astype(dtype), IDS.reshape(-1)

    def fn(x: Any, ids: Any) -> Any:
        return x.__array_namespace__().take(x, ids, axis=axis)

    compiled = xf.compile(fn)
    np.testing.assert_array_equal(compiled(x, ids), np.take(x, ids, axis=axis))
    for wrong in (5, -6, 2**40):
        bad = ids.copy()
        bad[2] = wrong
        with pytest.raises(IndexError, match=f"index {wrong} is out of bounds"):
            compiled(x, bad)
    np.testing.assert_array_equal(compiled(x, ids), np.take(x, ids, axis=axis))


def test_take_along_an_axis_and_a_wrong_index() -> None:
    x, ids = X[:2, :5], IDS

    def fn(x: Any, ids: Any) -> Any:
        return x.__array_namespace__().take_along_axis(x, ids, axis=-1)

    compiled = xf.compile(fn)
    np.testing.assert_array_equal(compiled(x, ids), np.take_along_axis(x, ids, axis=-1))
    for wrong in (5, -6):
        with pytest.raises(IndexError, match=f"index {wrong} is out of bounds for axis 1"):
            compiled(x, np.full_like(ids, wrong))


def test_a_wrong_index_on_every_thread() -> None:
    x, ids = np.ones((64, 1024), np.float32), np.zeros((64, 1024), np.int64)
    compiled = xf.compile(lambda x, i: x.__array_namespace__().take_along_axis(x, i, axis=-1) * 2)
    assert (compiled(x, ids) == 2).all()
    ids[63, 1023] = 1024
    with pytest.raises(IndexError, match="index 1024 is out of bounds for axis 1 with size 1024"):
        compiled(x, ids)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_ids_of_ops_are_named(wrong: int) -> None:
    """As without a program; ids of ops are not negative."""
    table = np.ones((5, 4), np.float32)
    logits = np.ones((3, 5), np.float32)
    rows = np.ones((3, 4), np.float32)
    calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("embedding: ids", lambda x, i: ops.embedding(x, ids=i)[0], (table,)),
        ("index_add: ids", lambda x, y, i: ops.index_add(x, y, ids=i)[0], (table, rows)),
        ("cross_entropy: targets", lambda x, i: ops.cross_entropy(x, targets=i)[0], (logits,)),
    ]
    for message, fn, args in calls:
        compiled, ids = xf.compile(fn), np.arange(3)
        np.testing.assert_allclose(compiled(*args, ids), fn(*args, ids), rtol=1e-6)
        ids[1] = wrong
        for call in (fn, compiled):
            with pytest.raises(ValueError, match=f"{message} must lie in \\[0, 5\\)"):
                call(*args, ids)


@pytest.mark.parametrize("size", [8, 40_000])
def test_the_step_of_dropout(size: int) -> None:
    x = np.ones(size, np.float32)

    def fn(x: Any, step: Any) -> Any:
        return ops.dropout(x, rate=0.5, key=xf.RandomKey(7, step))[0]

    compiled = xf.compile(fn)
    np.testing.assert_array_equal(compiled(x, 3), fn(x, 3))
    for wrong in (-1, 2**32):
        for call in (fn, compiled):
            with pytest.raises(ValueError, match=r"key\.step must lie in"):
                call(x, wrong)
