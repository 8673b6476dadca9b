"""What compiled loops say to each other across threads, and arrays that they are told the place of.

Addresses are of the memory of NumPy arrays, which whoever calls keeps alive.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic
from xformer.backends.numba.compiled import rowwise
from xformer.backends.numpy.threads import everywhere

from xformer.typing import Array

NUMBER, BYTES = ir.IntType(64), 8
WORD = 8  # bytes; of a stage there are two: how many pieces have been taken, and are done
ALL = 1 << 62  # pieces, more than any stage has
LONG = 10_000  # pauses: then the other thread may have no core
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


def nothing_done(n_stages: int) -> Array:
    """Their two words each."""
    return np.zeros((n_stages, 2), np.int64)


def place(x: Array | None) -> int:
    """Its address; 0 of none."""
    return 0 if x is None else int(x.ctypes.data)


def on_each(
    loops: Callable[..., None],
    arguments: tuple[Any, ...],
    stages: Array,
    owners: Any,
    start: int,
    stop: int,
) -> None:
    """On each thread.

    owners: whose memory the tables speak of, kept until the last thread has done.
    """
    with needed(stages):
        loops(*arguments, stages)


def on_all(
    loops: Callable[..., None],
    arguments: tuple[Any, ...],
    stages: Array,
    owners: Any,
    threads: int,
) -> None:
    """As `on_each`, on as many threads, of loops that call no BLAS and end with a `wait`."""

    def run() -> bool:
        on_each(loops, arguments, stages, owners, 0, 0)
        return bool(stages[0, 1] < ALL)  # else another thread has failed

    everywhere(run, threads)


@contextmanager
def needed(stages: Array) -> Iterator[None]:
    """Where this fails, no other thread waits for its pieces."""
    try:
        yield
    except BaseException:
        stages[:, 1] = ALL
        raise


@rowwise
def wait(at: int, n_pieces: int) -> None:
    """Until as many pieces of the stage at an address are done."""
    waited = 0
    while read(at + WORD) < n_pieces:
        waited += 1
        if waited < LONG:
            pause()
        else:
            give_way()


@rowwise
def floats(address: int, shape: Any) -> Any:
    """The float32 array of this shape, C-contiguous, that begins at an address."""
    return numba.carray(_pointer(address), shape, np.float32)
