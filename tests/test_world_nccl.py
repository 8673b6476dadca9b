"""Processes with a GPU each, by NCCL: the sums of the other engines, and what is asked of CUDA.

There is no GPU here. A stand-in takes the place of CuPy and NCCL: processes are threads, a device's
arrays are NumPy's, and it records the calls in order. The id of a communicator is NCCL's own.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hanging import SECONDS
from processes import SHAPES, term

from xformer import optim
from xformer.distributed.world import Alone, World, threads
from xformer.optim import OPTIMISERS

IDENTITY = b"an id" * 20


class Array(np.ndarray):
    """An array of a device, which has an address and no elements for the host."""

    def __array_function__(self, *args: Any) -> Any:
        """NumPy's, but `concat` keeps the type, as CuPy's does."""
        got = super().__array_function__(*args)
        return got.view(Array) if isinstance(got, np.ndarray) else got

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=getattr(self, "number", None) or current().device)


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class Stream:
    """A stream that records what it is asked for."""

    def __init__(self, non_blocking: bool = False, name: str = "own") -> None:
        assert non_blocking or name == "current"
        self.name, self.ptr = name, {"own": 7, "current": 0}[name]

    def record(self) -> str:
        current().log.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        current().log.append(f"{self.name} waits for {event}")


_local = threading.local()


def current() -> Any:
    """What belongs to this thread: its log, its device, its stream, the calls of a group.

    moved: bytes from the host to the device
    """
    if not hasattr(_local, "log"):
        _local.log, _local.device, _local.group, _local.moved = [], None, None, 0
        _local.stream = Stream(name="current")
    return _local


class Communicator:
    """Moves bytes between the threads of a group when all of them have ended it."""

    rooms: ClassVar[dict[tuple[bytes, int], Any]] = {}

    def __init__(self, size: int, identity: bytes, rank: int) -> None:
        new = SimpleNamespace(barrier=threading.Barrier(size, timeout=SECONDS), mail={})
        self.room = self.rooms.setdefault((identity, size), new)
        self.rank = rank
        current().log.append(f"communicator {rank} of {size}")
        current().communicator = self

    def send(self, ptr: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._add("send", ptr, count, dtype, peer, stream)

    def recv(self, ptr: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._add("recv", ptr, count, dtype, peer, stream)

    def _add(self, kind: str, ptr: int, count: int, dtype: int, peer: int, stream: int) -> None:
        assert dtype == 1 and stream == 7 and count > 0
        current().communicator = self
        current().group.append((kind, ptr, count, peer))
        current().log.append(f"{kind} {count} bytes, {peer}")


def group_start() -> None:
    current().group = []
    current().log.append("start")


def group_end() -> None:
    calls, comm = current().group, current().communicator
    current().log.append("end")
    room, rank = comm.room, comm.rank
    for kind, ptr, count, peer in calls:
        if kind == "send":
            assert (rank, peer) not in room.mail
            room.mail[rank, peer] = ctypes.string_at(ptr, count)
    room.barrier.wait()
    for kind, ptr, count, peer in calls:
        if kind == "recv":
            content = room.mail.pop((peer, rank))
            assert len(content) == count  # NCCL would wait for ever, or write past the end
            ctypes.memmove(ptr, content, count)
    room.barrier.wait()


class Gpus:
    """The devices of the stand-in."""

    def __init__(self) -> None:
        self.count = 8
        self.bus = "0000:{:02x}:00.0".format
        self.missing = False

    def number(self) -> int:
        if self.missing:
            raise CUDARuntimeError("cudaErrorInsufficientDriver: too old, or there is none")
        return self.count

    def device(self, number: int) -> Any:
        def use() -> None:
            current().device = number
            current().log.append(f"uses device {number}")

        return SimpleNamespace(use=use, pci_bus_id=self.bus(number))


def on_device(x: Any) -> Array:
    if isinstance(x, Array):
        return x
    current().moved += x.nbytes
    return np.array(x).view(Array)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """CuPy and NCCL of the stand-in."""
    found = Gpus()
    nccl = ModuleType("cupy.cuda.nccl")
    vars(nccl).update(
        available=True,
        NCCL_UINT8=1,
        get_unique_id=lambda: IDENTITY,
        NcclCommunicator=Communicator,
        groupStart=group_start,
        groupEnd=group_end,
    )
    runtime = SimpleNamespace(getDeviceCount=found.number, CUDARuntimeError=CUDARuntimeError)
    cuda = ModuleType("cupy.cuda")
    vars(cuda).update(
        nccl=nccl,
        runtime=runtime,
        Device=found.device,
        Stream=Stream,
        get_current_stream=lambda: current().stream,
    )
    cupy = ModuleType("cupy")
    vars(cupy).update(
        ndarray=Array,
        cuda=cuda,
        asarray=on_device,
        asnumpy=lambda x: np.array(x, subok=False),
        ascontiguousarray=lambda x: np.ascontiguousarray(x).view(Array),
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
        empty_like=lambda x: np.empty(x.shape, x.dtype).view(Array),
    )
    for module in (cupy, cuda, nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    Communicator.rooms.clear()
    return found


def joined(control: World) -> Any:
    from xformer.distributed.world.nccl import Nccl

    return Nccl(control)


# ---- The collectives ----


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_sums_of_the_other_engines(size: int, gpus: Gpus) -> None:
    """Bit for bit, of arrays on the device and of NumPy's, which come back as they were given."""

    def both(control: World) -> None:
        world = joined(control)
        for shape in SHAPES:
            x = term(control.rank, shape)
            wanted = control.all_reduce(x)
            for given, kind in ((on_device(x), Array), (x, np.ndarray)):
                got = world.all_reduce(given)
                assert type(got) is kind and np.array(got).tobytes() == np.array(wanted).tobytes()
        parts = [on_device(np.full((to + 1, control.rank), to)) for to in range(size)]
        for got, wanted in zip(world.all_to_all(parts), control.all_to_all(parts), strict=True):
            assert type(got) is Array and got.shape == wanted.shape and (got == wanted).all()
        gathered = world.all_gather(on_device(np.arange(control.rank).T))
        assert [x.tolist() for x in gathered] == [list(range(r)) for r in range(size)]
        three = [on_device(np.full(3, i + control.rank)) for i in range(size)]
        assert world.reduce_scatter(three).tolist() == control.reduce_scatter(three).tolist()

    threads.run(size, both)


def test_objects_and_groups(gpus: Gpus) -> None:
    def work(control: World) -> None:
        world = joined(control)
        rank, size = world.rank, world.size
        assert (world.local_rank, world.local_size, world.host) == (rank, 3, socket.gethostname())
        assert world.sums(rank, 1 << 40) == (3, 3 << 40)
        assert world.gather("x" * rank) == ["", "x", "xx"]
        assert [world.broadcast({"rank": rank}, r)["rank"] for r in range(size)] == [0, 1, 2]
        assert world.first(lambda: rank) == 0
        world.send(np.full(2, rank), (rank + 1) % size)
        assert world.receive((rank - 1) % size).tolist() == [(rank - 1) % size] * 2
        half = world.split(rank % 2)
        assert half.sums(rank) == ((2,) if rank % 2 == 0 else (1,))
        with pytest.raises(ValueError, match=r"all_reduce: all processes must give the same shape"):
            world.all_reduce(on_device(np.zeros(6 + 3 * rank)))

    threads.run(3, work)


def test_what_is_for_several_processes_is_moved_to_the_device_once(gpus: Gpus) -> None:
    def work(control: World) -> int:
        world = joined(control)
        before = current().moved
        world.broadcast("x" * 10_000)
        return current().moved - before

    first, *others = threads.run(4, work)
    assert 10_000 < first < 11_000 and max(others) < 1_000


def test_a_sharded_optimiser(gpus: Gpus) -> None:
    """Its parameters are gathered on the devices."""
    params = {"w": np.ones((3, 2), "float32"), "b": np.ones(5, "float32")}

    def work(control: World) -> Any:
        world = joined(control)
        optimiser = optim.sharded(OPTIMISERS["adamw"], world)
        return optimiser.step(params, params, optimiser.init(params), lr=0.1)[0]

    plain = OPTIMISERS["adamw"]
    wanted, _ = plain.step(params, params, plain.init(params), lr=0.1)
    for got in threads.run(2, work):
        assert all(np.array_equal(got[name], wanted[name]) for name in params)


def test_the_order_of_calls(gpus: Gpus) -> None:
    """Its own stream waits for the current one before a group, and the other way round after it."""

    def work(control: World) -> list[str]:
        world = joined(control)
        world.all_reduce(on_device(np.ones(5, "float32")))
        log: list[str] = current().log
        return log

    def group(*calls: str) -> list[str]:
        before = ["current records", "own waits for event of current", "start"]
        return [*before, *calls, "end", "own records", "current waits for event of own"]

    first, second = threads.run(2, work)
    heads = group("send 80 bytes, 1", "recv 80 bytes, 1")
    assert first == [
        *("uses device 0", "communicator 0 of 2"),
        *(*heads, *group("send 12 bytes, 1", "recv 8 bytes, 1")),  # halves of 2 and 3 numbers
        *(*heads, *group("send 8 bytes, 1", "recv 12 bytes, 1")),  # the sums of these
    ]
    assert second[0] == "uses device 1" and second.count("start") == 4


def test_a_process_alone_asks_for_a_communicator_alone(gpus: Gpus) -> None:
    current().log.clear()
    world = joined(Alone())
    x = on_device(np.ones(3))
    assert world.all_reduce(x) is x and world.all_gather(x) == [x] and world.gather(3) == [3]
    assert current().log == ["uses device 0", "communicator 0 of 1"]


def test_an_array_of_another_device(gpus: Gpus) -> None:
    def work(control: World) -> None:
        x = on_device(np.ones(3))
        x.number = 5
        joined(control).all_reduce(x)

    with pytest.raises(ValueError, match="nccl: arrays must be on device 0, got one on device 5"):
        threads.run(2, work)


# ---- What is missing ----


def test_no_gpu(gpus: Gpus) -> None:
    gpus.missing = True
    message = "^nccl: each process needs a GPU, and process 0 on .* has none: cudaErrorInsuff"
    with pytest.raises(RuntimeError, match=message):
        threads.run(2, joined)


def test_fewer_gpus_than_processes(gpus: Gpus) -> None:
    gpus.count = 2
    message = "nccl: each process needs a GPU, and process 2 on .* has none$"
    with pytest.raises(RuntimeError, match=message):
        threads.run(3, joined)


def test_two_processes_on_one_gpu(gpus: Gpus) -> None:
    """Each is shown one device, as by CUDA_VISIBLE_DEVICES: the same one, or another one."""
    gpus.count = 1
    message = "own GPU, and processes 0 and 1 on .* have one, 0000:00:00.0$"
    with pytest.raises(ValueError, match=message):
        threads.run(2, joined)
    gpus.bus = lambda number: threading.current_thread().name
    assert [world.size for world in threads.run(2, joined)] == [2, 2]


def test_missing_libraries(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    from xformer.distributed.world import nccl

    sys.modules["cupy.cuda.nccl"].available = False
    with pytest.raises(ImportError, match=r"nccl: CuPy finds no libnccl: pip install 'xformer-ar"):
        nccl.world()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"nccl: CuPy is not installed: pip install 'xformer-ar"):
        nccl.world()


# ---- Without MPI ----

PROGRAM = """
import json, multiprocessing, os, sys, time
from cupyx.distributed._store import TCPStoreProxy
from xformer.distributed.world import nccl

multiprocessing.set_start_method("spawn")  # Python 3.14 does not fork either
TCPStoreProxy.MAX_NUM_RETRIES = 1
if os.environ["RANK"] == "0":
    time.sleep(1)  # the others wait for it longer than CuPy does
store = nccl._Store()
cupy, library = nccl._library()
sent = store.broadcast(library.get_unique_id() if store.rank == 0 else None)
try:
    store.send(1, 0)
except NotImplementedError as error:
    why = str(error)
print(json.dumps([store.rank, store.size, store.local_rank, sent.hex(), store.gather("ab"), why]))
store.close()
os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 10)  # of another store
try:
    nccl.world()
except RuntimeError as error:
    print(error, file=sys.stderr)
"""


def needs_nccl() -> None:
    if not has_nccl():
        pytest.skip("CuPy or nvidia-nccl is not installed")


def has_nccl() -> bool:
    program = "import warnings; warnings.simplefilter('ignore'); from cupy.cuda import nccl; "
    done = subprocess.run([sys.executable, "-c", program + "nccl.get_version()"], check=False)
    return done.returncode == 0


def started(program: str, rank: int, port: int) -> subprocess.Popen[str]:
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | env,
    )


def test_the_id_by_the_store_of_cupy() -> None:
    """NCCL's own id, which needs no GPU, by the variables of torchrun; then the error without."""
    needs_nccl()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [started(PROGRAM, rank, port) for rank in range(2)]
    try:
        texts = [process.communicate(timeout=SECONDS) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        raise
    said = [err for _, err in texts]
    assert [process.returncode for process in processes] == [0, 0], said
    found = [json.loads(out) for out, _ in texts]
    identity = found[0][3]
    assert len(bytes.fromhex(identity)) == 128
    why = "nccl: send and receive need MPI: start the processes by mpiexec"
    assert found == [[rank, 2, rank, identity, ["ab", "ab"], why] for rank in range(2)]
    assert all("nccl: each process needs a GPU, and process 0 on " in err for err in said)


def test_the_port_of_the_store_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_nccl()
    from xformer.distributed.world.nccl import _Store

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        variables = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": port - 1}
        for name, value in {"MASTER_ADDR": "127.0.0.1", **variables}.items():
            monkeypatch.setenv(name, str(value))
        message = f"process 0 must be able to use port {port} of 127.0.0.1, MASTER_PORT + 1 of MAST"
        with pytest.raises(OSError, match=re.escape(message)):
            _Store()


def test_an_error_in_one_process_is_not_held_back(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it in NCCL, and never close the store."""
    from xformer.distributed.world import nccl

    waited: list[float] = []

    def close(patience: float = nccl.PATIENCE) -> None:
        waited.append(patience)
        raise TimeoutError("nccl: process 1 did not come")

    def fails(*args: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(nccl, "_Store", lambda: SimpleNamespace(close=close))
    monkeypatch.setattr(nccl, "by_mpi", lambda: False)
    monkeypatch.setattr(nccl, "Nccl", fails)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="a bug"):
        nccl.world()
    assert waited == [nccl.GRACE]


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_of_torchrun_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from xformer.distributed.world.nccl import STORE, _Store

    for variable in STORE:
        monkeypatch.setenv(variable, "0")
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=f"nccl: without MPI the variables.* got {name}=''"):
        _Store()
