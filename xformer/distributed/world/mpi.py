"""Processes that `mpiexec` started together. Importing this file initialises MPI."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from xformer.base.typing import Array
from xformer.distributed.world.processes import HEAD, World, described, head, on_host

if not MPI.Is_initialized():  # `xformer info` imports it without
    MPI.Init_thread()
    atexit.register(MPI.Finalize)

LARGEST = 1 << 30  # bytes of a message: MPI counts in 32 bits
SPIN = 1e-3  # seconds in which a wait only yields; then it sleeps, since others need the cores
NAP = 1e-4  # seconds of a sleep
SILENCE = 60.0  # seconds of a wait after which a line says for whom
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
        self._hosts: list[str] = comm.allgather(self.host)
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []

    def send(self, x: Array, to: int) -> None:
        """Send x to process `to`. Returns at once; the process has to `receive` it."""
        self._forget_sent()
        array = np.array(on_host(x), order="C")  # a copy: the caller may write to x
        first = head(array)
        self._sent.append((self._comm.Isend(first, to, SENT), first))
        for piece in _messages(array):
            self._sent.append((self._comm.Isend(piece, to, SENT), piece))

    def receive(self, source: int) -> Array:
        """The next array that process `source` sent to this one. A NumPy array."""
        first = np.empty(HEAD, np.int64)
        self._wait([(source, self._comm.Irecv(first, source, SENT))])
        array = np.empty(*described(first))
        pieces = _messages(array)
        self._wait([(source, self._comm.Irecv(piece, source, SENT)) for piece in pieces])
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
        heads = np.stack([head(part) for part in parts])
        theirs = np.empty_like(heads)
        theirs[self.rank] = heads[self.rank]
        self._swap(list(heads), list(theirs))
        got = [np.empty(*described(each)) for each in theirs]
        got[self.rank] = parts[self.rank]
        self._swap(parts, got)
        return got

    def _swap(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Fill `received` with what each other process sends to this one."""
        requests: list[tuple[int, MPI.Request]] = []
        for i in range(1, self.size):
            to, source = (self.rank + i) % self.size, (self.rank - i) % self.size
            pieces = _messages(received[source]), _messages(sent[to])
            requests += [(source, self._comm.Irecv(m, source, PARTS)) for m in pieces[0]]
            requests += [(to, self._comm.Isend(m, to, PARTS)) for m in pieces[1]]
        self._wait(requests)

    def _wait(self, requests: list[tuple[int, MPI.Request]]) -> None:
        """Wait for all. MPI's own waits spin, and on shared cores that costs the other processes.

        requests: each with the number of the other process
        """
        begun = time.perf_counter()
        is_told = False
        all_of_them = [request for _, request in requests]
        while not MPI.Request.Testall(all_of_them):
            waited = time.perf_counter() - begun
            if waited > SILENCE and not is_told:
                is_told = True
                self._tell({rank for rank, request in requests if not request.Test()})
            time.sleep(0 if waited < SPIN else NAP)
        self._forget_sent()

    def _forget_sent(self) -> None:
        """Free the copies of arrays that have been sent."""
        self._sent = [pair for pair in self._sent if not pair[0].Test()]

    def _tell(self, silent: set[int]) -> None:
        """Say for whom this process waits. Only the first process that nobody waits for does."""
        if not silent or not silent.issuperset(range(self.rank)):
            return
        who = ", ".join(f"process {rank} on {self._hosts[rank]}" for rank in sorted(silent))
        print(
            f"process {self.rank} of {self.size} has waited {SILENCE:.0f} s for {who}",
            file=sys.__stderr__,  # of a command, process 0 alone has a stderr
            flush=True,
        )


def _messages(array: np.ndarray) -> list[np.ndarray]:
    """The bytes of an array, as views of at most `LARGEST`."""
    content = array.reshape(-1).view(np.uint8)
    return [content[i : i + LARGEST] for i in range(0, content.size, LARGEST)]
