"""Elementwise functions of integers and booleans, comparisons, conversions, and `where`.

Kernels convert the elements of operands to int64 or float64, and results to the output's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types

from xformer.backends.numba.atomic import strided_at, strided_floats
from xformer.backends.numba.jit import elementwise
from xformer.backends.numba.program.elementwise import cut, row
from xformer.backends.numba.program.formulas import COMPARISONS, FROM_REALS, OF_WHOLES, loops_of
from xformer.backends.numba.program.native import (
    Native,
    int32s,
    native,
    numbers,
    operands,
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
# Names that are computed by the function of another name; logical functions only for booleans.
ALIASES = {f"logical_{name}": f"bitwise_{name}" for name in ("and", "or", "xor")}
ALIASES |= {"copy": "astype"}
BLOCK = 128  # elements that are computed at once
# Words of `spec`: the code of the function, sizes, strides of y, x1 and x2, their dtypes.
NUMBERS = 1 + 4 * AXES + 3
# Words of `spec` of `where`: bytes of an element, sizes, strides of y, condition, x1 and x2.
WHERE_NUMBERS = 1 + 5 * AXES
_int64s, _int32s = strided_at(types.int64), strided_at(types.int32)
_uint8s, _float64s = strided_at(types.uint8), strided_at(types.float64)


def find_native(
    program: Program, name: str, out: Traced, ins: Sequence[Any]
) -> tuple[Native, list[Any]] | None:
    """Return the native form of the function `name`, and ins as arrays; None without a kernel."""
    arrays = _arrays(ins)
    dtypes: list[Any] = [DTYPES.get(x.dtype) for x in (out, *arrays)]
    if None in dtypes or not out.size:
        return None
    known = "logical_not" if name == "bitwise_invert" and dtypes[0] == BOOL else name
    known = ALIASES.get(known, known)
    is_real = max(dtypes[1:]) >= FLOAT32
    kernel, formulas = (from_reals, FROM_REALS) if is_real else (of_wholes, OF_WHOLES)
    if known not in formulas or not _matches_numpy(name, known, dtypes):
        return None
    layouts = [x.layout if isinstance(x, Traced) else x for x in (out, *arrays)]
    loop = loop_over(out.shape, (*layouts, layouts[-1])[:3])
    if loop is None:
        return None
    spec = (list(formulas).index(known), *words_of(loop), *(*dtypes, dtypes[-1])[:3])
    return Native(kernel, spec, program.pieces(size_of(loop))), arrays


def _arrays(ins: Sequence[Any]) -> list[Any]:
    """Return ins with Python numbers as arrays, in the dtype that NumPy gives them."""
    plain = [x for x in ins if not hasattr(x, "dtype")]
    dtypes = [x.dtype for x in ins if hasattr(x, "dtype")]
    common = np.result_type(*dtypes, *plain)
    return [x if isinstance(x, Traced) else np.asarray(x, getattr(x, "dtype", common)) for x in ins]


def _matches_numpy(name: str, known: str, dtypes: Sequence[Any]) -> bool:
    """Return whether a kernel computes the same as NumPy. dtypes: of the output and the inputs.

    known: the name of the formula that computes `name`
    """
    out, *ins = dtypes
    are_whole = max(ins) <= INT64
    if known in COMPARISONS:
        are_fit = known != "isfinite" if are_whole else min(ins) >= FLOAT32
        return out == BOOL and are_fit
    if known == "astype":
        return ins[0] == out or (out != BOOL and (are_whole or out >= FLOAT32))
    if known.startswith(("bitwise", "logical")):
        same = all(dtype == out for dtype in ins)
        return out <= INT64 and same and (out == BOOL or name.startswith("bitwise"))
    return out in (INT32, INT64) and are_whole


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


def _compute_of(formulas: dict[str, str]) -> Any:
    """Return the compiled function that computes a piece (see `cut`) by one of the formulas."""
    loops = loops_of(formulas)

    @elementwise
    def compute(args: int, piece: int, pieces: int, block: Any) -> None:
        """Compute in the dtype of `block` (3, BLOCK), which is scratch memory."""
        n_ins, spec = operands(args) - 1, numbers(args, NUMBERS)
        a = words(args, 1 + n_ins)
        y, x1, x2 = a[0], a[1], a[n_ins]
        start, stop, low, high = cut(spec[1:5], piece, pieces)
        for i in range(start, stop):
            at, at1, at2 = y + row(spec, 5, i), x1 + row(spec, 9, i), x2 + row(spec, 13, i)
            for first in range(low, high, BLOCK):
                n = min(BLOCK, high - first)
                _read(spec[18], at1 + first * spec[12], spec[12], block[0, :n])
                _read(spec[19], at2 + first * spec[16], spec[16], block[1, :n])
                loops(spec[0], block[2, :n], block[0, :n], block[1, :n])
                _write(spec[17], at + first * spec[8], spec[8], block[2, :n])

    return compute


_from_reals, _of_wholes = _compute_of(FROM_REALS), _compute_of(OF_WHOLES)


@native
def from_reals(args: int, piece: int, pieces: int, memory: int) -> None:
    """y = f(x1) or f(x1, x2). outputs: y; inputs: x1, or x1 and x2; integers: spec (`NUMBERS`)."""
    _from_reals(args, piece, pieces, np.empty((3, BLOCK), np.float64))


@native
def of_wholes(args: int, piece: int, pieces: int, memory: int) -> None:
    """As `from_reals`."""
    _of_wholes(args, piece, pieces, np.empty((3, BLOCK), np.int64))


@elementwise
def _read(dtype: int, at: int, step: int, x: Any) -> None:
    """Read x.size elements of a dtype, `step` bytes apart from address `at`."""
    n, steps = (x.size,), (step,)
    if dtype == INT64:
        _convert(_int64s(at, n, steps), x)
    elif dtype == INT32:
        _convert(_int32s(at, n, steps), x)
    elif dtype == FLOAT32:
        _convert(strided_floats(at, n, steps), x)
    elif dtype == FLOAT64:
        _convert(_float64s(at, n, steps), x)
    else:
        _convert(_uint8s(at, n, steps), x)


@elementwise
def _write(dtype: int, at: int, step: int, x: Any) -> None:
    """Write x as elements of a dtype, `step` bytes apart from address `at`."""
    n, steps = (x.size,), (step,)
    if dtype == INT64:
        _convert(x, _int64s(at, n, steps))
    elif dtype == INT32:
        _convert(x, _int32s(at, n, steps))
    elif dtype == FLOAT32:
        _convert(x, strided_floats(at, n, steps))
    elif dtype == FLOAT64:
        _convert(x, _float64s(at, n, steps))
    else:
        _convert(x, _uint8s(at, n, steps))


@elementwise
def _convert(x: Any, y: Any) -> None:
    """Copy x to y, which may have another dtype."""
    for j in range(x.size):
        y[j] = x[j]


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
