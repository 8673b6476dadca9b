"""What processes that work together can do with each other."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from array_api_compat import device, to_device

from xformer import backends
from xformer.pairwise import PairwiseSum
from xformer.typing import Array


class World:
    """Processes that work together. All of them call the same methods in the same order.

    rank: the number of this process, from 0
    size: the number of processes
    host: the name of this process's machine
    local_rank, local_size: the same numbers among the processes of this machine

    Arrays keep their library: those that are not NumPy's are moved to the host and back. Sums are
    binary trees over the processes in their order, so all processes get the same bits, and these do
    not depend on the network. Results may share memory with arguments: write to neither.

    An engine, such as MPI, defines `_exchange`, `send`, `receive`, `split` and `end`.
    """

    rank: int
    size: int
    host: str
    local_rank: int
    local_size: int

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The `obj` of process `root`, in all processes. It can be anything that pickles."""
        place = (self.rank - root) % self.size  # in a binomial tree
        step = 1
        while step < self.size and not place & step:
            step *= 2
        if place:
            content = self.receive((self.rank - step) % self.size)
            obj = pickle.loads(content.data)
        elif self.size > 1:
            content = np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
        while step := step // 2:
            if place + step < self.size:
                self.send(content, (self.rank + step) % self.size)
        return obj

    def first(self, fn: Callable[[], Any]) -> Any:
        """The result of fn(), which process 0 alone calls. Its error is raised in all processes."""
        if self.size == 1:
            return fn()
        result: Any = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                result = fn()
            except Exception as raised:
                error = raised
        other, raised_there = self.broadcast((result, error))
        if error is not None or raised_there is not None:
            raise error or raised_there
        return result if self.rank == 0 else other

    def gather(self, obj: Any) -> list[Any]:
        """The `obj` of each process, in all processes. It can be anything that pickles."""
        content = np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
        return [pickle.loads(each.data) for each in self._exchange([content] * self.size)]

    def sums(self, *ints: int) -> tuple[int, ...]:
        """The sum of each integer over all processes."""
        rows = self._exchange([np.asarray(ints, np.int64)] * self.size)
        return tuple(sum(column) for column in zip(*(row.tolist() for row in rows), strict=True))

    def all_reduce(self, x: Array) -> Array:
        """The sum of x over all processes."""
        if self.size == 1:
            return x
        host = _on_host(x)
        got = self._exchange(np.array_split(host.reshape(-1), self.size))
        pieces = self._exchange([self._sum("all_reduce", got)] * self.size)
        return _like(np.concatenate(pieces).reshape(host.shape), x)

    def all_gather(self, x: Array) -> list[Array]:
        """The x of each process, in their order. Shapes may differ."""
        return self.all_to_all([x] * self.size)

    def all_to_all(self, parts: Sequence[Array]) -> list[Array]:
        """What each process sent to this one. parts: one array for each process, of any shape."""
        self._require_one_each("all_to_all", parts)
        got = self._exchange([_on_host(part) for part in parts])
        return [_like(host, parts[self.rank]) for host in got]

    def reduce_scatter(self, parts: Sequence[Array]) -> Array:
        """The sum over all processes of their part for this one.

        parts: one array for each process. ValueError if their shapes or dtypes differ.
        """
        self._require_one_each("reduce_scatter", parts)
        got = self._exchange([_on_host(part) for part in parts])
        return _like(self._sum("reduce_scatter", got), parts[self.rank])

    def send(self, x: Array, to: int) -> None:
        """Send x to process `to`. Returns at once; the process has to `receive` it."""
        raise NotImplementedError

    def receive(self, source: int) -> Array:
        """The next array that process `source` sent to this one. A NumPy array."""
        raise NotImplementedError

    def split(self, color: int) -> World:
        """The group of the processes that gave the same color, in the order of their ranks."""
        raise NotImplementedError

    def end(self, message: str) -> None:
        """End all processes with status 1, after an error. `message` is printed once, on stderr.

        It returns only if all processes called it, which then end by themselves.
        """
        raise NotImplementedError

    def _exchange(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The part for this process from each process. parts: one for each process."""
        raise NotImplementedError

    def _require_one_each(self, what: str, parts: Sequence[Array]) -> None:
        if len(parts) != self.size:
            raise ValueError(
                f"{what}: parts must be {self.size} arrays, one for each process, got {len(parts)}"
            )

    def _sum(self, what: str, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The sum of the parts of all processes."""
        total = PairwiseSum(operator.add)
        for rank, part in enumerate(parts):
            mine = parts[self.rank]
            if part.shape != mine.shape or part.dtype != mine.dtype:
                raise ValueError(
                    f"{what}: all processes must give the same shape and dtype, got {part.shape} "
                    f"{part.dtype} from process {rank}, {mine.shape} {mine.dtype} from process "
                    f"{self.rank}"
                )
            total.add(part)
        return np.asarray(total.total())


def _on_host(x: Array) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else backends.backend_of(x).to_numpy(x)


def _like(host: np.ndarray, x: Array) -> Array:
    """An array of the host in the library of x, on its device."""
    if isinstance(x, np.ndarray):
        return host
    moved = backends.backend_of(x).asarray(host)
    return moved if device(moved) == device(x) else to_device(moved, device(x))
