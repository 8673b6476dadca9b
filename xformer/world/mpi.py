"""Processes that `mpiexec` started together. Importing this file initialises MPI."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from xformer.typing import Array
from xformer.world.base import World, _on_host

if not MPI.Is_initialized():  # `xformer info` imports it without
    MPI.Init_thread()
    atexit.register(MPI.Finalize)

AXES = 8  # most axes of an array
HEAD = 2 + AXES  # int64: dtype, number of axes, sizes
LARGEST = 1 << 30  # bytes of a message: MPI counts in 32 bits
SPIN = 1e-3  # seconds in which a wait only yields; then it sleeps, since others need the cores
NAP = 1e-4  # seconds of a sleep
PATIENCE = 1.0  # seconds in which all processes may fail alike
STAGGER = 0.5  # further seconds for each rank
PARTS, SENT = 1, 2  # tags


class Mpi(World):
    """The processes of an MPI communicator.

    Sums are exact: MPI only moves bytes, since its own sums differ with the number of processes.
    """

    def __init__(self, comm: MPI.Comm = MPI.COMM_WORLD) -> None:
        self._comm = comm.Dup()  # so that messages of other code on `comm` are not ours
        self._failed = comm.Dup()  # for `end`, while others are in a call on `_comm`
        self.rank, self.size = comm.rank, comm.size
        self.host = MPI.Get_processor_name()
        local = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        self.local_rank, self.local_size = local.rank, local.size
        local.Free()
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []

    def send(self, x: Array, to: int) -> None:
        """Send x to process `to`. Returns at once; the process has to `receive` it."""
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        array = np.array(_on_host(x), order="C")  # a copy: the caller may write to x
        head = _head(array)
        self._sent.append((self._comm.Isend(head, to, SENT), head))
        for piece in _messages(array):
            self._sent.append((self._comm.Isend(piece, to, SENT), piece))

    def receive(self, source: int) -> Array:
        """The next array that process `source` sent to this one. A NumPy array."""
        head = np.empty(HEAD, np.int64)
        _wait([self._comm.Irecv(head, source, SENT)])
        array = _empty(head)
        _wait([self._comm.Irecv(piece, source, SENT) for piece in _messages(array)])
        return array

    def split(self, color: int) -> Mpi:
        """The group of the processes that gave the same color, in the order of their ranks."""
        members = self._comm.Split(color, self.rank)
        try:
            return Mpi(members)  # with copies
        finally:
            members.Free()

    def end(self, message: str) -> None:
        """End all processes with status 1. Returns only if all of them called it.

        Process 0 prints its message at once. Another one waits for process 0 to fail alike.
        """
        if self.rank == 0:
            print(message, file=sys.stderr, flush=True)
        together = self._failed.Ibarrier()
        # Of several that fail, the first one should end the others before these print.
        limit = time.perf_counter() + PATIENCE + STAGGER * min(self.rank, 10)
        while time.perf_counter() < limit:
            if together.Test():
                return
            time.sleep(NAP)
        if self.rank:
            who = f"process {self.rank} of {self.size}, on {self.host}"
            print(f"{message} ({who})", file=sys.stderr, flush=True)
        sys.stdout.flush()
        self._comm.Abort(1)

    def _exchange(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self.size == 1:
            return list(parts)
        parts = [np.ascontiguousarray(part).reshape(part.shape) for part in parts]
        heads = np.stack([_head(part) for part in parts])
        theirs = np.empty_like(heads)
        _wait([self._comm.Ialltoall(heads, theirs)])
        got = [_empty(head) for head in theirs]
        got[self.rank] = parts[self.rank]
        requests: list[MPI.Request] = []
        for i in range(1, self.size):
            to, source = (self.rank + i) % self.size, (self.rank - i) % self.size
            requests += [self._comm.Irecv(m, source, PARTS) for m in _messages(got[source])]
            requests += [self._comm.Isend(m, to, PARTS) for m in _messages(parts[to])]
        _wait(requests)
        return got


def _wait(requests: list[MPI.Request]) -> None:
    """Wait for all. MPI's own waits spin, and on shared cores that costs the other processes."""
    begun = time.perf_counter()
    while not MPI.Request.Testall(requests):
        time.sleep(0 if time.perf_counter() - begun < SPIN else NAP)


def _head(array: np.ndarray) -> np.ndarray:
    """The dtype and the shape of an array as integers."""
    if array.dtype.kind in "OV" or array.ndim > AXES:  # V: also bfloat16 of ml_dtypes
        raise TypeError(
            f"arrays that are sent must hold numbers and have at most {AXES} axes, got dtype "
            f"{array.dtype} and {array.ndim} axes"
        )
    name = array.dtype.str.encode().ljust(8, b"\0")
    sizes = [array.ndim, *array.shape, *[0] * (AXES - array.ndim)]
    return np.concatenate([np.frombuffer(name, np.int64), np.asarray(sizes, np.int64)])


def _empty(head: np.ndarray) -> np.ndarray:
    """An array of the dtype and the shape of `_head`."""
    dtype = np.dtype(head[:1].tobytes().rstrip(b"\0").decode())
    return np.empty(tuple(head[2 : 2 + head[1]].tolist()), dtype)


def _messages(array: np.ndarray) -> list[np.ndarray]:
    """The bytes of an array, as views of at most `LARGEST`."""
    content = array.reshape(-1).view(np.uint8)
    return [content[i : i + LARGEST] for i in range(0, content.size, LARGEST)]
