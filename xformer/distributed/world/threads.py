"""Processes as threads of one process: for tests, and to learn in a notebook.

    from xformer.distributed.world import threads

    def work(world):
        return world.sums(world.rank)

    threads.run(4, work)                # [(6,), (6,), (6,), (6,)]

A thread that raises ends the others. So do threads that wait for each other for ever.
"""

from __future__ import annotations

import contextvars
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from xformer.base.typing import Array
from xformer.dispatch.checks import require_sizes
from xformer.distributed.world.processes import World, on_host

R = TypeVar("R")


def run(n: int, fn: Callable[..., R], *args: Any) -> list[R]:
    """`fn(world, *args)` in `n` threads, each with its own rank. The results, in order of rank.

    Each thread runs in a copy of the caller's context, such as `inference()` or `kernels(...)`.

    The error of the thread that failed first is raised. ValueError for n < 1. RuntimeError if
    threads wait for each other, or for one that has returned.
    """
    (n,) = require_sizes("threads", 1, n=n)
    room = _Room(n)
    group = _Group(tuple(range(n)))
    results: list[Any] = [None] * n

    def work(rank: int) -> None:
        try:
            results[rank] = fn(Threads(room, group, rank), *args)
        except BaseException as error:
            room.fail(error)
        else:
            room.leave(rank)

    contexts = [contextvars.copy_context() for _ in range(n)]
    threads = [
        threading.Thread(target=context.run, args=(work, rank), name=f"rank {rank}", daemon=True)
        for rank, context in enumerate(contexts)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C arrives in this thread
        room.fail(error)
        raise
    if room.error is not None:
        raise room.error
    return results


class Ended(RuntimeError):
    """Raised in a thread that waits for others, if one of these has failed."""


class _Room:
    """What all threads of a run share: a lock, the first error, and who waits for what."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.mail: dict[tuple[int, int], deque[np.ndarray]] = {}  # (sender, receiver) -> arrays
        self._size = size
        self._left: set[int] = set()
        self._waiting: dict[int, tuple[str, Callable[[], bool]]] = {}

    def fail(self, error: BaseException) -> None:
        """End all threads. Only the first error counts."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """Note that the function of this thread has returned."""
        with self.changed:
            self._left.add(rank)
            self._require_progress()

    def wait(self, rank: int, what: str, ready: Callable[[], bool]) -> None:
        """Wait until ready(). The caller has the lock. Ended if a thread has failed."""
        self._waiting[rank] = what, ready
        self._require_progress()
        self.changed.wait_for(lambda: self.error is not None or ready())
        del self._waiting[rank]
        if self.error is not None:
            raise Ended(f"{what}: another thread failed")

    def _require_progress(self) -> None:
        """Fail if all threads wait, or have returned, and none can go on."""
        if len(self._waiting) + len(self._left) < self._size or not self._waiting:
            return
        if not any(ready() for _, ready in self._waiting.values()):
            state = {rank: f"waits in {what}" for rank, (what, _) in self._waiting.items()}
            state |= {rank: "has returned" for rank in self._left}
            each = ", ".join(f"rank {rank} {state[rank]}" for rank in sorted(state))
            self.fail(RuntimeError(f"threads: none can go on: {each}"))


class _Group:
    """Threads that call collectives together, and what they brought to the present one."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members  # their ranks in the run, in order
        self.brought: dict[int, Any] = {}
        self.turn = 0
        self.taken: list[Any] = []


class Threads(World):
    """A thread of `run`, and the others of its group."""

    def __init__(self, room: _Room, group: _Group, rank: int) -> None:
        self._room, self._group = room, group
        self.rank = self.local_rank = rank
        self.size = self.local_size = len(group.members)
        self.host = socket.gethostname()

    def __repr__(self) -> str:
        return f"<thread {self.rank} of {self.size}>"

    def send(self, x: Array, to: int) -> None:
        """Send x to thread `to`, which has to `receive` it. Returns at once."""
        key = self._member(self.rank), self._member(to)
        with self._room.changed:
            self._room.mail.setdefault(key, deque()).append(on_host(x))
            self._room.changed.notify_all()

    def receive(self, source: int) -> Array:
        """The next array that thread `source` sent to this one. A NumPy array."""
        me = self._member(self.rank)
        with self._room.changed:
            box = self._room.mail.setdefault((self._member(source), me), deque())
            self._room.wait(me, f"receive({source})", lambda: bool(box))
            return box.popleft()

    def split(self, color: int) -> Threads:
        """The group of the threads that gave the same color, in the order of their ranks."""
        colors = self._swap("split", color)
        ranks = [rank for rank, other in enumerate(colors) if other == color]
        groups = self._swap("split", _Group(tuple(self._member(rank) for rank in ranks)))
        return Threads(self._room, groups[ranks[0]], ranks.index(self.rank))

    def end(self, message: str) -> NoReturn:
        """End all threads: `run` raises RuntimeError with the message."""
        raise RuntimeError(message)

    def _exchange(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [theirs[self.rank] for theirs in self._swap("a collective", parts)]

    def _swap(self, what: str, value: Any) -> list[Any]:
        """The value of each thread of the group, in the order of their ranks."""
        group, room = self._group, self._room
        with room.changed:
            group.brought[self.rank], turn = value, group.turn
            if len(group.brought) == self.size:
                # The next turn cannot end, and replace this, before all threads have read it.
                group.taken = [group.brought[rank] for rank in range(self.size)]
                group.brought, group.turn = {}, turn + 1
                room.changed.notify_all()
            room.wait(self._member(self.rank), what, lambda: group.turn != turn)
            return group.taken

    def _member(self, rank: int) -> int:
        """The rank in the run of a rank of this group."""
        if not 0 <= rank < self.size:
            raise ValueError(f"threads: a rank must be in [0, {self.size}), got {rank}")
        return self._group.members[rank]
