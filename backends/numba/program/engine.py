"""Threads walk a list of native instructions, with a barrier only where the list has one.

A row of the list is (kernel, args, pieces, barrier, first), in int64: two addresses, how many
pieces, whether all that came before has to be done first, and the number of its first claim. Each
piece has a word, 0 until somebody claims it, and each instruction one that counts what is done.
Both are new at each call: a thread of the last one may come late.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from xformer.backends.numba import tile
from xformer.backends.numba.atomic import count, give_way, pause, read
from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.gemm import call, sgemm
from xformer.backends.numba.registers import USABLE
from xformer.backends.numpy.threads import blas_alone, everywhere, scratch

KERNEL, ARGS, PIECES, BARRIER, FIRST = range(5)
LONG = 20_000  # pauses: then the other thread may have no core
GRACE = 4_000  # pauses before a piece is taken from its thread, which has its share of memory near


def execute(code: Any, words: Any, threads: int) -> None:
    """All rows of the list, here and on so many threads less one. words: of all args, kept here."""
    n_claims = int(code[:, PIECES].sum())
    claims, done = np.zeros(n_claims, np.int64), np.zeros(len(code), np.int64)
    numbers = itertools.count()

    def work() -> bool:
        memory = _memory()
        _walk(
            code, next(numbers), threads, claims.ctypes.data, done.ctypes.data, memory.ctypes.data
        )
        return words is not None  # kept, with the rest, until the last thread has come

    if int(code[:, PIECES].max(initial=1)) == 1:
        threads = 1
    with blas_alone():  # kernels call it, on each thread for itself
        everywhere(work, threads)


def _memory() -> Any:
    """Words of this thread, as `native` names them; the memory stays while the array does."""
    own = scratch("tile", (tile.SIZE,), np.float32)
    row = scratch("words", (4,), np.int64)
    row[:] = sgemm() or 0, tile.compiled() if USABLE else 0, own.ctypes.data, 0
    return _Kept(row, own)


class _Kept:
    def __init__(self, row: Any, own: Any) -> None:
        self.own, self.ctypes = own, row.ctypes


@rowwise
def _walk(code: Any, ith: int, nth: int, claims: int, done: int, memory: int) -> None:
    """Each thread does its own pieces; others' only where it had to wait long."""
    waited, grace = 0, GRACE
    for j in range(len(code)):
        if code[j, BARRIER]:
            while waited < j:
                grace = _wait(code, waited, claims, done, memory, grace)
                waited += 1
        for i in range(ith, code[j, PIECES], nth):
            _claim(code, j, i, claims, done, memory)
    while waited < len(code):
        grace = _wait(code, waited, claims, done, memory, grace)
        waited += 1


@rowwise
def _claim(code: Any, j: int, i: int, claims: int, done: int, memory: int) -> bool:
    """Piece i of instruction j, unless somebody has it."""
    at = claims + 8 * (code[j, FIRST] + i)
    if read(at) != 0 or count(at) != 0:
        return False
    call(code[j, KERNEL], (code[j, ARGS], np.int64(i), code[j, PIECES], np.int64(memory)))
    count(done + 8 * j)
    return True


@rowwise
def _wait(code: Any, j: int, claims: int, done: int, memory: int, grace: int) -> int:
    """Until instruction j is done; after `grace` pauses what nobody has claimed is done here.

    The grace of the next one: none where another thread was too late, which may have no core.
    """
    spins = 0
    while read(done + 8 * j) < code[j, PIECES]:
        spins += 1
        if spins == grace:
            for i in range(code[j, PIECES]):
                if _claim(code, j, i, claims, done, memory):
                    grace = 1
        if spins < LONG:
            pause()
        else:
            give_way()
    return grace
