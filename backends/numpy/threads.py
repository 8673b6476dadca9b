"""Pieces of an array's rows on several threads: NumPy lets go of the GIL while it computes.

As many threads as NumPy's BLAS has, which follows the user (`OPENBLAS_NUM_THREADS`,
`threadpoolctl.threadpool_limits`). While pieces run, BLAS has one: each of them calls it itself.

What a kernel cuts may depend on that number, and with it the last bits of sums and products; not on
which thread is first, nor on what the rest of the program does meanwhile.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import Context, copy_context
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from xformer.backends.exclusive import Exclusive
from xformer.typing import Array

Piece = Callable[[int, int], Any]
_Pool = list[tuple[Array, int]]  # buffers, and where a line begins in them

LINE = 64  # bytes of memory that come together
POOLED = 4  # buffers of one name that a thread keeps; signal handlers may hold any number


def n_threads() -> int:
    """How many threads BLAS has, or had before pieces ran; 1 in a piece, or if it does not say."""
    if _kept.n_threads:
        return _kept.n_threads
    with _state.numbers.lock:
        return min((n for _, n in _numbers()), default=1)


def in_piece() -> bool:
    """Whether this thread does a piece, and others do the rest."""
    return _kept.in_piece


def blocks(fn: Piece, n: int, size: int) -> None:
    """fn(start, stop) over [0, n), in pieces of `even(n, size)`, on the threads of NumPy's BLAS.

    In the caller, one after the other, where there is one piece or one thread, within a piece, and
    while another thread of the program has the pool. What a piece raises comes out; then the pieces
    that have not begun are left out.
    """
    size = even(n, size)
    helpers = min(-(-n // size), n_threads()) - 1 if n > size else 0
    if helpers < 1:
        for start in range(0, n, size):
            fn(start, min(start + size, n))
    elif _kept.n_threads:
        _shared(fn, n, size, helpers)
    else:
        with _one_thread() as has_pool:
            _shared(fn, n, size, helpers if has_pool else 0)


def everywhere(fn: Callable[[], bool], threads: int) -> None:
    """fn() here and on so many threads less one, where no other of the program has them.

    They share the work out, and none calls BLAS, which keeps its threads. Where fn gives True here,
    all of it is done, and nobody waits for the others to come back, which takes longer than a small
    model's layer; else what they raise comes out.
    """
    if threads < 2:
        fn()
        return
    before = _kept.n_threads, _kept.in_piece
    with nullcontext(True) if _kept.n_threads else _pool() as has_pool:
        helpers, done = threads - 1 if has_pool else 0, False
        job = _Job(lambda start, stop: fn(), helpers, 1)
        _kept.n_threads, _kept.in_piece = 1, True  # what a signal handler computes, it does alone
        try:
            _begin(job, helpers)
            done = fn()
        finally:
            _withdraw(job, helpers, wait=not done)
            _kept.n_threads, _kept.in_piece = before
        if not done and job.error is not None:
            raise job.error


def even(n: int, most: int) -> int:
    """The size of pieces of n, of at most `most`: equal ones and, if it can be, an even number.

    Then two threads are ready together; and the pieces do not depend on how many threads there are.
    """
    pieces = -(-n // most)
    return max(1, -(-n // (pieces + pieces % 2))) if pieces > 1 else most


def run(todo: list[Callable[[], Any]]) -> None:
    """All of these, on the threads of NumPy's BLAS."""

    def piece(start: int, stop: int) -> None:
        for i in range(start, stop):
            todo[i]()

    blocks(piece, len(todo), 1)


@contextmanager
def blas_alone() -> Iterator[None]:
    """BLAS has one thread meanwhile, and `blocks` as many as BLAS had: for many small products.

    It would wake the others for a vector and 10,000 weights.
    """
    if _kept.n_threads:
        yield
        return
    n = n_threads()
    with _one_thread() as has_pool:
        _kept.n_threads = n if has_pool else 0
        try:
            yield
        finally:
            _kept.n_threads = 0


def scratch(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Memory from this thread's pool of that name, not cleared.

    It goes back to the pool when no array refers to it any more. So a signal handler that computes
    while this thread does gets other memory. A fresh array of its size would cost a page fault for
    every 4 KiB.
    """
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    pool = _kept.pools.setdefault(name, [])
    buffer = _free(pool, nbytes, _IDLE)
    if buffer is None:
        buffer = _lined(nbytes)
        busy = [other for other in pool if _free([other], 0, _IDLE) is None]
        _kept.pools[name] = [*busy, buffer][-POOLED:]  # the idle ones are too small
    return np.ndarray(shape, dtype, *buffer)


def _free(pool: _Pool, nbytes: int, idle: int) -> tuple[Array, int] | None:
    """The first buffer of `nbytes` or more with `idle` references."""
    for raw, offset in pool:
        if sys.getrefcount(raw) == idle and raw.nbytes >= offset + nbytes:
            return raw, offset
    return None


def lined(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array that begins with a line of memory, not cleared: vectors of a core lie in one each.

    NumPy's own begin 16 bytes behind; numba's steps take 2 % longer in them.
    """
    dtype = np.dtype(dtype)
    return np.ndarray(shape, dtype, *_lined(math.prod(shape) * dtype.itemsize))


def _lined(nbytes: int) -> tuple[Array, int]:
    """Memory, and where a line begins in it that so many bytes follow."""
    raw = np.empty(nbytes + LINE, np.uint8)
    return raw, -raw.ctypes.data % LINE


def scratch_nbytes() -> int:
    """Bytes that the `scratch` of all threads takes."""
    pools = [pool for kept in _everyone.values() for pool in list(kept.values())]
    return sum(raw.nbytes for pool in pools for raw, _ in pool)


def forget_scratch() -> None:
    """Let go of the `scratch` of all threads."""
    for kept in list(_everyone.values()):
        kept.clear()


class _State:
    """The pool; in the child of a fork, which has none of its threads, a new one."""

    def __init__(self) -> None:
        self.pool = threading.Lock()  # of whoever has all threads
        self.jobs: SimpleQueue[tuple[_Job, Context]] = SimpleQueue()
        self.n_threads = 0
        self.numbers = Exclusive()  # BLAS's numbers of threads are read or set
        self.inside: set[object] = set()  # calls of `_one_thread`
        self.before: dict[Any, int] = {}  # then, of each library, the number to go back to


class _Job:
    """One call of `blocks`: its threads take pieces until none is left."""

    def __init__(self, fn: Piece, n: int, size: int) -> None:
        self.fn, self.n, self.size = fn, n, size
        self.starts = itertools.count(0, size)
        self.done: SimpleQueue[None] = SimpleQueue()
        self.error: BaseException | None = None

    def work(self) -> None:
        try:
            while self.error is None and (start := next(self.starts)) < self.n:
                self.fn(start, min(start + self.size, self.n))
        except BaseException as error:
            self.error = error


class _Pools(dict[str, _Pool]):
    """Scratch memory by its name; unlike a dict, it can be referred to weakly."""


class _Kept(threading.local):
    """A thread's own buffers, which go with it."""

    def __init__(self) -> None:
        self.pools = _everyone[threading.get_ident()] = _Pools()
        self.n_threads = 0  # within `blas_alone`
        self.in_piece = False


# References to a buffer that no array refers to, as `_free` counts them: it depends on the Python.
_IDLE = next(n for n in itertools.count() if _free([_lined(0)], 0, n))
_state = _State()
_everyone: WeakValueDictionary[int, _Pools] = WeakValueDictionary()
_kept = _Kept()


def _begin(job: _Job, helpers: int) -> None:
    """Give it to helpers."""
    state = _state
    for _ in range(helpers):
        state.jobs.put((job, copy_context()))
    while state.n_threads < helpers:
        threading.Thread(target=_help, args=(state.jobs,), daemon=True).start()
        state.n_threads += 1


def _withdraw(job: _Job, helpers: int, *, wait: bool) -> None:
    """It is over for helpers that have not come to it yet; wait: for the others."""
    for _ in range(helpers):
        try:
            _state.jobs.get_nowait()
        except Empty:
            if wait:
                job.done.get()


def _shared(fn: Piece, n: int, size: int, helpers: int) -> None:
    job = _Job(fn, n, size)
    before = _kept.n_threads, _kept.in_piece
    _kept.n_threads, _kept.in_piece = 1, True  # what a signal handler computes, it does alone
    try:
        _begin(job, helpers)
        job.work()
        _withdraw(job, helpers, wait=True)
    finally:
        _kept.n_threads, _kept.in_piece = before
    if job.error is not None:
        raise job.error


def _help(jobs: SimpleQueue[tuple[_Job, Context]]) -> None:
    _kept.n_threads, _kept.in_piece = 1, True  # always
    while True:
        job, context = jobs.get()
        for library in filter(_of_thread, _blas()):
            library.set_num_threads(1)
        done = job.done
        context.run(job.work)
        del job, context  # their arrays, and scratch among them, are free for what comes next
        done.put(None)


@contextmanager
def _pool() -> Iterator[bool]:
    """True where this thread has all others, since no other of the program has them."""
    pool, has_pool = _state.pool, False
    try:
        has_pool = pool.acquire(blocking=False)
        yield has_pool
    finally:
        if has_pool:
            pool.release()


@contextmanager
def _one_thread() -> Iterator[bool]:
    """As `_pool`; BLAS has one thread, until the last that wants it so has left."""
    state, one, before = _state, object(), list[tuple[Any, int]]()
    with _pool() as has_pool:
        try:
            changes = state.numbers.run(_enter, state, one, before)
            yield has_pool and changes
        finally:
            if one in state.inside:
                state.numbers.run(_leave, state, one, before)


def _enter(state: _State, one: object, before: list[tuple[Any, int]]) -> bool:
    state.inside.add(one)
    before += _numbers()
    state.before = {library: n for library, n in before if not _of_thread(library)}
    for library, _ in before:
        library.set_num_threads(1)
    return True


def _leave(state: _State, one: object, before: list[tuple[Any, int]]) -> bool:
    """The last to leave gives BLAS its threads back."""
    state.inside.discard(one)
    for library, n in before:
        if not state.inside or _of_thread(library):
            library.set_num_threads(n)
        if hasattr(library, "clear_controlling_thread"):  # threadpoolctl 3.8
            library.clear_controlling_thread()  # else only this thread could set it
    if not state.inside:
        state.before = {}
    return True


def _numbers() -> list[tuple[Any, int]]:
    """Of each library, how many threads it has, or had before the first call of `_one_thread`."""
    before = _state.before
    return [(x, before.get(x) or x.get_num_threads() or 1) for x in _blas()]


def _of_thread(library: Any) -> bool:
    """Whether each thread of the program has a number of its own."""
    return getattr(library, "threading_layer", None) == "openmp"


def libraries() -> list[str]:
    """Files of NumPy's BLAS."""
    return [library.filepath for library in _blas()]


@functools.cache
def _blas() -> list[Any]:
    """NumPy's own BLAS, or all there are. Looking for them takes a millisecond."""
    import threadpoolctl  # takes longer than the rest of this file, and a start may do without

    found = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    folder = Path(np.__file__).parent.parent
    own = [x for x in found if Path(x.filepath).is_relative_to(folder) and "numpy" in x.filepath]
    return own or found


def _forked() -> None:
    """The child has none of the threads that wanted BLAS to have one."""
    global _state
    before, _state = _state.before, _State()
    for library, n in before.items():
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)
        library.set_num_threads(n)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
