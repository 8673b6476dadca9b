"""Atomic counters and pauses for compiled loops, and arrays from addresses.

Addresses are of the memory of NumPy arrays, which whoever calls keeps alive.
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
    """The int64 at an address, which is one more from now on."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at = builder.inttoptr(values[0], NUMBER.as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(NUMBER, 1), "seq_cst")

    return types.int64(types.int64), build


def _read(typing: Any, address: Any) -> Any:
    """The int64 at an address, as the last thread has left it."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at = builder.inttoptr(values[0], NUMBER.as_pointer())
        return builder.load_atomic(at, "seq_cst", BYTES)

    return types.int64(types.int64), build


def _pause(typing: Any) -> Any:
    """A rest of some nanoseconds, in which the other thread of the same core computes."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if PAUSE:
            nothing = ir.FunctionType(ir.VoidType(), [])
            builder.call(get_or_insert_function(builder.module, nothing, PAUSE), [])
        return context.get_dummy_value()

    return types.void(), build


def _give_way(typing: Any) -> Any:
    """Let another thread have this core, where the system lets a thread say so."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if hasattr(os, "sched_yield"):
            said = ir.FunctionType(ir.IntType(32), [])
            builder.call(get_or_insert_function(builder.module, said, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), build


def _floats_at(typing: Any, address: Any) -> Any:
    """A pointer to float32 numbers at an address."""

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
    """The float32 array of this shape, C-contiguous, that begins at an address."""
    return numba.carray(_pointer(address), shape, np.float32)
