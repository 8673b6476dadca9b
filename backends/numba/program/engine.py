"""Threads walk a list of native instructions, with a barrier only where the list has one.

A row of the list is (kernel, args, pieces, barrier, first, check, anyone), in int64: two addresses,
how many pieces, whether all that came before has to be done first, the number of its first claim,
where a check writes whether it has failed, or 0, and whether a thread that is ready takes others'
pieces. Each piece has a word, 0 until somebody claims it,
and each instruction one that counts what is done. Both are new at each call, and in each of its
rounds: a thread of the last one may come late.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np

from xformer.backends.numba import tile
from xformer.backends.numba.atomic import count, give_way, pause, read
from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.gemm import call, sgemm
from xformer.backends.numba.registers import USABLE
from xformer.backends.numba.tuning import GRACE, LONG
from xformer.backends.numpy.threads import on_every_thread, scratch, single_blas_thread

KERNEL, ARGS, PIECES, BARRIER, FIRST, CHECK, ANYONE = range(7)


def execute(code: Any, words: Any, threads: int, *, rounds: int = 1, blas: bool = True) -> None:
    """All rows of the list, so many times, here and on so many threads less one.

    words: of all args, kept here. blas: whether kernels call BLAS, on each thread for itself. After
    a check has failed nothing is computed that had to wait for it.
    """
    n_claims = int(code[:, PIECES].sum())
    claims = np.zeros(rounds * n_claims, np.int64)
    done = np.zeros(rounds * len(code) + 1, np.int64)  # and behind it how many checks have failed
    numbers = itertools.count()

    def work() -> bool:
        memory, ith = _memory(), next(numbers)
        places = claims.ctypes.data, done.ctypes.data, memory.ctypes.data
        _walk_all(code, ith, threads, *places, rounds, n_claims)
        return words is not None  # kept, with the rest, until the last thread has come

    if int(code[:, PIECES].max(initial=1)) == 1:
        threads = 1
    with single_blas_thread() if blas else nullcontext():
        on_every_thread(work, threads)


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
def _walk_all(
    code: Any, ith: int, nth: int, claims: int, done: int, memory: int, rounds: int, n_claims: int
) -> None:
    """Round after round."""
    failed = done + 8 * rounds * len(code)
    for i in range(rounds):
        if nth == 1:
            _walk_alone(code, failed, memory)
            continue
        own = claims + 8 * i * n_claims, done + 8 * i * len(code), failed
        _walk(code, ith, nth, own, memory)


@rowwise
def _walk_alone(code: Any, failed: int, memory: int) -> None:
    """On one thread, which nobody waits for."""
    for j in range(len(code)):
        for i in range(code[j, PIECES]):
            _compute(code, j, i, failed, memory)


@rowwise
def _walk(code: Any, ith: int, nth: int, marks: Any, memory: int) -> None:
    """Each thread does its own pieces; others' where anyone may, or where it had to wait long.

    marks: where claims are, what is done, and how many checks have failed.
    """
    waited, grace = 0, GRACE
    for j in range(len(code)):
        if code[j, BARRIER]:
            while waited < j:
                grace = _wait(code, waited, marks, memory, grace)
                waited += 1
        for i in range(ith, code[j, PIECES], nth):
            _claim(code, j, i, marks, memory)
        for i in range(code[j, PIECES] if code[j, ANYONE] else 0):
            _claim(code, j, i, marks, memory)
    while waited < len(code):
        grace = _wait(code, waited, marks, memory, grace)
        waited += 1


@rowwise
def _claim(code: Any, j: int, i: int, marks: Any, memory: int) -> bool:
    """Piece i of instruction j, unless somebody has it."""
    claims, done, failed = marks
    at = claims + 8 * (code[j, FIRST] + i)
    if read(at) != 0 or count(at) != 0:
        return False
    _compute(code, j, i, failed, memory)
    count(done + 8 * j)
    return True


@rowwise
def _compute(code: Any, j: int, i: int, failed: int, memory: int) -> None:
    """Piece i of instruction j, unless a check has failed."""
    if read(failed) == 0:
        call(code[j, KERNEL], (code[j, ARGS], np.int64(i), code[j, PIECES], np.int64(memory)))
        if code[j, CHECK] and read(code[j, CHECK]) != 0:
            count(failed)


@rowwise
def _wait(code: Any, j: int, marks: Any, memory: int, grace: int) -> int:
    """Until instruction j is done; after `grace` pauses what nobody has claimed is done here.

    The grace of the next one: none where another thread was too late, which may have no core.
    """
    spins = 0
    while read(marks[1] + 8 * j) < code[j, PIECES]:
        spins += 1
        if spins == grace:
            for i in range(code[j, PIECES]):
                if _claim(code, j, i, marks, memory):
                    grace = 1
        if spins < LONG:
            pause()
        else:
            give_way()
    return grace
