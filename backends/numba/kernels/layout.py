"""Instructions of declared kernels, and the order of an array's axes in memory.

A result has the same order as an operand: heads are often a transposed view of rows, and a kernel
that keeps their order copies nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xformer.backends.numba.program.copies import contiguous, copied
from xformer.backends.numba.program.declared import Declared
from xformer.backends.numba.program.native import Native
from xformer.backends.numba.program.program import InPlace, Program, common_program, program_of
from xformer.backends.numba.program.traced import Shape, Traced
from xformer.dispatch import Overridable, kernel

INTEGERS = "ids", "targets", "mask"  # options that are arrays of other dtypes than float32
Order = tuple[int, ...]  # axes, the one with the longest stride first


def recorded(
    op: Overridable[..., Any], refuses: Callable[..., str | None] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as the kernel of an op for programs.

    The kernel needs float32 arrays, which are not all constants of the program, as are its options
    `INTEGERS`. refuses: a function of the op's arguments that returns another reason why the kernel
    cannot run, or None.
    """

    def unsupported(*args: Any, **options: Any) -> str | None:
        if refuses is not None and (why := refuses(*args, **options)) is not None:
            return why
        named = [*(("", x) for x in args), *options.items()]
        arrays = [(name, x) for name, x in named if isinstance(x, Traced | np.ndarray)]
        if any(x.dtype != np.float32 for name, x in arrays if name not in INTEGERS):
            return "only float32"
        return None if common_program([x for _, x in arrays]) else "all arrays are constants"

    unsupported.__signature__ = inspect.signature(op)  # type: ignore[attr-defined]
    return kernel(op, "numba.kernels", unsupported=unsupported)


def unrecordable(*arrays: Traced | None) -> str | None:
    """Return why a float32 kernel cannot take these arrays (None: absent), or None if it can."""
    present = [x for x in arrays if x is not None]
    if any(x.dtype != np.float32 for x in present):
        return "only float32"
    return None if any(not x.is_constant for x in present) else "all arrays are constants"


def order_of(x: Traced, inner: int = 0) -> Order:
    """Return the axes of x, those with the largest |stride| first.

    inner: the last `inner` axes are not sorted. They keep their places at the end.
    """
    outer = x.ndim - inner
    by_stride = sorted(range(outer), key=lambda i: -abs(x.strides[i]))
    return (*by_stride, *range(outer, x.ndim))


def dense(x: Traced, inner: int = 0) -> Traced:
    """Return x if its elements fill memory without gaps in the order `order_of(x, inner)`.

    Otherwise return a copy.
    """
    return x if x.layout.transpose(order_of(x, inner)).flags.c_contiguous else copied(x)


def in_order(x: Traced, order: Order) -> Traced:
    """Return x, or a copy, whose elements fill memory without gaps in this order of axes."""
    return _back(contiguous(x.view(x.layout.transpose(order))), order)


def fresh_in(program: Program, order: Order, shape: Sequence[int], dtype: Any) -> Traced:
    """Return a new array of this shape whose elements fill memory in this order of axes."""
    return _back(program.fresh([shape[i] for i in order], dtype), order)


def _back(ordered: Traced, order: Order) -> Traced:
    """Undo the transposition by `order`: return a view with the axes numbered as before."""
    return ordered.view(ordered.layout.transpose(np.argsort(order)))


def record(
    loops: Declared,
    name: str,
    *ins: Traced | None,
    program: Program | None = None,
    shapes: Mapping[str, Shape] | None = None,
    pieces: int | None = None,
    in_place: InPlace = (),
    without: str | None = None,
    **scalars: Any,
) -> list[Traced]:
    """Record an instruction of a declared kernel, and return its outputs.

    name, in_place: as of `Instruction`. ins: None for an optional array that is absent. The
    first axis of a declaration may be several axes, as N of x (B, T, D). Arrays that begin with the
    axis that is cut get the order of the first of them in memory; the others are C-contiguous.
    without: the name of an optional output that is absent.
    shapes: of axes that no input has, or has in another shape. scalars: the other numbers.
    program: None: that of the inputs, if they are not all constants.
    pieces: None: by the size of the first output, and at most the size of the axis that is cut.
    TypeError or ValueError for an input whose dtype or shape does not fit.
    """
    program, operands = program or program_of(*ins), list[Traced]()
    order: Order = ()
    given: dict[str, Shape] = {"1": (1,), **(shapes or {})}
    sizes = {axis: math.prod(shape) for axis, shape in given.items()}
    for declared, x in zip(loops.ins, ins, strict=True):
        if x is None:
            continue
        inner = max(0, len(declared.axes) - 1)
        lead = x.ndim - inner
        if declared.axes[:1] != (loops.cut,):
            x = contiguous(x)
        elif not order:
            x = dense(x, inner)
            order = order_of(x, inner)[:lead]
        else:
            x = in_order(x, (*order, *range(lead, x.ndim)))
        if x.dtype.name != declared.dtype:
            raise TypeError(f"{name}: {declared.name} must be {declared.dtype}, got {x.dtype}")
        found = x.shape[:lead], *((n,) for n in x.shape[lead:])
        for axis, shape in zip(declared.axes or ("1",), found, strict=True):
            given.setdefault(axis, shape)
            if math.prod(shape) != sizes.setdefault(axis, math.prod(shape)):
                raise ValueError(f"{name}: {declared.name} has a wrong shape, got {x.shape}")
        operands.append(x)
    if pieces is None:
        size = math.prod(n for axis in loops.outs[0].axes for n in given[axis])
        pieces = max(1, min(program.pieces(size), sizes[loops.cut]))
    given["P"] = (pieces,)
    outs = list[Traced]()
    for declared in loops.outs:
        if declared.name != without:
            whole = [n for axis in declared.axes for n in given[axis]]
            like_ins = declared.axes[:1] == (loops.cut,) and len(order) == len(given[loops.cut])
            axes = order if like_ins else ()
            axes = (*axes, *range(len(axes), len(whole)))
            outs.append(fresh_in(program, axes, whole, np.dtype(declared.dtype)))
    native = Native(loops, loops.numbers(sizes, **scalars), pieces)
    program.emit(name, outs, operands, native, in_place=in_place)
    return outs
