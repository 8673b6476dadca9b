"""In the place of a CUDA graph: what is done within `recording()` is noted, and done by `launch()`.

As on a device nothing is done while it is noted: what an operation makes holds NaN, memory that is
written to stays as it is, and numbers that are passed are those of then. What CuPy refuses there is
refused: to look at a value, to bring one from the host, products by cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

UNWRITTEN = 0xFF  # every byte of a new array: NaN, or -1


class Call(NamedTuple):
    """Something that was noted."""

    name: str
    arguments: tuple[Any, ...]  # addresses and numbers
    run: Callable[[], None]


class Graph:
    """`captured.Graph` of the stand-in."""

    def __init__(self, raises: Mapping[str, BaseException] | None = None) -> None:
        self.raises = dict(raises or {})  # errors at the "end" of recording, or at a "launch"
        self.calls: list[Call] = []
        self.pool: list[np.ndarray] = []  # what was made while it was noted
        self.launches = 0
        self.is_warm = False  # kernels are compiled, memory has been asked for

    @contextmanager
    def apart(self) -> Iterator[None]:
        yield
        self.is_warm = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        if not self.is_warm:
            raise RuntimeError("kernels are compiled while a graph is captured")
        _now.append(self)
        try:
            yield
        finally:
            _now.pop()
        if "end" in self.raises:
            raise self.raises["end"]

    def launch(self) -> None:
        if "launch" in self.raises:
            raise self.raises["launch"]
        self.launches += 1
        for call in self.calls:
            call.run()


_now: list[Graph] = []


def is_recording() -> bool:
    return bool(_now)


def keep(memory: np.ndarray) -> None:
    """What is made while work is noted is the graph's."""
    if _now:
        _now[-1].pool.append(memory)


def refuse(what: str) -> None:
    """RuntimeError where work is being noted."""
    if _now:
        raise RuntimeError(f"{what} while a graph is captured")


def note(name: str, arguments: tuple[Any, ...], run: Callable[[], None]) -> bool:
    """Whether `run` is for later."""
    if _now:
        _now[-1].calls.append(Call(name, arguments, run))
    return bool(_now)


def made(name: str, compute: Callable[[], Any], *inputs: np.ndarray) -> Any:
    """What an operation makes: an array that is filled later, unless it is a view."""
    if not _now:
        return compute()
    with np.errstate(all="ignore"):
        result = compute()
    if not isinstance(result, np.ndarray | np.generic):
        return result
    if any(np.may_share_memory(result, x) for x in inputs):
        return result
    out = np.array(result)

    def run() -> None:
        out[...] = compute()

    out.reshape(-1).view(np.uint8).fill(UNWRITTEN) if out.flags.c_contiguous else out.fill(-1)
    keep(out)
    note(name, tuple(x.ctypes.data for x in (*inputs, out)), run)
    return out
