"""Pieces on several threads: each runs once, and BLAS has its number of threads again."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from hanging import SECONDS

from xformer import ops
from xformer.backends.numpy import linear_cross_entropy
from xformer.backends.numpy import threads as kernels
from xformer.backends.numpy.threads import blocks, n_threads, scratch, single_blas_thread
from xformer.base.typing import Array
from xformer.layers.kv_cache import KVCache, append
from xformer.optim.ema import ema_leaves


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        if n_threads() != 3:
            pytest.skip("NumPy's BLAS cannot be given 3 threads")
        yield


def together(n: int) -> Callable[[], None]:
    """A function that returns once `n` threads have called it."""
    return threading.Barrier(n, timeout=SECONDS).wait


PIECES = {  # of n and size
    (0, 3): [],
    (1, 1): [(0, 1)],
    (7, 3): [(0, 2), (2, 4), (4, 6), (6, 7)],
    (9, 3): [(0, 3), (3, 6), (6, 9)],  # four would be no smaller
    (3, 1): [(0, 1), (1, 2), (2, 3)],
    (10, 9): [(0, 5), (5, 10)],
    (10, 100): [(0, 10)],
    (20, 3): [*((i, i + 3) for i in range(0, 18, 3)), (18, 20)],
    (100, 1): [(i, i + 1) for i in range(100)],
}


@pytest.mark.parametrize(("n", "size"), PIECES)
def test_each_piece_once(n: int, size: int) -> None:
    seen: list[tuple[int, int]] = []
    blocks(lambda start, stop: seen.append((start, stop)), n, size)
    assert sorted(seen) == PIECES[n, size]


def test_as_many_threads_as_blas_has() -> None:
    meet, names = together(3), set()

    def piece(start: int, stop: int) -> None:
        meet()  # that all three are in a piece at once
        names.add(threading.current_thread())

    blocks(piece, 3, 1)
    assert len(names) == 3 and threading.current_thread() in names
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        names.clear()
        blocks(lambda start, stop: names.add(threading.current_thread()), 20, 1)
    assert names == {threading.current_thread()}


def test_blas_has_one_thread_meanwhile() -> None:
    meet, during = together(3), []

    def piece(start: int, stop: int) -> None:
        meet()
        during.append(n_threads())

    blocks(piece, 3, 1)
    assert during == [1, 1, 1] and n_threads() == 3


def test_another_thread_of_the_program_can_set_it_afterwards() -> None:
    blocks(lambda start, stop: None, 4, 1)
    found = []

    def other() -> None:
        with threadpoolctl.threadpool_limits(2, user_api="blas"):
            found.append(n_threads())
            blocks(lambda start, stop: None, 4, 1)
            found.append(n_threads())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(SECONDS)
    assert found == [2, 2]


@pytest.mark.parametrize("bad", [0, 5, 19])
def test_errors_come_out(bad: int) -> None:
    def piece(start: int, stop: int) -> None:
        if start == bad:
            raise KeyError(bad)

    with pytest.raises(KeyError, match=str(bad)):
        blocks(piece, 20, 1)
    assert n_threads() == 3
    test_each_piece_once(20, 3)


def test_errors_of_other_threads_come_out() -> None:
    meet, caller = together(3), threading.current_thread()

    def piece(start: int, stop: int) -> None:
        meet()
        if threading.current_thread() is not caller:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        blocks(piece, 3, 1)
    assert n_threads() == 3


def test_on_every_thread_and_nobody_waits() -> None:
    """Who has done all of it goes on, while another is still on its way back."""
    hold, left = threading.Event(), threading.Event()
    there, seen = threading.Barrier(2, timeout=SECONDS), list[int]()
    main = threading.get_ident()

    def fn() -> bool:
        there.wait()
        seen.append(threading.get_ident())
        if threading.get_ident() != main:
            hold.wait(SECONDS)
            left.set()
        return True

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        try:
            kernels.on_every_thread(fn, 2)
            assert main in seen and not left.is_set()
        finally:
            hold.set()
        assert left.wait(SECONDS)
        done: list[int] = []
        blocks(lambda start, stop: done.append(start), 2, 1)  # the pool is as it was
    assert sorted(done) == [0, 1] and len(seen) == 2


def test_on_every_thread_errors_of_other_threads_come_out() -> None:
    main, failed = threading.get_ident(), threading.Event()

    def fn() -> bool:
        if threading.get_ident() != main:
            failed.set()
            raise ZeroDivisionError("there")
        assert failed.wait(SECONDS)
        return False

    for _ in range(3):
        failed.clear()
        with pytest.raises(ZeroDivisionError, match="there"):
            kernels.on_every_thread(fn, 2)


def test_on_every_thread_alone() -> None:
    """With one thread, within a piece, and while another thread of the program has the pool."""
    seen: list[int] = []
    ident = threading.get_ident

    def fn() -> bool:
        seen.append(ident())
        return True

    kernels.on_every_thread(fn, 1)
    with kernels._state.pool:
        kernels.on_every_thread(fn, 2)
    assert seen == [ident()] * 2


def test_pieces_within_a_piece() -> None:
    counts = np.zeros((8, 5), int)

    def piece(start: int, stop: int) -> None:
        def inner(first: int, last: int) -> None:
            counts[start:stop, first:last] += 1

        blocks(inner, 5, 2)

    blocks(piece, 8, 1)
    assert (counts == 1).all()


def test_two_threads_of_the_program_at_once() -> None:
    meet, counts = together(2), np.zeros((2, 50), int)

    def caller(row: int) -> None:
        def piece(start: int, stop: int) -> None:
            if start == 0:
                meet()  # inside the other one's call
            counts[row, start:stop] += 1

        blocks(piece, 50, 1)

    threads = [threading.Thread(target=caller, args=(row,)) for row in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert (counts == 1).all() and n_threads() == 3


def test_settings_of_the_caller_hold_in_its_pieces() -> None:
    meet = together(3)

    def piece(start: int, stop: int) -> None:
        meet()
        np.float32(1) / np.zeros(1, np.float32)

    with np.errstate(divide="ignore"):
        blocks(piece, 3, 1)
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        blocks(piece, 3, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_after_a_fork() -> None:
    test_as_many_threads_as_blas_has()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            test_as_many_threads_as_blas_has()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_child_forked_while_blas_has_one_thread() -> None:
    """It computes, and sets BLAS's threads, as its parent did before."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with single_blas_thread():
            inside.set()
            leave.wait(SECONDS)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(SECONDS)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert [library.get_num_threads() for library in kernels._blas()] == [3]
            test_as_many_threads_as_blas_has()
            with threadpoolctl.threadpool_limits(2, user_api="blas"):
                assert n_threads() == 2
            code = 0
        finally:
            os._exit(code)
    leave.set()
    thread.join(SECONDS)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and n_threads() == 3


def test_scratch_is_a_threads_own_and_its_holders() -> None:
    a = scratch("a", (3, 5), np.float32)
    a[...] = 1
    part, address = a[1:].reshape(-1), a.ctypes.data
    assert not np.shares_memory(a, scratch("b", (3, 5), np.float32))
    del a
    assert not np.shares_memory(part, scratch("a", (3, 2), np.float64))
    del part
    assert scratch("a", (3, 2), np.float64).ctypes.data == address
    b = scratch("a", (100,), np.float64)
    assert b.shape == (100,) and b.dtype == np.float64 and b.flags.writeable
    assert len(kernels._local.pools["a"]) == 1  # what was too small is gone
    other = []
    thread = threading.Thread(target=lambda: other.append(scratch("a", (100,), np.float64)))
    thread.start()
    thread.join(SECONDS)
    assert not np.shares_memory(b, other[0])


def test_a_pool_keeps_few_buffers_whatever_was_held_at_once() -> None:
    held = [scratch("held", (5,), np.float32) for _ in range(20)]
    for i, x in enumerate(held):
        x[...] = i
    assert [x[0] for x in held] == list(range(20))  # each has memory of its own
    del held, x
    before = len(kernels._local.pools["held"])
    for size in (3, 5, 500, 20):
        scratch("held", (size,), np.float32)
    assert before == kernels.POOLED and len(kernels._local.pools["held"]) == 1


def test_two_threads_that_want_blas_alone() -> None:
    """Whoever leaves last leaves the number of threads as it was; pieces go on all of them."""
    inside, left, ran = threading.Event(), threading.Event(), set()

    def other() -> None:
        with single_blas_thread():
            inside.set()
            left.wait(SECONDS)

    thread = threading.Thread(target=other)
    with single_blas_thread():
        thread.start()
        inside.wait(SECONDS)
        assert n_threads() == 3
        meet = together(3)
        blocks(lambda start, stop: (meet(), ran.add(threading.get_ident())), 3, 1)
        with single_blas_thread():
            pass
        assert n_threads() == 3
    left.set()
    thread.join(SECONDS)
    assert len(ran) == 3 and n_threads() == 3


class OfProcess:
    """A library with one number of threads, which any thread of the program can set."""

    n = 3

    def get_num_threads(self) -> int:
        return self.n

    def set_num_threads(self, n: int) -> None:
        self.n = n


def test_pieces_while_another_thread_has_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the caller, and as in the pool: what they cut, and BLAS, go by no other thread."""
    inside, leave, seen = threading.Event(), threading.Event(), []
    library = OfProcess()
    monkeypatch.setattr(kernels, "_blas", lambda: [library])

    def other() -> None:
        with single_blas_thread():
            inside.set()
            leave.wait(SECONDS)

    def piece(start: int, stop: int) -> None:
        if start == 1:
            leave.set()
            thread.join(SECONDS)
        seen.append((start, threading.current_thread(), n_threads(), library.n))

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(SECONDS)
    assert n_threads() == 3
    blocks(piece, 3, 1)
    assert seen == [(start, threading.current_thread(), 1, 1) for start in range(3)]
    assert n_threads() == library.n == 3


class OfThread:
    """A library where each thread of the program sets a number of its own, as OpenMP's."""

    threading_layer = "openmp"

    def __init__(self) -> None:
        self.own = threading.local()

    def get_num_threads(self) -> int:
        n: int = getattr(self.own, "n", 3)
        return n

    def set_num_threads(self, n: int) -> None:
        self.own.n = n


def test_a_number_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    library, inside, leave = OfThread(), threading.Event(), threading.Event()
    monkeypatch.setattr(kernels, "_blas", lambda: [library])
    meet, numbers = together(3), []

    def piece(start: int, stop: int) -> None:
        meet()
        numbers.append(library.get_num_threads())

    def other() -> None:
        library.set_num_threads(2)
        with single_blas_thread():
            numbers.append(library.get_num_threads())
            inside.set()
            leave.wait(SECONDS)
        numbers.append(library.get_num_threads())

    blocks(piece, 3, 1)
    thread = threading.Thread(target=other)
    with single_blas_thread():
        thread.start()
        inside.wait(SECONDS)
    assert n_threads() == 3
    leave.set()
    thread.join(SECONDS)
    assert numbers == [1, 1, 1, 1, 2] and n_threads() == 3


def interrupted(fn: Callable[[], Any], handle: Callable[[], None]) -> Any:
    """fn(), and handle() before each of its lines, where a signal handler might run."""
    results, before = [], sys.gettrace()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            handle()
        return trace

    def run() -> None:
        sys.settrace(trace)
        try:
            results.append(fn())
        finally:
            sys.settrace(before)

    thread = threading.Thread(target=run, daemon=True)  # which a deadlock leaves behind
    thread.start()
    thread.join(SECONDS)
    assert results, "a deadlock, or an error above"
    return results[0]


X, OTHER = np.random.default_rng(1).normal(size=(2, 2, 3, 70, 5)).astype(np.float32)
DY = np.cos(X)
LEAF = OTHER.reshape(-1)


def attention(x: Array) -> Any:
    y, cache = ops.sdpa(x, x[:, :1], x[:, 1:2], causal=True)
    return (y, *cache.backward(DY)[:3])


def head(x: Array) -> Any:
    targets = np.arange(70)
    y, cache = ops.linear_cross_entropy(x[0, 0], x[0, 1].T, None, targets=targets)
    return (y, *cache.backward(np.ones((), np.float32))[:2])


def backward(op: Any, *args: Array) -> Any:
    y, cache = op(*args)
    grads = cache.backward(DY)
    return (y, *grads) if isinstance(grads, tuple) else (y, grads)


COMPUTED: dict[str, Callable[[Array], Any]] = {
    "sdpa": attention,
    "linear_cross_entropy": head,
    "gelu": lambda x: backward(ops.gelu, x),
    "glu": lambda x: backward(ops.glu, x, x + 1),
    "layer_norm": lambda x: backward(ops.layer_norm, x, x[0, 0, 0], x[0, 0, 1]),
    "rms_norm": lambda x: backward(ops.rms_norm, x, x[0, 0, 0]),
    "cross_entropy": lambda x: ops.cross_entropy(x, targets=np.zeros(x.shape[:-1], int))[:1],
    "ema": lambda x: ema_leaves([x, LEAF], [x + 1, LEAF + 2], share=0.3),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_signal_handler_that_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same op of other numbers, before every line: both are right."""
    monkeypatch.setattr(linear_cross_entropy, "LARGE", 2)
    compute, wrong = COMPUTED[name], list[int]()
    wanted, others = compute(X), compute(OTHER)
    kernels.forget_scratch()

    def handle() -> None:
        if not all(map(np.array_equal, compute(OTHER), others)):
            wrong.append(1)

    got = interrupted(lambda: compute(X), handle)
    assert all(map(np.array_equal, got, wanted)) and not wrong


def test_a_signal_handler_that_uses_the_threads() -> None:
    """Neither a deadlock, nor a piece left out, nor another number of threads afterwards."""

    def count() -> list[int]:
        seen: list[int] = []
        blocks(lambda start, stop: seen.append(start), 4, 1)
        with single_blas_thread():
            blocks(lambda start, stop: seen.append(start), 4, 1)
            kernels.on_every_thread(lambda: bool(seen.append(4)), 2)
        assert n_threads() in (1, 3)
        return sorted(seen)

    wanted, wrong = [0, 0, 1, 1, 2, 2, 3, 3, 4], list[Any]()

    def handle() -> None:
        got = count()
        if got[:9] != wanted or set(got[9:]) - {4}:  # two threads come to `on_every_thread`, or one
            wrong.append(got)

    got = interrupted(count, handle)
    assert got[:9] == wanted and not wrong and n_threads() == 3


def test_a_signal_handler_that_goes_on_with_the_same_text() -> None:
    new = X[:, :, :1]
    before = append(X, X, kv_cache=append(X, X, kv_cache=KVCache()))
    kept: list[Any] = []
    got = interrupted(
        lambda: append(new, new, kv_cache=before),
        lambda: kept.append(append(new + 1, new + 1, kv_cache=before)),
    )
    for grown, last in ((got, new), *((other, new + 1) for other in kept)):
        np.testing.assert_array_equal(grown.k, np.concatenate((X, X, last), axis=2))
