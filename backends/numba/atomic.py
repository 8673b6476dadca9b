"""Atomic counters and pauses for compiled loops, and arrays from addresses.

An address points into a NumPy array, which the caller must keep alive.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from xformer.backends.numba.compiled import rowwise

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


def _floats_at(typing: Any, address: Any) -> Any:
    """Cast an address to a pointer to float32."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), build


count: Any = intrinsic(_count)
read: Any = intrinsic(_read)
pause: Any = intrinsic(_pause)
give_way: Any = intrinsic(_give_way)
_pointer: Any = intrinsic(_floats_at)


@rowwise
def floats(address: int, shape: Any) -> Any:
    """Return the C-contiguous float32 array of this shape at an address, without a copy."""
    return numba.carray(_pointer(address), shape, np.float32)
