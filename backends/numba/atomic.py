"""Atomic counters and pauses for compiled loops, and arrays from addresses.

An address points into a NumPy array, which the caller must keep alive.
"""

from __future__ import annotations

import os
import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function, unpack_tuple
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

NUMBER, BYTES = ir.IntType(64), 8
PAUSE = {"x86_64": "llvm.x86.sse2.pause", "amd64": "llvm.x86.sse2.pause"}.get(
    platform.machine().lower()
)


def _count(typing: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, atomically; return its old value."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at = builder.inttoptr(values[0], NUMBER.as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(NUMBER, 1), "seq_cst")

    return types.int64(types.int64), build


def _read(typing: Any, address: Any) -> Any:
    """Return the int64 at an address by an atomic load."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at = builder.inttoptr(values[0], NUMBER.as_pointer())
        return builder.load_atomic(at, "seq_cst", BYTES)

    return types.int64(types.int64), build


def _pause(typing: Any) -> Any:
    """Pause for some nanoseconds, in which the core's other hardware thread can compute."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if PAUSE:
            nothing = ir.FunctionType(ir.VoidType(), [])
            builder.call(get_or_insert_function(builder.module, nothing, PAUSE), [])
        return context.get_dummy_value()

    return types.void(), build


def _give_way(typing: Any) -> Any:
    """Yield this core to another thread, if the system has `sched_yield`."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if hasattr(os, "sched_yield"):
            function = ir.FunctionType(ir.IntType(32), [])
            builder.call(get_or_insert_function(builder.module, function, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), build


def array_at(element: Any) -> Any:
    """Return an intrinsic (address, shape): the C-contiguous array there, without a copy.

    element: numba's type of its elements. shape: an integer, or a tuple of integers. `numba.carray`
    would compile a function for each kind of shape.
    """

    def typed(typing: Any, address: Any, shape: Any) -> Any:
        shape = types.unliteral(shape)
        array = types.Array(element, len(_axes(shape)), "C")

        def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return _dense_view(context, builder, array, shape, values)

        return array(types.int64, shape), build

    return intrinsic(typed)


def _array_like(typing: Any, like: Any, address: Any, shape: Any) -> Any:
    """Return the C-contiguous array of this shape at an address, of the dtype of `like`."""
    shape = types.unliteral(shape)
    array = types.Array(like.dtype, len(_axes(shape)), "C")

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _dense_view(context, builder, array, shape, values[1:])

    return array(like, types.int64, shape), build


def _dense_view(context: Any, builder: Any, array: Any, shape: Any, values: Any) -> Any:
    """Return a C-contiguous array. values: its address and its shape, of type `shape`."""
    sizes = _integers(context, builder, shape, values[1])
    steps = [_itemsize(context, array.dtype)]
    for size in sizes[:0:-1]:
        steps.insert(0, builder.mul(steps[0], size))
    return _view(context, builder, array, values[0], sizes, steps)


def strided_at(element: Any) -> Any:
    """Return an intrinsic (address, shape, strides): the array there, without a copy.

    element: numba's type of its elements. shape, strides: tuples of integers; strides in bytes.
    """

    def typed(typing: Any, address: Any, shape: Any, strides: Any) -> Any:
        shape, strides = types.unliteral(shape), types.unliteral(strides)
        array = types.Array(element, len(shape), "A")

        def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            sizes = _integers(context, builder, shape, values[1])
            steps = _integers(context, builder, strides, values[2])
            return _view(context, builder, array, values[0], sizes, steps)

        return array(types.int64, shape, strides), build

    return intrinsic(typed)


def _axes(shape: Any) -> tuple[Any, ...]:
    """Return the types of the integers of a shape, which may be one integer."""
    return tuple(shape) if isinstance(shape, types.BaseTuple) else (shape,)


def _integers(context: Any, builder: Any, shape: Any, value: Any) -> list[Any]:
    """Return the integers of a shape or of strides, converted to numba's intp."""
    values = unpack_tuple(builder, value) if isinstance(shape, types.BaseTuple) else [value]
    return [
        context.cast(builder, x, axis, types.intp)
        for x, axis in zip(values, _axes(shape), strict=True)
    ]


def _itemsize(context: Any, element: Any) -> Any:
    nbytes = context.get_abi_sizeof(context.get_data_type(element))
    return context.get_constant(types.intp, nbytes)


def _view(
    context: Any, builder: Any, array: Any, address: Any, sizes: list[Any], steps: list[Any]
) -> Any:
    """Return an array of numba's type `array`, which does not own its memory."""
    view = context.make_array(array)(context, builder)
    data = builder.inttoptr(address, view.data.type)
    populate_array(view, data, sizes, steps, _itemsize(context, array.dtype), meminfo=None)
    return view._getvalue()


count: Any = intrinsic(_count)
read: Any = intrinsic(_read)
pause: Any = intrinsic(_pause)
give_way: Any = intrinsic(_give_way)
floats: Any = array_at(types.float32)
array_like: Any = intrinsic(_array_like)
strided_floats: Any = strided_at(types.float32)
