"""Every message of `@shapes`: the op, the argument, what was wanted, what came."""

from __future__ import annotations

import re
import warnings
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest

from xformer import ops
from xformer.backends import Backend
from xformer.dispatch.shapes import REMEMBERED, dtype_name, shapes


@shapes("x (..., I)  w (I, O)  b (O)  ids (...)")
def op(x: Any, w: Any, b: Any = None, *, ids: Any = None, mode: str = "a") -> None: ...


def check(*args: Any, **kwargs: Any) -> None:
    op.check(args, kwargs)  # type: ignore[attr-defined]


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


X, W, B = f32(2, 5, 3), f32(3, 4), f32(4)
IDS = np.zeros((2, 5), int)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", PendingDeprecationWarning)  # whose * is another product
    MATRIX = np.asmatrix(W)


def test_what_fits_passes() -> None:
    check(X, W)
    check(X, W, B)
    check(X, W, None)
    check(X, w=W, b=B, ids=IDS, mode="b")
    check(x=X, w=W)
    check(f32(3), W, B, ids=np.zeros((), int))
    check(f32(0, 3), f32(3, 0), f32(0))
    check(np.float32(1) * X, W.astype(np.float32), ids=None)


VALUES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "rank": ((X, f32(3)), {}, "op: w must be (I, O) with I = 3 (from x), got shape (3,)"),
    "too many axes": (
        (X, f32(2, 3, 4)),
        {},
        "op: w must be (I, O) with I = 3 (from x), got shape (2, 3, 4)",
    ),
    "too few axes": ((f32(), W), {}, "op: x must be (..., I), got shape ()"),
    "size": ((X, f32(7, 4)), {}, "op: w must be (I, O) with I = 3 (from x), got shape (7, 4)"),
    "one axis": ((X, W, f32(5)), {}, "op: b must be (O,) with O = 4 (from w), got shape (5,)"),
    "no broadcasting": ((X, W, f32(1)), {}, "op: b must be (O,) with O = 4 (from w), got shape"),
    "leading axes": (
        (X, W),
        {"ids": np.zeros((5, 2), int)},
        "op: ids must be (...,) with ... = (2, 5) (from x), got shape (5, 2)",
    ),
    "by name": ((X,), {"w": f32(7, 4)}, "op: w must be (I, O) with I = 3 (from x), got"),
}


@pytest.mark.parametrize("case", VALUES)
def test_wrong_shape(case: str) -> None:
    args, kwargs, message = VALUES[case]
    for _ in range(2):  # what failed is not remembered as right
        with pytest.raises(ValueError, match=rf"^{re.escape(message)}"):
            check(*args, **kwargs)


def test_the_same_letter_twice_in_one_argument() -> None:
    @shapes("x (N, N)")
    def square(x: Any) -> None: ...

    square.check((f32(3, 3),), {})  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^square: x must be \(N, N\), got shape \(3, 4\)$"):
        square.check((f32(3, 4),), {})  # type: ignore[attr-defined]


HALF = (
    "op: x must be float32 or float64, got float16, which no kernel of op for numpy reads; "
    "convert it to float32, or run the model without a precision"
)
TYPES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "list": (([[1.0]], W), {}, "op: x must be an array, got list"),
    "number": ((X, 3.0), {}, "op: w must be an array, got float"),
    "text": ((X, W, "b"), {}, "op: b must be an array, got str"),
    "None": ((X, None), {}, "op: w must be an array, got None"),
    "None first": ((None, W), {}, "op: x must be an array, got None"),
    "missing": ((X,), {}, "op: w must be an array, got None"),
    "nothing": ((), {}, "op: x must be an array, got None"),
    "matrix": (
        (X, MATRIX),
        {},
        "op: w must be an array, got matrix, whose operators differ from numpy.ndarray's",
    ),
    "integer": ((X.astype(int), W), {}, "op: x must be float32 or float64, got int64"),
    "boolean": ((X > 0, W), {}, "op: x must be float32 or float64, got bool"),
    "half": ((X.astype(np.float16), W), {}, HALF),
    "complex": ((X.astype(complex), W), {}, "op: x must be float32 or float64, got complex128"),
    "object": ((X.astype(object), W), {}, "op: x must be float32 or float64, got object"),
    "mixed": ((X, W.astype(float)), {}, "op: w must be float32 like x, got float64"),
    "mixed, wide first": ((X, W, B.astype(float)), {}, "op: b must be float32 like x, got float64"),
    "integer second": ((X, W.astype(int)), {}, "op: w must be float32 like x, got int64"),
    "library": (
        (X, strict.asarray(W)),
        {},
        "op: w must be an array of numpy, got one of array_api_strict",
    ),
    "library, strict first": (
        (strict.asarray(X), W),
        {},
        "op: w must be an array of array_api_strict, got one of numpy",
    ),
}


@pytest.mark.parametrize("case", TYPES)
def test_wrong_type(case: str) -> None:
    args, kwargs, message = TYPES[case]
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"^{re.escape(message)}$"):
            check(*args, **kwargs)


def test_device() -> None:
    here, there = (strict.Device(name) for name in ("CPU_DEVICE", "device1"))

    def on(device: Any, array: Any) -> Any:
        return strict.asarray(array, device=device)

    check(on(there, X), on(there, W))
    for _ in range(2):  # remembered kinds of call are still checked for their devices
        with pytest.raises(ValueError, match=r"^op: w must be on .*CPU_DEVICE.*, got it on .*1"):
            check(on(here, X), on(there, W))
    check(on(here, X), on(here, W), ids=on(there, IDS))  # left to the op


def test_too_many_arguments_are_left_to_python() -> None:
    check(X, W, B, 5)
    with pytest.raises(TypeError, match=r"positional argument"):
        ops.linear(X, W, B, 5)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'c'"):
        ops.linear(X, W, c=5)
    with pytest.raises(TypeError, match=r"targets"):
        ops.cross_entropy(X)


def test_a_call_with_what_is_no_array_is_not_remembered() -> None:
    check(X, W, ids=[[0, 1]])  # left to the op
    with pytest.raises(ValueError, match=r"^op: w must be \(I, O\) with I = 3"):
        check(X, f32(7, 4), ids=[[0, 1]])


def test_memory_of_right_calls_is_bounded() -> None:
    for n in range(REMEMBERED + 2):
        check(f32(n, 0), f32(0, 0))
    with pytest.raises(ValueError, match=r"^op: w must be"):
        check(f32(1, 0), f32(1, 0))


def test_same_messages_on_every_library(library: Backend) -> None:
    x, w, b = (library.asarray(a) for a in (X, W, B))
    ops.linear(x, w, b)
    with pytest.raises(
        ValueError, match=r"^linear: b must be \(O,\) with O = 4 \(from w\), got sh"
    ):
        ops.linear(x, w, library.asarray(f32(5)))
    with pytest.raises(ValueError, match=r"^linear: w must be \(I, O\) with I = 3 \(from x\), got"):
        ops.linear(x, b)
    with pytest.raises(TypeError, match=r"^linear: w must be float32 like x, got float64$"):
        ops.linear(x, library.asarray(W, "float64"))
    with pytest.raises(TypeError, match=r"^linear: x must be float32 or float64, got int32$"):
        ops.linear(library.asarray(X, "int32"), w)
    with pytest.raises(TypeError, match=r"^linear: x must be float32 or float64, got bool$"):
        ops.linear(x > 0, w)
    other = strict.asarray(W) if "strict" not in library.name else W
    with pytest.raises(TypeError, match=r"^linear: w must be an array of .*, got one of"):
        ops.linear(x, other)


def test_names_of_dtypes_are_the_standards() -> None:
    """Asked twice, as they are remembered; what lies in the other order is none of the standard."""
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    for _ in range(2):
        for name in ("float32", "float16", "int64", "bool", "complex64"):
            assert dtype_name(np.empty(1, name)) == name
            assert dtype_name(strict.empty(1)) == "float64"
        assert dtype_name(np.empty(1, bfloat16)) == "bfloat16"
        assert dtype_name(np.empty(1, np.dtype("f4").newbyteorder())) == ">f4"
        assert dtype_name(np.empty(1, "M8[s]")) == "datetime64[s]"
        assert dtype_name(np.empty(1, "M8[ms]")) == "datetime64[ms]"
