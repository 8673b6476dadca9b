"""What kernels ask, that call a library of NVIDIA's, of the library of their arrays."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from xformer.typing import Array


class Runtime(NamedTuple):
    """CuPy's are in `driver`; tests bring their own."""

    library: Callable[[], Any]  # NVIDIA's package, or why it cannot be used, in words
    place: Callable[[list[Array]], Any]  # where work goes; ValueError for arrays of another device
    memory: Callable[[int], Any]  # so many bytes of the device, from `ptr` on


def runtime_of(known: dict[type, Runtime], array_type: type) -> Runtime:
    """That of CuPy's arrays, or of the stand-in's."""
    if array_type not in known:
        from xformer.backends.cupy import driver

        known[array_type] = known[driver.ARRAY]
    return known[array_type]


# ---- Failures ----

FIRST = 4  # words of an error's text that tell it from others of its type


def failed(said: set[Any], what: str, error: BaseException, instead: str) -> str:
    """A sentence about an error; a RuntimeWarning too where `said` has no such cause yet."""
    why = f"{what} failed ({type(error).__name__}: {error}); {instead}"
    cause = type(error).__name__, getattr(error, "status", None) or _beginning(error), instead
    if cause not in said:
        said.add(cause)
        warnings.warn(f"backend cupy: {why}", RuntimeWarning, stacklevel=2)
    return why


def _beginning(error: BaseException) -> tuple[str, ...]:
    """The first words of its text without numbers, such as addresses, which differ each time."""
    words = str(error).split()[:FIRST]
    return tuple(word for word in words if not any(letter.isdigit() for letter in word))


# ---- Handles ----

# Of libraries and devices: handles whose thread is gone, for the next thread.
_free: weakref.WeakKeyDictionary[Any, dict[Any, list[Any]]] = weakref.WeakKeyDictionary()


class Lent:
    """A library's handle, of one thread at a time.

    It is never destroyed, which would wait for the device and end captures of other threads.
    """

    def __init__(self, library: Any, device: Any, create: Callable[[], Any]) -> None:
        self._others = _free.setdefault(library, {}).setdefault(device, [])
        self.handle = self._others.pop() if self._others else create()

    def __del__(self) -> None:
        if hasattr(self, "handle"):  # it was created
            self._others.append(self.handle)


# ---- What a graph's launches need ----

_held: ContextVar[dict[int, Any] | None] = ContextVar("held", default=None)


@contextmanager
def holding(things: dict[int, Any]) -> Iterator[None]:
    """Within this context what is passed to `hold` is kept here: a graph's launches need it."""
    token = _held.set(things)
    try:
        yield
    finally:
        _held.reset(token)


def hold(*things: Any) -> None:
    """Keep what holds a library's kernels and memory as long as the graph that is captured."""
    kept = _held.get()
    if kept is not None:
        kept.update((id(thing), thing) for thing in things)
