"""How to write a kernel of programs: a C function that computes a piece of an instruction.

    @native
    def negate(args: int, piece: int, pieces: int, memory: int) -> None:
        y, x, n = words(args, 3)
        ...

args: the address of int64 words: the addresses of the outs, the addresses of the ins, then the
    integers of the instruction (`Native.numbers`), which `numbers` reads.
piece, pieces: the kernel computes piece number `piece` of `pieces` and writes nothing else. Pieces
    run in any order on any thread.
memory: the address of the words of the thread (`SGEMM`, `TILES`, `SCRATCH`).

A kernel cannot raise. The code that emits the instruction checks shapes, dtypes and strides.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from xformer.backends.numba.atomic import array_at
from xformer.backends.numba.jit import callable_from_c, inlined

SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)
LINE = 16  # float32 numbers in a cache line; pieces begin at a multiple, so that no two share one
NOTHING = 0, (1 << 63) - 1, -(1 << 63)  # initial words of a check: not failed, no least or largest
# Words of a thread: addresses of BLAS's sgemm, of `tile.multiply` and of float32 scratch for it.
SGEMM, TILES, SCRATCH = range(3)


KERNELS = list["Kernel"]()  # all kernels of the imported modules


class Kernel:
    """A native kernel (see `native`), compiled when `address` is first read.

    address: the address of the compiled C function.
    """

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn, self.__name__ = fn, fn.__name__

    @functools.cached_property
    def address(self) -> int:
        return callable_from_c(self.fn, SIGNATURE)


class Native(NamedTuple):
    """How an instruction runs without Python: a kernel, its integer arguments, number of pieces.

    The integers of a check begin with the three words `NOTHING`. The check overwrites them: whether
    it has failed, and the least and the largest value in all rounds of a run.
    """

    kernel: Kernel
    numbers: tuple[int, ...]
    pieces: int = 1
    blas: bool = False  # whether the kernel may call BLAS
    anyone: bool = False  # any ready thread takes the next piece; for data that is in no cache


def native(fn: Callable[..., None]) -> Kernel:
    """Return `fn` as a `Kernel`: a C function (args, piece, pieces, memory), described above."""
    KERNELS.append(Kernel(fn))
    return KERNELS[-1]


def bits(x: float) -> int:
    """Return the bits of a float64 as an int64 word; `real` is the inverse."""
    return int(struct.unpack("<q", struct.pack("<d", float(x)))[0])


@inlined
def real(word: Any) -> Any:
    """Return the float64 whose bits are this int64 word."""
    return np.int64(word).view(np.float64)


def _inline(fn: Any) -> Any:
    """Compile `fn` into its callers."""
    return numba.njit(inline="always")(fn)


# Arrays at an address, without a copy: (address, size), or (address, shape) for floats.
words: Any = array_at(types.int64)
float32s: Any = array_at(types.float32)
float64s: Any = array_at(types.float64)
int32s: Any = array_at(types.int32)
uint8s: Any = array_at(types.uint8)


@_inline
def operands(args: Any) -> Any:
    """Return the number of outs and ins, which is stored in the word before `args`."""
    return words(args - 8, 1)[0]


@_inline
def numbers(args: Any, n: Any) -> Any:
    """Return the first n integers of the instruction (`Native.numbers`)."""
    return words(args + 8 * operands(args), n)


@_inline
def part(n: Any, piece: Any, pieces: Any, unit: Any) -> Any:
    """Return (start, stop): the range of n items that piece number `piece` of `pieces` computes.

    start and stop are multiples of `unit`, or n, so that no unit is split between pieces.
    """
    size = (n + pieces - 1) // pieces
    size = (size + unit - 1) // unit * unit
    return min(n, piece * size), min(n, (piece + 1) * size)
