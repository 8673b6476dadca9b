"""Elementwise instructions of integers, booleans, comparisons and conversions, and `where`.

Operands are of any of `KINDS`: their elements are read as int64 or as float64.
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
from xformer.backends.numba.program.strided import AXES, loop, size_of, words_of
from xformer.backends.numba.program.traced import Traced

KINDS = {
    name: i for i, name in enumerate(("bool", "uint8", "int32", "int64", "float32", "float64"))
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
ALIKE = {f"logical_{name}": f"bitwise_{name}" for name in ("and", "or", "xor")}  # of booleans
ALIKE |= {"logical_not": "bitwise_invert", "copy": "astype"}
BLOCK = 128  # elements
NUMBERS = 1 + 4 * AXES + 3  # code; sizes and strides of y, x1 and x2; their kinds
CHOSEN = 1 + 5 * AXES  # bytes of an element; sizes and strides of y, condition, x1 and x2


def natively(
    program: Program, name: str, out: Traced, ins: Sequence[Any]
) -> tuple[Native, list[Any]] | None:
    """As `elementwise.natively`."""
    code, arrays = CODES.get(ALIKE.get(name, name)), _arrays(ins)
    kinds: list[Any] = [KINDS.get(x.dtype.name) for x in (out, *arrays)]
    if code is None or None in kinds or not out.size or not _fit(code, name, kinds):
        return None
    layouts = [x.layout if isinstance(x, Traced) else x for x in (out, *arrays)]
    own = loop(out.shape, (*layouts, layouts[-1])[:3])
    if own is None:
        return None
    given = (code, *words_of(own), *(*kinds, kinds[-1])[:3])
    return Native(typed, given, program.pieces(size_of(own))), arrays


def _arrays(ins: Sequence[Any]) -> list[Any]:
    """Numbers of Python's in the dtype that they take beside the others."""
    plain = [x for x in ins if not hasattr(x, "dtype")]
    dtypes = [x.dtype for x in ins if hasattr(x, "dtype")]
    common = np.result_type(*dtypes, *plain)
    return [x if isinstance(x, Traced) else np.asarray(x, getattr(x, "dtype", common)) for x in ins]


def _fit(code: int, name: str, kinds: Sequence[Any]) -> bool:
    """Whether `typed` computes it as NumPy does."""
    out, *ins = kinds
    whole, real = (
        [low <= kind <= high for kind in ins] for low, high in ((BOOL, INT64), (FLOAT32, FLOAT64))
    )
    if code <= NEGATIVE:
        return out in (INT32, INT64) and all(whole)
    if code <= INVERT:
        same = all(kind == out for kind in ins)
        return out <= INT64 and same and (out == BOOL or name.startswith("bitwise"))
    if code == ASTYPE:
        return ins[0] == out or (out != BOOL and (all(whole) or out >= FLOAT32))
    return out == BOOL and (all(real) or (all(whole) and code != ISFINITE))


def chosen(program: Program, out: Traced, ins: Sequence[Any]) -> tuple[Native, list[Any]] | None:
    """As `natively`, of `where`: its condition, and two of out's dtype."""
    arrays = [
        x if isinstance(x, Traced) else np.asarray(x, np.bool_ if i == 0 else out.dtype)
        for i, x in enumerate(ins)
    ]
    dtypes, size = [x.dtype for x in arrays], out.dtype.itemsize
    if dtypes != [np.dtype(np.bool_), out.dtype, out.dtype] or size not in (1, 4, 8):
        return None
    own = loop(out.shape, [x.layout if isinstance(x, Traced) else x for x in (out, *arrays)])
    if own is None or not out.size:
        return None
    return Native(choose, (size, *words_of(own)), program.pieces(size_of(own))), arrays


@native
def typed(args: int, piece: int, pieces: int, memory: int) -> None:
    """y; x1, and x2 where there are two; `NUMBERS`."""
    own, n_ins = numbers(args, NUMBERS), words(args - 8, 1)[0] - 1
    a, code, kind = words(args, 1 + n_ins), own[0], own[17]
    start, stop, low, high = cut(own[1:5], piece, pieces)
    real = own[18] >= FLOAT32 or own[19] >= FLOAT32
    whole, floating = np.empty((3, BLOCK), np.int64), np.empty((2, BLOCK), np.float64)
    for i in range(start, stop):
        y, x1, x2 = a[0] + row(own, 5, i), a[1] + row(own, 9, i), a[n_ins] + row(own, 13, i)
        for first in range(low, high, BLOCK):
            n = min(BLOCK, high - first)
            at, at1, at2 = y + first * own[8], x1 + first * own[12], x2 + first * own[16]
            if real:
                _reals(own[18], at1, own[12], floating[0, :n])
                _reals(own[19], at2, own[16], floating[1, :n])
            else:
                _wholes(own[18], at1, own[12], whole[0, :n])
                _wholes(own[19], at2, own[16], whole[1, :n])
            if real and code == ASTYPE:
                _put_reals(kind, at, own[8], floating[0, :n])
            elif real:
                _compare(code, floating[0, :n], floating[1, :n], whole[2, :n])
                _put(kind, at, own[8], whole[2, :n])
            else:
                _block(code, kind, whole[0, :n], whole[1, :n], whole[2, :n])
                _put(kind, at, own[8], whole[2, :n])


@elementwise
def _wholes(kind: int, at: int, step: int, x: Any) -> None:
    """Elements of an operand as int64."""
    if kind == INT64:
        for j in range(x.size):
            x[j] = words(at + j * step, 1)[0]
    elif kind == INT32:
        for j in range(x.size):
            x[j] = int32s(at + j * step, 1)[0]
    else:
        for j in range(x.size):
            x[j] = uint8s(at + j * step, 1)[0]


@elementwise
def _reals(kind: int, at: int, step: int, x: Any) -> None:
    """Elements of an operand as float64."""
    if kind == FLOAT32:
        for j in range(x.size):
            x[j] = float32s(at + j * step, (1,))[0]
    else:
        for j in range(x.size):
            x[j] = float64s(at + j * step, (1,))[0]


@elementwise
def _put(kind: int, at: int, step: int, x: Any) -> None:
    """Elements of any kind, of int64."""
    if kind == INT64:
        for j in range(x.size):
            words(at + j * step, 1)[0] = x[j]
    elif kind == INT32:
        for j in range(x.size):
            int32s(at + j * step, 1)[0] = np.int32(x[j])
    elif kind == FLOAT32:
        for j in range(x.size):
            float32s(at + j * step, (1,))[0] = np.float32(x[j])
    elif kind == FLOAT64:
        for j in range(x.size):
            float64s(at + j * step, (1,))[0] = np.float64(x[j])
    else:
        for j in range(x.size):
            uint8s(at + j * step, 1)[0] = np.uint8(x[j])


@elementwise
def _put_reals(kind: int, at: int, step: int, x: Any) -> None:
    """Floating elements, of float64."""
    if kind == FLOAT32:
        for j in range(x.size):
            float32s(at + j * step, (1,))[0] = np.float32(x[j])
    else:
        for j in range(x.size):
            float64s(at + j * step, (1,))[0] = x[j]


@elementwise
def _block(code: int, kind: int, x: Any, z: Any, y: Any) -> None:
    """y of whole numbers; kind: of the result."""
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
            y[j] = 1 - x[j] if kind == BOOL else ~x[j]
    elif code == ASTYPE:
        y[:] = x
    else:
        _compare(code, x, z, y)


@elementwise
def _compare(code: int, x: Any, z: Any, y: Any) -> None:
    """1 where x and z are as the code says, else 0."""
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
    """y; condition, x1, x2; `CHOSEN`."""
    a, own = words(args, 4), numbers(args, CHOSEN)
    start, stop, low, high = cut(own[1:5], piece, pieces)
    for i in range(start, stop):
        seen, y = a[1] + row(own, 9, i), a[0] + row(own, 5, i)
        x1, x2 = a[2] + row(own, 13, i), a[3] + row(own, 17, i)
        for j in range(low, high):
            x = x1 + j * own[16] if uint8s(seen + j * own[12], 1)[0] else x2 + j * own[20]
            at = y + j * own[8]
            if own[0] == 4:
                int32s(at, 1)[0] = int32s(x, 1)[0]
            elif own[0] == 8:
                words(at, 1)[0] = words(x, 1)[0]
            else:
                uint8s(at, 1)[0] = uint8s(x, 1)[0]
