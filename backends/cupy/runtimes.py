"""What an array library provides to kernels that call NVIDIA's libraries: stream and memory."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from xformer.base.typing import Array


class Runtime(NamedTuple):
    """Functions of one array library. CuPy's are in `driver`; tests have others."""

    library: Callable[[], Any]  # NVIDIA's package, or a sentence that says why it cannot be used
    # Returns the current stream and its device; raises ValueError for arrays on another device.
    stream_of: Callable[[list[Array]], Any]
    allocate: Callable[[int], Any]  # returns so many bytes of device memory, at address `ptr`


class MatmulStream(NamedTuple):
    """The stream that runs a matmul, its device, and the precision."""

    device: int
    address: int
    tf32: bool  # whether float32 factors may be rounded to TF32


class AttentionStream(NamedTuple):
    """The stream that runs attention, and its device."""

    device: int
    address: int
    capability: int  # compute capability of the device, 90 for 9.0


# ---- Failures ----

FIRST = 4  # words of an error's text that distinguish it from others of its type


def failed(said: set[Any], what: str, error: BaseException, instead: str) -> str:
    """Return a sentence about an error, and give it as a RuntimeWarning once for each cause.

    said: causes of earlier warnings; a new cause is added
    what: what failed   instead: what happens from now on
    """
    why = f"{what} failed ({type(error).__name__}: {error}); {instead}"
    cause = type(error).__name__, getattr(error, "status", None) or _beginning(error), instead
    if cause not in said:
        said.add(cause)
        warnings.warn(f"backend cupy: {why}", RuntimeWarning, stacklevel=2)
    return why


def _beginning(error: BaseException) -> tuple[str, ...]:
    """Return the first words of an error's text, except words with digits, such as addresses."""
    words = str(error).split()[:FIRST]
    return tuple(word for word in words if not any(letter.isdigit() for letter in word))


# ---- Handles ----

# Library -> device -> handles of threads that have ended, for the next thread.
_free: weakref.WeakKeyDictionary[Any, dict[Any, list[Any]]] = weakref.WeakKeyDictionary()


class Lent:
    """A library's handle, used by one thread at a time.

    It is never destroyed: this would wait for the device, and end captures of other threads. When
    the object is deleted, another thread may use the handle.
    """

    def __init__(self, library: Any, device: Any, create: Callable[[], Any]) -> None:
        self._others = _free.setdefault(library, {}).setdefault(device, [])
        self.handle = self._others.pop() if self._others else create()

    def __del__(self) -> None:
        if hasattr(self, "handle"):  # `create` did not raise
            self._others.append(self.handle)


# ---- Objects that a graph's launches need ----

_held: ContextVar[dict[int, Any] | None] = ContextVar("held", default=None)


@contextmanager
def holding(things: dict[int, Any]) -> Iterator[None]:
    """Return a context in which `hold` stores its arguments in `things`, for a graph's launches."""
    token = _held.set(things)
    try:
        yield
    finally:
        _held.reset(token)


def hold(*things: Any) -> None:
    """Keep objects that own a library's kernels or memory as long as the graph being captured.

    Without a capture it does nothing.
    """
    held = _held.get()
    if held is not None:
        held.update((id(thing), thing) for thing in things)
