"""The engine: threads execute a list of native instructions, with barriers where the list has them.

The list is an int64 array with one row for each instruction:

KERNEL, ARGS   addresses of the kernel and of its arguments
PIECES         number of pieces
BARRIER        whether all earlier instructions must be done first
FIRST          index of the claim of its first piece
CHECK          address of the word that a check sets if it fails; 0 for other instructions
ANYONE         whether a thread that is ready takes pieces assigned to other threads

Each piece has a claim: a word that is 0 until a thread takes the piece. Each instruction has a
counter of the pieces that are done. Every call has new claims and counters, and so has each of its
rounds: a late thread may still read the claims of the round before.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np

from xformer.backends.numba import tile
from xformer.backends.numba.atomic import count, give_way, pause, read
from xformer.backends.numba.jit import rowwise
from xformer.backends.numba.matmul import call, sgemm
from xformer.backends.numba.registers import USABLE
from xformer.backends.numba.tuning import GRACE, LONG
from xformer.backends.numpy.threads import on_every_thread, scratch, single_blas_thread

KERNEL, ARGS, PIECES, BARRIER, FIRST, CHECK, ANYONE = range(7)


def execute(code: Any, words: Any, threads: int, *, rounds: int = 1, blas: bool = True) -> None:
    """Execute all rows of `code`, `rounds` times, on this thread and `threads - 1` others.

    words: the array that the addresses in the ARGS column point into.
    blas: whether kernels call BLAS, which then has one thread.
    If a check fails, the instructions after it compute nothing.
    """
    n_claims = int(code[:, PIECES].sum())
    claims = np.zeros(rounds * n_claims, np.int64)
    done = np.zeros(rounds * len(code) + 1, np.int64)  # the last word counts failed checks
    numbers = itertools.count()

    def work() -> bool:
        thread_words, ith = _thread_words(), next(numbers)
        counters = claims.ctypes.data, done.ctypes.data
        _walk_all(code, ith, threads, *counters, thread_words.ctypes.data, rounds, n_claims)
        # True. A late thread keeps this closure, and with it code, words, claims and done, alive.
        return words is not None

    if int(code[:, PIECES].max(initial=1)) == 1:
        threads = 1
    with single_blas_thread() if blas else nullcontext():
        on_every_thread(work, threads)


def _thread_words() -> _ThreadWords:
    """Return the words that kernels read of their thread: SGEMM, TILES, SCRATCH of `native`."""
    tile_scratch = scratch("tile", (tile.SIZE,), np.float32)
    words = scratch("words", (4,), np.int64)
    words[:] = sgemm() or 0, tile.compiled() if USABLE else 0, tile_scratch.ctypes.data, 0
    return _ThreadWords(words, tile_scratch)


class _ThreadWords:
    """The words of a thread; keeps the scratch memory alive whose address is one of them."""

    def __init__(self, words: Any, tile_scratch: Any) -> None:
        self.tile_scratch, self.ctypes = tile_scratch, words.ctypes


@rowwise
def _walk_all(
    code: Any,
    ith: int,
    nth: int,
    claims: int,
    done: int,
    thread_words: int,
    rounds: int,
    n_claims: int,
) -> None:
    """Execute `code` `rounds` times, as thread number `ith` of `nth`.

    claims, done, thread_words: addresses; claims and counters are those of all rounds.
    """
    failed = done + 8 * rounds * len(code)
    for i in range(rounds):
        if nth == 1:
            _walk_alone(code, failed, thread_words)
            continue
        counters = claims + 8 * i * n_claims, done + 8 * i * len(code), failed
        _walk(code, ith, nth, counters, thread_words)


@rowwise
def _walk_alone(code: Any, failed: int, thread_words: int) -> None:
    """Execute `code` on this thread alone, without claims and counters."""
    for j in range(len(code)):
        for i in range(code[j, PIECES]):
            _compute(code, j, i, failed, thread_words)


@rowwise
def _walk(code: Any, ith: int, nth: int, counters: Any, thread_words: int) -> None:
    """Execute the share of thread number `ith` of `nth` in one round.

    A thread computes every nth piece, then unclaimed pieces of others if ANYONE is set.
    counters: addresses of the claims, of the pieces done, and of the number of failed checks.
    """
    waited, grace = 0, GRACE
    for j in range(len(code)):
        if code[j, BARRIER]:
            while waited < j:
                grace = _wait(code, waited, counters, thread_words, grace)
                waited += 1
        for i in range(ith, code[j, PIECES], nth):
            _claim(code, j, i, counters, thread_words)
        for i in range(code[j, PIECES] if code[j, ANYONE] else 0):
            _claim(code, j, i, counters, thread_words)
    while waited < len(code):
        grace = _wait(code, waited, counters, thread_words, grace)
        waited += 1


@rowwise
def _claim(code: Any, j: int, i: int, counters: Any, thread_words: int) -> bool:
    """Claim and compute piece i of instruction j; return whether this thread has claimed it.

    Returns False if another thread claimed it first, True also if nothing was computed because a
    check has failed.

    counters: addresses of the claims, of the pieces done, and of the number of failed checks
    thread_words: the address of the words of this thread, see `_thread_words`
    """
    claims, done, failed = counters
    claim = claims + 8 * (code[j, FIRST] + i)
    if read(claim) != 0 or count(claim) != 0:
        return False
    _compute(code, j, i, failed, thread_words)
    count(done + 8 * j)
    return True


@rowwise
def _compute(code: Any, j: int, i: int, failed: int, thread_words: int) -> None:
    """Compute piece i of instruction j; do nothing if a check has failed."""
    if read(failed) == 0:
        call(code[j, KERNEL], (code[j, ARGS], np.int64(i), code[j, PIECES], np.int64(thread_words)))
        if code[j, CHECK] and read(code[j, CHECK]) != 0:
            count(failed)


@rowwise
def _wait(code: Any, j: int, counters: Any, thread_words: int, grace: int) -> int:
    """Wait until instruction j is done; return the grace for the next wait.

    After `grace` pauses this thread computes the unclaimed pieces itself. If there was one, its
    thread may have no core, so the returned grace is 1.
    """
    spins = 0
    while read(counters[1] + 8 * j) < code[j, PIECES]:
        spins += 1
        if spins == grace:
            for i in range(code[j, PIECES]):
                if _claim(code, j, i, counters, thread_words):
                    grace = 1
        if spins < LONG:
            pause()
        else:
            give_way()
    return grace
