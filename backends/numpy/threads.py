"""A thread pool for NumPy kernels. NumPy releases the GIL while it computes.

- A kernel cuts its work into pieces, mostly ranges of rows: fn(start, stop) computes one piece.
- The number of threads is that of NumPy's BLAS, so users set it with `OPENBLAS_NUM_THREADS` or
  `threadpoolctl.threadpool_limits`.
- While pieces run, BLAS has one thread, because pieces call BLAS themselves.
- The number of threads may change how a kernel cuts its work, and so the last bits of sums and
  products. The order in which threads run, and the rest of the program, never change a result.
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
from xformer.base.typing import Array

Piece = Callable[[int, int], Any]  # fn(start, stop)
_Buffer = tuple[Array, int]  # bytes, and the index of the first byte at a multiple of LINE

LINE = 64  # bytes of a cache line
POOLED = 4  # idle buffers of one name that a thread keeps


def n_threads() -> int:
    """Return the number of threads to use: that of BLAS outside this module's calls.

    It is 1 within a piece, and if no BLAS is found.
    """
    if _local.n_threads:
        return _local.n_threads
    with _state.blas_counts.lock:
        return min((n for _, n in _thread_counts()), default=1)


def blocks(fn: Piece, n: int, size: int) -> None:
    """Call fn(start, stop) for pieces of [0, n) of `even_size(n, size)` each, on the thread pool.

    The calling thread computes all pieces in order if there is one piece or one thread, within
    another piece, and while another thread of the program uses the pool. If a piece raises, pieces
    that have not begun are skipped, and the error is raised here.
    """
    size = even_size(n, size)
    helpers = min(-(-n // size), n_threads()) - 1 if n > size else 0
    if helpers < 1:
        for start in range(0, n, size):
            fn(start, min(start + size, n))
    elif _local.n_threads:
        _run_pieces(fn, n, size, helpers)
    else:
        with _limit_blas() as has_pool:
            _run_pieces(fn, n, size, helpers if has_pool else 0)


def on_every_thread(fn: Callable[[], bool], threads: int) -> None:
    """Call fn() on this thread, and on `threads` - 1 others unless the pool is in use.

    The calls share the work out among themselves. They must not call BLAS, which keeps its threads.
    If fn() returns True on this thread, all work is done, and this function returns: to wait
    for the other calls takes longer than a layer of a small model. Otherwise it waits for them, and
    raises the error of a call that failed.
    """
    if threads < 2:
        fn()
        return
    before = _local.n_threads
    with nullcontext(True) if _local.n_threads else _pool() as has_pool:
        helpers, done = threads - 1 if has_pool else 0, False
        job = _Job(lambda start, stop: fn(), helpers, 1)
        _local.n_threads = 1  # a signal handler computes on this thread alone
        try:
            _submit(job, helpers)
            done = fn()
        finally:
            _end(job, helpers, wait=not done)
            _local.n_threads = before
        if not done and job.error is not None:
            raise job.error


def even_size(n: int, most: int) -> int:
    """Return the size of equal pieces of n, at most `most`: an even number of pieces, if several.

    Two threads then finish together, and the pieces do not depend on the number of threads.
    """
    pieces = -(-n // most)
    return max(1, -(-n // (pieces + pieces % 2))) if pieces > 1 else most


def run(calls: list[Callable[[], Any]]) -> None:
    """Call all of `calls` on the thread pool, as `blocks` does."""

    def piece(start: int, stop: int) -> None:
        for i in range(start, stop):
            calls[i]()

    blocks(piece, len(calls), 1)


@contextmanager
def single_blas_thread() -> Iterator[None]:
    """Return a context in which BLAS has one thread, and `blocks` as many as BLAS had before.

    It is for many small products: BLAS wakes its threads for a vector times 10,000 weights.
    """
    if _local.n_threads:
        yield
        return
    n = n_threads()
    with _limit_blas() as has_pool:
        _local.n_threads = n if has_pool else 0
        try:
            yield
        finally:
            _local.n_threads = 0


def scratch(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an uninitialised array, backed by this thread's scratch buffers called `name`.

    A buffer is reused when no array refers to it any more. So a signal handler that interrupts this
    thread gets another buffer. A new array instead would cost a page fault for every 4 KiB.
    """
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    pool = _local.pools.setdefault(name, [])
    buffer = _idle_buffer(pool, nbytes, _IDLE)
    if buffer is None:
        buffer = _aligned_buffer(nbytes)
        busy = [other for other in pool if _idle_buffer([other], 0, _IDLE) is None]
        _local.pools[name] = [*busy, buffer][-POOLED:]  # the idle buffers are too small
    return np.ndarray(shape, dtype, *buffer)


def _idle_buffer(pool: list[_Buffer], nbytes: int, idle: int) -> _Buffer | None:
    """Return the first buffer with `nbytes` usable bytes or more, and exactly `idle` references."""
    for raw, offset in pool:
        if sys.getrefcount(raw) == idle and raw.nbytes >= offset + nbytes:
            return raw, offset
    return None


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an uninitialised array that begins at a cache line.

    NumPy's arrays begin 16 bytes later, and numba's kernels take 2 % longer with them.
    """
    dtype = np.dtype(dtype)
    return np.ndarray(shape, dtype, *_aligned_buffer(math.prod(shape) * dtype.itemsize))


def _aligned_buffer(nbytes: int) -> _Buffer:
    raw = np.empty(nbytes + LINE, np.uint8)
    return raw, -raw.ctypes.data % LINE


def scratch_nbytes() -> int:
    """Return the bytes of the `scratch` buffers of all threads."""
    buffers = [pool for pools in _pools_of_threads.values() for pool in list(pools.values())]
    return sum(raw.nbytes for pool in buffers for raw, _ in pool)


def forget_scratch() -> None:
    """Drop the `scratch` buffers of all threads."""
    for pools in list(_pools_of_threads.values()):
        pools.clear()


class _State:
    """The thread pool and the thread counts of BLAS. A forked child replaces it: see `_forked`."""

    def __init__(self) -> None:
        self.pool = threading.Lock()  # held by the thread that uses the pool
        self.jobs: SimpleQueue[tuple[_Job, Context]] = SimpleQueue()
        self.n_threads = 0  # worker threads that have been started
        self.blas_counts = Exclusive()  # guards `callers`, `before` and the counts of BLAS
        self.callers: set[object] = set()  # calls of `_limit_blas` that have not returned
        self.before: dict[Any, int] = {}  # thread count of each library before the first caller


class _Job:
    """One call of `blocks` or `on_every_thread`: threads take pieces until all are taken."""

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


class _Pools(dict[str, list[_Buffer]]):
    """The scratch buffers of one thread by name. Unlike a dict, it allows weak references."""


class _ThreadLocal(threading.local):
    """Data of one thread."""

    def __init__(self) -> None:
        self.pools = _pools_of_threads[threading.get_ident()] = _Pools()
        self.n_threads = 0  # threads for `blocks`: 1 within a piece; 0: see `n_threads()`


# The reference count of a buffer that no array uses, in `_idle_buffer`. Pythons differ in it.
_IDLE = next(n for n in itertools.count() if _idle_buffer([_aligned_buffer(0)], 0, n))
_state = _State()
_pools_of_threads: WeakValueDictionary[int, _Pools] = WeakValueDictionary()
_local = _ThreadLocal()


def _submit(job: _Job, helpers: int) -> None:
    """Queue the job once for each of `helpers` worker threads. Start threads if there are fewer."""
    state = _state
    for _ in range(helpers):
        state.jobs.put((job, copy_context()))
    while state.n_threads < helpers:
        threading.Thread(target=_work_on, args=(state.jobs,), daemon=True).start()
        state.n_threads += 1


def _end(job: _Job, helpers: int, *, wait: bool) -> None:
    """Remove the job's entries from the queue.

    wait: wait for each worker that has taken an entry, until it has finished
    """
    for _ in range(helpers):
        try:
            _state.jobs.get_nowait()
        except Empty:
            if wait:
                job.done.get()


def _run_pieces(fn: Piece, n: int, size: int, helpers: int) -> None:
    """Call fn for all pieces, on this thread and on `helpers` workers."""
    job = _Job(fn, n, size)
    before = _local.n_threads
    _local.n_threads = 1  # a signal handler computes on this thread alone
    try:
        _submit(job, helpers)
        job.work()
        _end(job, helpers, wait=True)
    finally:
        _local.n_threads = before
    if job.error is not None:
        raise job.error


def _work_on(jobs: SimpleQueue[tuple[_Job, Context]]) -> None:
    """Run jobs forever: the target of a worker thread."""
    _local.n_threads = 1
    while True:
        job, context = jobs.get()
        for library in filter(_counts_per_thread, _blas()):
            library.set_num_threads(1)
        done = job.done
        context.run(job.work)
        del job, context  # so that the next job can reuse their scratch buffers
        done.put(None)


@contextmanager
def _pool() -> Iterator[bool]:
    """Hold the pool unless another thread of the program holds it; yield whether it is held."""
    pool, has_pool = _state.pool, False
    try:
        has_pool = pool.acquire(blocking=False)
        yield has_pool
    finally:
        if has_pool:
            pool.release()


@contextmanager
def _limit_blas() -> Iterator[bool]:
    """Give BLAS one thread, and try to hold the pool; yield whether this call may use the pool.

    BLAS gets its threads back when the last of several concurrent calls returns.
    """
    state, caller, before = _state, object(), list[tuple[Any, int]]()
    with _pool() as has_pool:
        try:
            has_set = state.blas_counts.run(_set_one_thread, state, caller, before)
            yield has_pool and has_set
        finally:
            if caller in state.callers:
                state.blas_counts.run(_restore_threads, state, caller, before)


def _set_one_thread(state: _State, caller: object, before: list[tuple[Any, int]]) -> bool:
    """Give each BLAS library one thread; append its former count to `before`."""
    state.callers.add(caller)
    before += _thread_counts()
    state.before = {library: n for library, n in before if not _counts_per_thread(library)}
    for library, _ in before:
        library.set_num_threads(1)
    return True


def _restore_threads(state: _State, caller: object, before: list[tuple[Any, int]]) -> bool:
    """Give each BLAS library its former count of threads, if this is the last caller."""
    state.callers.discard(caller)
    for library, n in before:
        if not state.callers or _counts_per_thread(library):
            library.set_num_threads(n)
        if hasattr(library, "clear_controlling_thread"):  # threadpoolctl 3.8
            library.clear_controlling_thread()  # else only this thread could set the count
    if not state.callers:
        state.before = {}
    return True


def _thread_counts() -> list[tuple[Any, int]]:
    """Return each BLAS library and its thread count, as it was before `_limit_blas`."""
    before = _state.before
    return [(x, before.get(x) or x.get_num_threads() or 1) for x in _blas()]


def _counts_per_thread(library: Any) -> bool:
    """Return whether the library has a separate thread count for each thread of the program."""
    return getattr(library, "threading_layer", None) == "openmp"


def libraries() -> list[str]:
    """Return the paths of NumPy's BLAS libraries."""
    return [library.filepath for library in _blas()]


@functools.cache
def _blas() -> list[Any]:
    """Return the BLAS libraries that NumPy ships, or else all that are loaded. It takes 1 ms."""
    import threadpoolctl  # its import takes longer than this file; many programs do not need it

    loaded = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    folder = Path(np.__file__).parent.parent
    ours = [x for x in loaded if Path(x.filepath).is_relative_to(folder) and "numpy" in x.filepath]
    return ours or loaded


def _forked() -> None:
    """In a forked child, which has none of the parent's threads: new pool, former BLAS counts."""
    global _state
    before, _state = _state.before, _State()
    for library, n in before.items():
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)
        library.set_num_threads(n)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
