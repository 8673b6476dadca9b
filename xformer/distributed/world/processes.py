"""What processes that work together can do with each other, and a process alone."""

from __future__ import annotations

import itertools
import operator
import pickle
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from array_api_compat import device, to_device

from xformer import backends
from xformer.base.namespace import array_namespace
from xformer.base.pairwise_sum import PairwiseSum
from xformer.base.typing import Array

AXES = 8  # most axes of an array that is sent
HEAD = 2 + AXES  # int64, which are sent before its bytes: dtype, number of axes, sizes


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
        if self.size == 1:
            return obj
        if self.rank == root:
            self._spread(_pickled(obj), root)
            return obj
        return pickle.loads(self._spread(None, root).data)

    def _spread(self, content: np.ndarray | None, root: int) -> np.ndarray:
        """The `content` of process `root`, in all processes, by a binomial tree."""
        place = (self.rank - root) % self.size
        step = 1
        while step < self.size and not place & step:
            step *= 2
        received = self.receive((self.rank - step) % self.size) if content is None else content
        while step := step // 2:
            if place + step < self.size:
                self.send(received, (self.rank + step) % self.size)
        return received

    def first(self, fn: Callable[[], Any]) -> Any:
        """The result of fn(), which process 0 alone calls. Its error is raised in all processes.

        The result must pickle. An error that does not is a RuntimeError in the other processes.
        """
        if self.size == 1:
            return fn()
        if self.rank:
            result, error = pickle.loads(self._spread(None, 0).data)
            if error is not None:
                raise error
            return result
        try:
            result = fn()
            content = _pickled((result, None))
        except Exception as error:
            self._spread(_pickled((None, _sendable(error))), 0)
            raise
        self._spread(content, 0)
        return result

    def gather(self, obj: Any) -> list[Any]:
        """The `obj` of each process, in all processes. It can be anything that pickles."""
        return [pickle.loads(each.data) for each in self._exchange([_pickled(obj)] * self.size)]

    def sums(self, *ints: int) -> tuple[int, ...]:
        """The sum of each integer over all processes."""
        rows = self._exchange([np.asarray(ints, np.int64)] * self.size)
        return tuple(sum(column) for column in zip(*(row.tolist() for row in rows), strict=True))

    def all_reduce(self, x: Array) -> Array:
        """The sum of x over all processes."""
        if self.size == 1:
            return x
        own = self._own(x)
        flat, xp = own.reshape(-1), array_namespace(own)
        ends = [flat.shape[0] * i // self.size for i in range(self.size + 1)]
        got = self._exchange([flat[i:j] for i, j in itertools.pairwise(ends)])
        pieces = self._exchange([self._sum("all_reduce", got)] * self.size)
        return _like(xp.concat(pieces).reshape(own.shape), x)

    def all_gather(self, x: Array) -> list[Array]:
        """The x of each process, in their order. Shapes may differ."""
        got = self._exchange([self._own(x)] * self.size)
        return [_like(each, x) for each in got]

    def all_to_all(self, parts: Sequence[Array]) -> list[Array]:
        """What each process sent to this one. parts: one array for each process, of any shape."""
        self._require_one_each("all_to_all", parts)
        got = self._exchange([self._own(part) for part in parts])
        return [_like(each, parts[self.rank]) for each in got]

    def reduce_scatter(self, parts: Sequence[Array]) -> Array:
        """The sum over all processes of their part for this one.

        parts: one array for each process. ValueError if their shapes or dtypes differ.
        """
        self._require_one_each("reduce_scatter", parts)
        got = self._exchange([self._own(part) for part in parts])
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

    def _own(self, x: Array) -> Any:
        """x as an array that `_exchange` takes: on the host, unless the engine knows others."""
        return on_host(x)

    def _exchange(self, parts: Sequence[Any]) -> list[Any]:
        """The part for this process from each process. parts: NumPy arrays, one for each process.

        An engine may also take other arrays, all of one library, of which it returns as many.
        """
        raise NotImplementedError

    def _require_one_each(self, what: str, parts: Sequence[Array]) -> None:
        if len(parts) != self.size:
            raise ValueError(
                f"{what}: parts must be {self.size} arrays, one for each process, got {len(parts)}"
            )

    def _sum(self, what: str, parts: Sequence[Any]) -> Any:
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
        return total.total().reshape(parts[self.rank].shape)  # NumPy's sum may be no array


def _pickled(obj: Any) -> np.ndarray:
    return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)


def _sendable(error: Exception) -> Exception:
    """The error, or a RuntimeError with its text if it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        told = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        return told
    return error


def on_host(x: Array) -> np.ndarray:
    """x as a NumPy array."""
    return x if isinstance(x, np.ndarray) else backends.backend_of(x).to_numpy(x)


def _like(got: Any, x: Array) -> Array:
    """What `_exchange` returned, or a sum of it, in the library of x, on its device."""
    if isinstance(x, np.ndarray) or type(got) is type(x):
        return got
    moved = backends.backend_of(x).asarray(got)
    return moved if device(moved) == device(x) else to_device(moved, device(x))


def head(array: Array) -> np.ndarray:
    """The dtype and the shape of an array (HEAD,). TypeError if it cannot be sent."""
    if array.dtype.kind in "OV" or array.ndim > AXES:  # V: also bfloat16 of ml_dtypes
        raise TypeError(
            f"arrays that are sent must hold numbers and have at most {AXES} axes, got dtype "
            f"{array.dtype} and {array.ndim} axes"
        )
    name = array.dtype.str.encode().ljust(8, b"\0")
    sizes = [array.ndim, *array.shape, *[0] * (AXES - array.ndim)]
    return np.concatenate([np.frombuffer(name, np.int64), np.asarray(sizes, np.int64)])


def described(head: np.ndarray) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and the dtype of a `head`."""
    dtype = np.dtype(head[:1].tobytes().rstrip(b"\0").decode())
    return tuple(head[2 : 2 + head[1]].tolist()), dtype


class Alone(World):
    """A process without others. Sums are the process's own numbers."""

    rank, size = 0, 1
    local_rank, local_size = 0, 1

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self._sent: deque[Array] = deque()

    def send(self, x: Array, to: int) -> None:
        """Keep x for `receive`."""
        _require_self(to)
        self._sent.append(x)

    def receive(self, source: int) -> Array:
        """The oldest array that was sent. ValueError if there is none."""
        _require_self(source)
        if not self._sent:
            raise ValueError("receive: a process alone gets what it sent, and it sent nothing")
        return self._sent.popleft()

    def split(self, color: int) -> Alone:
        """A group of one."""
        return Alone()

    def end(self, message: str) -> None:
        """Print the message on stderr."""
        print(message, file=sys.stderr)

    def _exchange(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(parts)


def _require_self(rank: int) -> None:
    if rank != 0:
        raise ValueError(f"a process alone has number 0, got {rank}")
