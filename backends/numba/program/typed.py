"""Elementwise functions of integers and booleans, comparisons, conversions, and `where`.

Kernels convert the elements of operands to int64 or float64, and results to the output's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends.numba.compiled import elementwise
from xformer.backends.numba.program.elementwise import cut, row
from xformer.backends.numba.program.native import (
    Native,
    float32s,
    float64s,
    int32s,
    native,
    numbers,
    uint8s,
    words,
)
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.program.strided import AXES, loop_over, size_of, words_of
from xformer.backends.numba.program.traced import Traced

DTYPES = {
    np.dtype(name): i
    for i, name in enumerate(("bool", "uint8", "int32", "int64", "float32", "float64"))
}
BOOL, UINT8, INT32, INT64, FLOAT32, FLOAT64 = range(6)
CODES = {
    name: code
    for code, name in enumerate(
        (
            *("add", "subtract", "multiply", "maximum", "minimum", "negative"),
            *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_invert", "astype"),
            *("less", "less_equal", "greater", "greater_equal", "equal", "not_equal", "isfinite"),
        )
    )
}
ADD, SUBTRACT, MULTIPLY, MAXIMUM, MINIMUM, NEGATIVE, AND, OR, XOR, INVERT, ASTYPE = range(11)
LESS, LESS_EQUAL, GREATER, GREATER_EQUAL, EQUAL, NOT_EQUAL, ISFINITE = range(11, 18)
# Names that are computed by the function of another name; logical functions only for booleans.
ALIASES = {f"logical_{name}": f"bitwise_{name}" for name in ("and", "or", "xor")}
ALIASES |= {"logical_not": "bitwise_invert", "copy": "astype"}
BLOCK = 128  # elements that are computed at once
# Words of `spec`: the code of the function, sizes, strides of y, x1 and x2, their dtypes.
NUMBERS = 1 + 4 * AXES + 3
# Words of `spec` of `where`: bytes of an element, sizes, strides of y, condition, x1 and x2.
WHERE_NUMBERS = 1 + 5 * AXES


def find_native(
    program: Program, name: str, out: Traced, ins: Sequence[Any]
) -> tuple[Native, list[Any]] | None:
    """Return the native form of the function `name`, and ins as arrays; None without a kernel."""
    code, arrays = CODES.get(ALIASES.get(name, name)), _arrays(ins)
    dtypes: list[Any] = [DTYPES.get(x.dtype) for x in (out, *arrays)]
    if code is None or None in dtypes or not out.size or not _matches_numpy(code, name, dtypes):
        return None
    layouts = [x.layout if isinstance(x, Traced) else x for x in (out, *arrays)]
    loop = loop_over(out.shape, (*layouts, layouts[-1])[:3])
    if loop is None:
        return None
    spec = (code, *words_of(loop), *(*dtypes, dtypes[-1])[:3])
    return Native(typed, spec, program.pieces(size_of(loop))), arrays


def _arrays(ins: Sequence[Any]) -> list[Any]:
    """Return ins with Python numbers as arrays, in the dtype that NumPy gives them."""
    plain = [x for x in ins if not hasattr(x, "dtype")]
    dtypes = [x.dtype for x in ins if hasattr(x, "dtype")]
    common = np.result_type(*dtypes, *plain)
    return [x if isinstance(x, Traced) else np.asarray(x, getattr(x, "dtype", common)) for x in ins]


def _matches_numpy(code: int, name: str, dtypes: Sequence[Any]) -> bool:
    """Return whether `typed` computes the same as NumPy. dtypes: of the output and the inputs."""
    out, *ins = dtypes
    is_whole = [BOOL <= dtype <= INT64 for dtype in ins]
    is_real = [FLOAT32 <= dtype <= FLOAT64 for dtype in ins]
    if code <= NEGATIVE:
        return out in (INT32, INT64) and all(is_whole)
    if code <= INVERT:
        same = all(dtype == out for dtype in ins)
        return out <= INT64 and same and (out == BOOL or name.startswith("bitwise"))
    if code == ASTYPE:
        return ins[0] == out or (out != BOOL and (all(is_whole) or out >= FLOAT32))
    return out == BOOL and (all(is_real) or (all(is_whole) and code != ISFINITE))


def native_where(
    program: Program, out: Traced, ins: Sequence[Any]
) -> tuple[Native, list[Any]] | None:
    """Return the native form of `where`, and ins as arrays; None if it has no kernel.

    ins: the condition, x1 and x2. The kernel needs a bool condition, and x1, x2 of out's dtype.
    """
    arrays = [
        x if isinstance(x, Traced) else np.asarray(x, np.bool_ if i == 0 else out.dtype)
        for i, x in enumerate(ins)
    ]
    dtypes, size = [x.dtype for x in arrays], out.dtype.itemsize
    if dtypes != [np.dtype(np.bool_), out.dtype, out.dtype] or size not in (1, 4, 8):
        return None
    layouts = [x.layout if isinstance(x, Traced) else x for x in (out, *arrays)]
    loop = loop_over(out.shape, layouts)
    if loop is None or not out.size:
        return None
    return Native(choose, (size, *words_of(loop)), program.pieces(size_of(loop))), arrays


@native
def typed(args: int, piece: int, pieces: int, memory: int) -> None:
    """y = f(x1) or f(x1, x2). outputs: y; inputs: x1, or x1 and x2; integers: spec (`NUMBERS`)."""
    spec, n_ins = numbers(args, NUMBERS), words(args - 8, 1)[0] - 1
    a, code, dtype = words(args, 1 + n_ins), spec[0], spec[17]
    start, stop, low, high = cut(spec[1:5], piece, pieces)
    is_real = spec[18] >= FLOAT32 or spec[19] >= FLOAT32
    whole, real = np.empty((3, BLOCK), np.int64), np.empty((2, BLOCK), np.float64)
    for i in range(start, stop):
        y, x1, x2 = a[0] + row(spec, 5, i), a[1] + row(spec, 9, i), a[n_ins] + row(spec, 13, i)
        for first in range(low, high, BLOCK):
            n = min(BLOCK, high - first)
            at, at1, at2 = y + first * spec[8], x1 + first * spec[12], x2 + first * spec[16]
            if is_real:
                _read_reals(spec[18], at1, spec[12], real[0, :n])
                _read_reals(spec[19], at2, spec[16], real[1, :n])
            else:
                _read_wholes(spec[18], at1, spec[12], whole[0, :n])
                _read_wholes(spec[19], at2, spec[16], whole[1, :n])
            if is_real and code == ASTYPE:
                _write_reals(dtype, at, spec[8], real[0, :n])
            elif is_real:
                _compare(code, real[0, :n], real[1, :n], whole[2, :n])
                _write_wholes(dtype, at, spec[8], whole[2, :n])
            else:
                _block(code, dtype, whole[0, :n], whole[1, :n], whole[2, :n])
                _write_wholes(dtype, at, spec[8], whole[2, :n])


@elementwise
def _read_wholes(dtype: int, at: int, step: int, x: Any) -> None:
    """Read x.size integers or booleans, `step` bytes apart from address `at`, into int64 x."""
    if dtype == INT64:
        for j in range(x.size):
            x[j] = words(at + j * step, 1)[0]
    elif dtype == INT32:
        for j in range(x.size):
            x[j] = int32s(at + j * step, 1)[0]
    else:
        for j in range(x.size):
            x[j] = uint8s(at + j * step, 1)[0]


@elementwise
def _read_reals(dtype: int, at: int, step: int, x: Any) -> None:
    """Read x.size floats, `step` bytes apart from address `at`, into float64 x."""
    if dtype == FLOAT32:
        for j in range(x.size):
            x[j] = float32s(at + j * step, (1,))[0]
    else:
        for j in range(x.size):
            x[j] = float64s(at + j * step, (1,))[0]


@elementwise
def _write_wholes(dtype: int, at: int, step: int, x: Any) -> None:
    """Write int64 x as elements of any dtype, `step` bytes apart from address `at`."""
    if dtype == INT64:
        for j in range(x.size):
            words(at + j * step, 1)[0] = x[j]
    elif dtype == INT32:
        for j in range(x.size):
            int32s(at + j * step, 1)[0] = np.int32(x[j])
    elif dtype == FLOAT32:
        for j in range(x.size):
            float32s(at + j * step, (1,))[0] = np.float32(x[j])
    elif dtype == FLOAT64:
        for j in range(x.size):
            float64s(at + j * step, (1,))[0] = np.float64(x[j])
    else:
        for j in range(x.size):
            uint8s(at + j * step, 1)[0] = np.uint8(x[j])


@elementwise
def _write_reals(dtype: int, at: int, step: int, x: Any) -> None:
    """Write float64 x as float32 or float64, `step` bytes apart from address `at`."""
    if dtype == FLOAT32:
        for j in range(x.size):
            float32s(at + j * step, (1,))[0] = np.float32(x[j])
    else:
        for j in range(x.size):
            float64s(at + j * step, (1,))[0] = x[j]


@elementwise
def _block(code: int, dtype: int, x: Any, z: Any, y: Any) -> None:
    """Compute y = f(x) or f(x, z) of int64, f given by its code. dtype: of the output."""
    if code == ADD:
        for j in range(y.size):
            y[j] = x[j] + z[j]
    elif code == SUBTRACT:
        for j in range(y.size):
            y[j] = x[j] - z[j]
    elif code == MULTIPLY:
        for j in range(y.size):
            y[j] = x[j] * z[j]
    elif code == MAXIMUM:
        for j in range(y.size):
            y[j] = max(x[j], z[j])
    elif code == MINIMUM:
        for j in range(y.size):
            y[j] = min(x[j], z[j])
    elif code == NEGATIVE:
        for j in range(y.size):
            y[j] = -x[j]
    elif code == AND:
        for j in range(y.size):
            y[j] = x[j] & z[j]
    elif code == OR:
        for j in range(y.size):
            y[j] = x[j] | z[j]
    elif code == XOR:
        for j in range(y.size):
            y[j] = x[j] ^ z[j]
    elif code == INVERT:
        for j in range(y.size):
            y[j] = 1 - x[j] if dtype == BOOL else ~x[j]
    elif code == ASTYPE:
        for j in range(y.size):
            y[j] = x[j]
    else:
        _compare(code, x, z, y)


@elementwise
def _compare(code: int, x: Any, z: Any, y: Any) -> None:
    """y = 1 where the comparison of x and z (or `isfinite` of x) is true, else 0."""
    if code == LESS:
        for j in range(y.size):
            y[j] = x[j] < z[j]
    elif code == LESS_EQUAL:
        for j in range(y.size):
            y[j] = x[j] <= z[j]
    elif code == GREATER:
        for j in range(y.size):
            y[j] = x[j] > z[j]
    elif code == GREATER_EQUAL:
        for j in range(y.size):
            y[j] = x[j] >= z[j]
    elif code == EQUAL:
        for j in range(y.size):
            y[j] = x[j] == z[j]
    elif code == NOT_EQUAL:
        for j in range(y.size):
            y[j] = x[j] != z[j]
    else:  # ISFINITE
        for j in range(y.size):
            y[j] = x[j] - x[j] == 0


@native
def choose(args: int, piece: int, pieces: int, memory: int) -> None:
    """Compute y = x1 where the condition is true, else x2: the array API's `where`.

    outputs: y; inputs: condition (bool), x1, x2; integers: the bytes of an element, sizes and
    strides (`WHERE_NUMBERS` of them).
    """
    a, spec = words(args, 4), numbers(args, WHERE_NUMBERS)
    start, stop, low, high = cut(spec[1:5], piece, pieces)
    for i in range(start, stop):
        condition, y = a[1] + row(spec, 9, i), a[0] + row(spec, 5, i)
        x1, x2 = a[2] + row(spec, 13, i), a[3] + row(spec, 17, i)
        for j in range(low, high):
            is_true = uint8s(condition + j * spec[12], 1)[0]
            x = x1 + j * spec[16] if is_true else x2 + j * spec[20]
            at = y + j * spec[8]
            if spec[0] == 4:
                int32s(at, 1)[0] = int32s(x, 1)[0]
            elif spec[0] == 8:
                words(at, 1)[0] = words(x, 1)[0]
            else:
                uint8s(at, 1)[0] = uint8s(x, 1)[0]
