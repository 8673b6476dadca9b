"""Kernels of programs: functions of C that compute a piece of an instruction.

    @native
    def negate(args: int, piece: int, pieces: int, memory: int) -> None:
        y, x, n = words(args, 3)
        ...

args: where int64 words are: the addresses of the outs, then of the ins, then the instruction's own
numbers, which `numbers` finds behind any number of operands. A kernel computes its `piece` of
`pieces`, in any order and on any thread, and writes nothing else. memory: where words of its thread
are (`SGEMM`, `TILES`, `SCRATCH`). It cannot raise: whoever emits the instruction has checked
shapes, dtypes and strides, and addresses follow them.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from xformer.backends.numba.compiled import callable_from_c, inlined

SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)
LINE = 16  # float32 numbers of a line of memory: pieces are cut at lines, so that no two share one
NOTHING = 0, (1 << 63) - 1, -(1 << 63)
SGEMM, TILES, SCRATCH = range(3)  # words of a thread: BLAS's sgemm, `tile`'s, float32 memory


class Kernel:
    """A kernel, compiled when its address is first asked for."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn, self.__name__ = fn, fn.__name__

    @functools.cached_property
    def address(self) -> int:
        return callable_from_c(self.fn, SIGNATURE)


class Native(NamedTuple):
    """How an instruction runs without Python: a kernel, its numbers, in how many pieces.

    The numbers of a check begin with `NOTHING`, which it writes over: whether it has failed, and
    the least and the largest of what it has looked at, in all rounds of a run.
    """

    kernel: Kernel
    numbers: tuple[int, ...]
    pieces: int = 1
    blas: bool = False  # whether it may call BLAS
    anyone: bool = False  # any ready thread may take a piece: none has the data in its cache


def native(fn: Callable[..., None]) -> Kernel:
    """`fn` as a kernel."""
    return Kernel(fn)


def bits(x: float) -> int:
    """A float64 as a word; `real` is its inverse."""
    return int(struct.unpack("<q", struct.pack("<d", float(x)))[0])


@inlined
def real(word: Any) -> Any:
    """The float64 of a word."""
    return np.int64(word).view(np.float64)


def _inline(fn: Any) -> Any:
    return numba.njit(inline="always")(fn)


def _pointer(kind: Any) -> Any:
    def typed(typing: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), build

    return intrinsic(typed)


_words: Any = _pointer(types.int64)
_floats: Any = _pointer(types.float32)
_doubles: Any = _pointer(types.float64)
_integers: Any = _pointer(types.int32)
_bytes: Any = _pointer(types.uint8)


@_inline
def words(address: Any, n: Any) -> Any:
    """n int64 at an address."""
    return numba.carray(_words(address), n, np.int64)


@_inline
def operands(args: Any) -> Any:
    """How many outs and ins there are."""
    return words(args - 8, 1)[0]


@_inline
def numbers(args: Any, n: Any) -> Any:
    """The first n of the instruction's own numbers."""
    return words(args + 8 * operands(args), n)


@_inline
def float32s(address: Any, shape: Any) -> Any:
    """A C-contiguous float32 array at an address."""
    return numba.carray(_floats(address), shape, np.float32)


@_inline
def float64s(address: Any, shape: Any) -> Any:
    """The same of float64."""
    return numba.carray(_doubles(address), shape, np.float64)


@_inline
def int32s(address: Any, n: Any) -> Any:
    """n int32 at an address."""
    return numba.carray(_integers(address), n, np.int32)


@_inline
def uint8s(address: Any, n: Any) -> Any:
    """n bytes at an address."""
    return numba.carray(_bytes(address), n, np.uint8)


@_inline
def part(n: Any, piece: Any, pieces: Any, unit: Any) -> Any:
    """Of n things those of a piece, from and to: multiples of a unit but for the last."""
    size = (n + pieces - 1) // pieces
    size = (size + unit - 1) // unit * unit
    return min(n, piece * size), min(n, (piece + 1) * size)
