"""The device under CuPy. Importing this replaces the driver, for the rest of the process.

    with counting() as seen: ...       # what was called meanwhile
    with refusing("wait", "D2H"): ...  # AssertionError, with its traceback, at the first of these
    held()                             # bytes, blocks (allocations), streams, graphs that are there

Kinds of calls: launch, graph (a launch of one; its bytes are its nodes), H2D, D2H, D2D, memset,
wait (for the device, a stream, an event, or a copy), malloc and free (not within CuPy's pool), load
(of compiled code), pinned (memory of the host).
"""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from null_device import build

if "cupy" in sys.modules:
    raise ImportError("the null device comes before CuPy: import it first, in a process of its own")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for what is not replaced, even where there is a GPU
os.environ["CUPY_ACCELERATORS"] = ""  # CUB's reductions ask the driver by themselves
os.environ.setdefault("CUPY_CACHE_DIR", str(build.KEPT / "kernels"))
build.nvrtc.library()  # CuPy takes the one that is loaded, wherever it is installed

from cupy_backends.cuda.api import driver as _driver  # noqa: E402
from cupy_backends.cuda.api import runtime as _runtime  # noqa: E402

_device = build.load()
_device.install(_runtime, _driver)
for _name, _function in {  # Python code calls these by name, not through the capsules
    "deviceGetAttribute": _device.deviceGetAttribute,
    "driverGetVersion": lambda: 13000,
    "getDevice": lambda: 0,
    "getDeviceCount": lambda: 1,
    "getDeviceProperties": _device.getDeviceProperties,
    "memGetInfo": _device.memGetInfo,
    "runtimeGetVersion": lambda: 13000,
    "setDevice": lambda device: None,
}.items():
    setattr(_runtime, _name, _function)

import cupy  # noqa: E402

held, set_capacity = _device.held, _device.set_capacity
libraries: collections.Counter[str] = collections.Counter()  # calls of NVIDIA's other libraries


def call_library(name: str) -> None:
    """Count a call, which is a node of the graph that is being captured."""
    libraries[name] += 1
    _device.add_node()


class Call(NamedTuple):
    """One call of the driver."""

    kind: str
    name: str  # of the kernel, or of the driver's function
    size: int
    stream: int
    compiled: bool


class Seen:
    """What was called within `counting`; final when it ends."""

    def __init__(self) -> None:
        self.log: list[Call] = []  # with names=True
        self.peak = 0  # bytes of CuPy's pools, graphs' too, in use at once above those before
        self.grown = 0  # `peak` of the work before, by `work.steady`
        self.library: collections.Counter[str] = collections.Counter()
        self._before = _device.counts()
        self._libraries = libraries.copy()
        self._now: dict[str, tuple[int, int, int]] | None = None

    def end(self) -> None:
        self._now = _device.counts()
        self.library = libraries - self._libraries

    def _difference(self, kind: str, which: int) -> int:
        now = self._now or _device.counts()
        return int(now[kind][which] - self._before[kind][which])

    def calls(self, kind: str) -> int:
        return self._difference(kind, 0)

    def bytes(self, kind: str) -> int:
        return self._difference(kind, 1)

    def captured(self, kind: str) -> int:
        """Calls that a capture recorded, or that happened within it."""
        return self._difference(kind, 2)

    @property
    def kernels(self) -> collections.Counter[str]:
        """Launches by the kernel's name, with names=True."""
        return collections.Counter(call.name for call in self.log if call.kind == "launch")


class _Peak(cupy.cuda.MemoryHook):
    """The most bytes that all pools have in use, above those before.

    Not what pools hold: CuPy takes any free chunk of a set, in the order of Python's addresses, so
    that a pool's total differs from run to run.
    """

    name = "null device"

    def __init__(self) -> None:
        self.now = self.most = 0

    def malloc_postprocess(self, *, mem_size: int, **_: Any) -> None:
        self.now += mem_size
        self.most = max(self.most, self.now)

    def free_postprocess(self, *, mem_size: int, **_: Any) -> None:
        self.now -= mem_size


@contextmanager
def counting(*, names: bool = False, sink: Any = None) -> Iterator[Seen]:
    """names: keep a log of the calls. sink: what is given each of them, in the place of the log."""
    seen, hook = Seen(), _Peak()
    if names or sink:
        keep = sink or (lambda *call: seen.log.append(Call(*call)))
        _device.set_sink(keep)
    try:
        with hook:
            yield seen
    finally:
        _device.set_sink(None)
        seen.end()
        seen.peak = hook.most


@contextmanager
def refusing(*kinds: str) -> Iterator[None]:
    """AssertionError at the first call of these kinds."""
    _device.refuse(kinds)
    try:
        yield
    finally:
        _device.refuse(())
