"""Copies, casts and reshaped views of `Traced` arrays, which kernels of ops use as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends.numba.program import elementwise, typed
from xformer.backends.numba.program.program import Program, Run, program_of
from xformer.backends.numba.program.traced import Traced, TracedNumber, constant


def emit_elementwise(
    program: Program, name: str, run: Run, out: Traced, ins: Sequence[Any]
) -> None:
    """Record an elementwise instruction, with its kernel if there is one."""
    if name == "pow" and out.dtype.kind == "f":
        ins = [astype(x, out.dtype) if isinstance(x, Traced) else x for x in ins]
    ins = [x.layout if isinstance(x, Traced) and x.is_constant else x for x in ins]
    with_arrays = elementwise.find_native(program, name, out, ins)
    with_arrays = with_arrays or typed.find_native(program, name, out, ins)
    native, arrays = with_arrays or (None, ins)
    program.emit(name, [out], arrays, native, run=run, in_place=[range(len(arrays))])


def as_array(x: Traced) -> Traced:
    """Return x, a number as an array (), whose dtype counts."""
    return x.view(x.layout) if type(x) is TracedNumber else x


def astype(x: Traced, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Traced:
    """Return x cast to another dtype; x itself if it has that dtype."""
    if x.dtype == dtype:
        return as_array(x)
    if x.is_constant:
        return constant(x.layout.astype(dtype))
    program = program_of(x)
    out = program.fresh(x.shape, dtype)
    emit_elementwise(program, "astype", _copy, out, [x])
    return out


def copied(x: Traced) -> Traced:
    """Return a C-contiguous copy of x."""
    if x.is_constant:
        return constant(np.array(x.layout, order="C"))
    program = program_of(x)
    out = program.fresh(x.shape, x.dtype)
    emit_elementwise(program, "copy", _copy, out, [x])
    return out


def copy_to(program: Program, out: Traced, x: Traced) -> None:
    """Record a copy of x into `out`, which has the same shape."""
    emit_elementwise(program, "copy", _copy, out, [x])


def contiguous(x: Traced) -> Traced:
    """Return x itself if it is C-contiguous, else a C-contiguous copy."""
    return x if x.layout.flags.c_contiguous else copied(x)


def _copy(out: Any, x: Any) -> None:
    """Copy a NumPy array to another one, which may have another dtype."""
    np.copyto(out, x, casting="unsafe")


def reshape(x: Traced, /, shape: Any, *, copy: bool | None = None) -> Traced:
    """Return a view of x in another shape if strides allow it, else a reshaped copy.

    copy: False raises ValueError instead of copying; True may return a view, as nothing writes to x
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if x.is_constant:
        return constant(x.layout.reshape(shape))
    try:
        return x.view(np.reshape(x.layout, shape, copy=False))
    except ValueError:
        if copy is False or x.layout.flags.c_contiguous:  # then the shape is wrong
            raise
    return reshape(copied(x), shape)
