"""Processes with a GPU each, by NVIDIA's NCCL through CuPy. This file was never run on a GPU.

    from xformer.distributed.world import nccl

    world = nccl.world()    # after mpiexec, srun or torchrun

Collectives of CuPy arrays stay on the devices. NCCL only moves bytes: sums are the binary tree of
`World`, so that they do not depend on the number of processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xformer.base.typing import Array
from xformer.dispatch.backend import INSTALL_CUDA
from xformer.distributed.launcher import by_mpi
from xformer.distributed.world import world as found_world
from xformer.distributed.world.processes import World, described, head, on_host

INSTALL = (
    "pip install 'xformer-array[nccl]', or for CUDA 12: pip install 'xformer-array[nccl-cu12]'"
)
STORE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
PATIENCE = 300.0  # seconds in which all processes must start
GRACE = 5.0  # seconds in which all processes fail alike
NAP = 0.05  # seconds between two looks into the store


@functools.cache
def world() -> Nccl:
    """The processes that were started together, with a GPU each. The same object at every call.

    They find each other by MPI, or without an MPI launcher by the variables of torchrun: RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. The GPU of LOCAL_RANK becomes CuPy's
    current device.

    ImportError if CuPy, libnccl or MPI is missing. RuntimeError without a GPU. ValueError for two
    processes on one GPU, and for a variable of torchrun that is missing.
    """
    _library()  # before anything is started
    if by_mpi() or os.environ.get("WORLD_SIZE", "1") == "1":
        return Nccl(found_world())
    store = _Store()
    try:
        found = Nccl(store)
    except Exception:
        # Others may be about to read the reason, or may wait for this process for ever.
        with contextlib.suppress(TimeoutError):
            store.close(GRACE)
        raise
    store.close()
    return found


class Nccl(World):
    """Processes with a GPU each. The collectives of NumPy arrays and objects also use the GPUs.

    control: the same processes. It sends the id of the NCCL communicator. `send` and `receive` are
        those of control, through the host: two processes that send to each other at once would wait
        for ever in NCCL. All processes call this together.
    device: the number of this process's GPU; None: local_rank, or 0 if it can see one GPU

    For errors see `world`.
    """

    def __init__(self, control: World, *, device: int | None = None) -> None:
        self._cupy, self._nccl = _library()
        self._control = control
        self.rank, self.size, self.host = control.rank, control.size, control.host
        self.local_rank, self.local_size = control.local_rank, control.local_size
        self._device = _device(self._cupy, control, device)
        self._cupy.cuda.Device(self._device).use()
        identity = self._nccl.get_unique_id() if self.rank == 0 else None
        identity = control.broadcast(identity)
        self._comm = self._nccl.NcclCommunicator(self.size, identity, self.rank)
        self._stream = self._cupy.cuda.Stream(non_blocking=True)

    def send(self, x: Array, to: int) -> None:
        """Send x to process `to`, through the host. Returns at once."""
        self._control.send(x, to)

    def receive(self, source: int) -> Array:
        """The next array that process `source` sent to this one. A NumPy array."""
        return self._control.receive(source)

    def split(self, color: int) -> Nccl:
        """The group of the processes that gave the same color, in the order of their ranks."""
        return Nccl(self._control.split(color), device=self._device)

    def end(self, message: str) -> None:
        """End all processes with status 1, after an error."""
        self._control.end(message)

    def _spread(self, content: np.ndarray | None, root: int) -> np.ndarray:
        parts = [np.empty(0, np.uint8) if content is None else content] * self.size
        received: np.ndarray = self._exchange(parts)[root]
        return received

    def _own(self, x: Array) -> Any:
        if not isinstance(x, self._cupy.ndarray):
            return on_host(x)
        if x.device.id != self._device:
            raise ValueError(
                f"nccl: arrays must be on device {self._device}, got one on device {x.device.id}"
            )
        return x

    def _exchange(self, parts: Sequence[Any]) -> list[Any]:
        if self.size == 1:
            return list(parts)
        cupy = self._cupy
        heads = cupy.asarray(np.stack([head(part) for part in parts]))
        # An array for several processes is moved to the device once.
        distinct = {id(part): part for part in parts}
        moved = {i: cupy.ascontiguousarray(cupy.asarray(part)) for i, part in distinct.items()}
        sent = [moved[id(part)].reshape(part.shape) for part in parts]
        theirs = cupy.empty_like(heads)
        self._move(list(heads), list(theirs))
        sizes = cupy.asnumpy(theirs)  # waits for the other processes
        sizes[self.rank] = head(parts[self.rank])
        got = [cupy.empty(*described(each)) for each in sizes]
        got[self.rank] = sent[self.rank]
        self._move(sent, got)
        if isinstance(parts[self.rank], cupy.ndarray):
            return got
        return [cupy.asnumpy(array) for array in got]

    def _move(self, sent: Sequence[Any], received: Sequence[Any]) -> None:
        """Fill `received` with what each other process sends to this one.

        On the engine's own stream, after all work of the current one, which then waits for it.
        """
        current, stream = self._cupy.cuda.get_current_stream(), self._stream
        byte = self._nccl.NCCL_UINT8
        stream.wait_event(current.record())
        self._nccl.groupStart()
        for i in range(1, self.size):
            to, source = (self.rank + i) % self.size, (self.rank - i) % self.size
            if sent[to].nbytes:
                self._comm.send(sent[to].data.ptr, sent[to].nbytes, byte, to, stream.ptr)
            if received[source].nbytes:
                part = received[source]
                self._comm.recv(part.data.ptr, part.nbytes, byte, source, stream.ptr)
        self._nccl.groupEnd()
        current.wait_event(stream.record())


class _Store(World):
    """The processes of torchrun, which exchange short objects through CuPy's TCP store.

    The store is in process 0, at the port after MASTER_PORT, which torchrun itself uses.
    """

    def __init__(self) -> None:
        values = {name: os.environ.get(name, "") for name in STORE}
        numbers = [name for name in STORE if name != "MASTER_ADDR"]
        wrong = [name for name in numbers if not values[name].isdecimal()]
        if wrong or not values["MASTER_ADDR"]:
            name = (*wrong, "MASTER_ADDR")[0]
            raise ValueError(
                f"nccl: without MPI the variables {', '.join(STORE)} must be set, as torchrun sets "
                f"them, got {name}={values[name]!r}"
            )
        from cupyx.distributed import _store

        rank, size, local, port = (int(values[name]) for name in numbers)
        self.rank, self.size, self.local_rank = rank, size, local
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "") or size)
        self.host = socket.gethostname()
        address = values["MASTER_ADDR"], port + 1
        self._server = _store.TCPStore(size) if rank == 0 else None
        if self._server is not None:
            _require_free(*address)
            # Not run(), which pickles the store where processes are not forked (Python 3.14).
            run = self._server._server_loop
            threading.Thread(target=run, args=address, daemon=True).start()
        self._there = _store.TCPStoreProxy(*address)
        self._n = 0  # exchanges so far

    def gather(self, obj: Any) -> list[Any]:
        """The `obj` of each process, in all processes. At most 200 bytes of a pickle."""
        self._n += 1
        self._write(f"{self._n}/{self.rank}", pickle.dumps(obj))
        return [pickle.loads(self._read(f"{self._n}/{rank}", rank)) for rank in range(self.size)]

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The `obj` of process `root`, in all processes. At most 200 bytes of a pickle."""
        return self.gather(obj if self.rank == root else None)[root]

    def close(self, patience: float = PATIENCE) -> None:
        """Stop the store, once no process needs it. All processes call it.

        patience: seconds; TimeoutError if another process does not call it within them
        """
        if self._server is None:
            self._write(f"closed/{self.rank}", b"", patience)
            return
        try:
            for rank in range(1, self.size):
                self._read(f"closed/{rank}", rank, patience)
        finally:
            self._server._run.value = 0

    def end(self, message: str) -> None:
        """Print the message and end this process. torchrun ends the others."""
        print(f"{message} (process {self.rank} of {self.size}, on {self.host})", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def send(self, x: Array, to: int) -> None:
        """Not possible. NotImplementedError."""
        raise NotImplementedError("nccl: send and receive need MPI: start the processes by mpiexec")

    def receive(self, source: int) -> Array:
        """Not possible. NotImplementedError."""
        raise NotImplementedError("nccl: send and receive need MPI: start the processes by mpiexec")

    def split(self, color: int) -> World:
        """Not possible. NotImplementedError."""
        raise NotImplementedError("nccl: split needs MPI: start the processes by mpiexec")

    def _write(self, key: str, value: bytes, patience: float = PATIENCE) -> None:
        """Put a value into the store. TimeoutError if there is no store within `patience`."""
        self._asked(lambda: self._there.__setitem__(key, value), 0, patience)

    def _read(self, key: str, rank: int, patience: float = PATIENCE) -> bytes:
        """What a process has put into the store. TimeoutError if it does not come."""
        value: bytes = self._asked(lambda: self._there[key], rank, patience)
        return value

    def _asked(self, ask: Callable[[], Any], rank: int, patience: float) -> Any:
        limit = time.monotonic() + patience
        while time.monotonic() < limit:
            try:
                return ask()
            except RuntimeError:  # there is no such key yet, or no store
                time.sleep(NAP)
        raise TimeoutError(f"nccl: process {rank} did not come within {patience:.0f} s")


def _require_free(host: str, port: int) -> None:
    """OSError unless process 0 can have its store there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(
                f"nccl: process 0 must be able to use port {port} of {host}, MASTER_PORT + 1 of "
                f"MASTER_ADDR: {error}"
            ) from error


def _library() -> tuple[Any, Any]:
    """CuPy and its bindings of NCCL. ImportError if one is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # how to install NCCL, in several lines
            import cupy
            from cupy.cuda import nccl
    except ImportError as error:
        raise ImportError(f"nccl: CuPy is not installed: {INSTALL_CUDA}") from error
    if not getattr(nccl, "available", False):
        raise ImportError(f"nccl: CuPy finds no libnccl: {INSTALL}")
    return cupy, nccl


def _device(cupy: Any, control: World, device: int | None) -> int:
    """The number of this process's GPU. The same error in all processes if one has none."""
    try:
        count, why = int(cupy.cuda.runtime.getDeviceCount()), ""
    except cupy.cuda.runtime.CUDARuntimeError as error:
        count, why = 0, str(error)[:60]
    number = device
    if number is None:  # a launcher may show one GPU to each process
        number = 0 if count == 1 else control.local_rank
    bus = cupy.cuda.Device(number).pci_bus_id if number < count else None
    here = control.host[:60]
    users: dict[tuple[str, str], int] = {}
    for rank, (host, found, reason) in enumerate(control.gather((here, bus, why))):
        if found is None:
            raise RuntimeError(
                f"nccl: each process needs a GPU, and process {rank} on {host} has none"
                + (f": {reason}" if reason else "")
            )
        other = users.setdefault((host, found), rank)
        if other != rank:
            raise ValueError(
                f"nccl: each process needs its own GPU, and processes {other} and {rank} on {host} "
                f"have one, {found}"
            )
    return number
