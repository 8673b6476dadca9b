"""`append` for libraries whose arrays can be written to: amortised, without copying the past."""

from __future__ import annotations

import os
import threading
from typing import Any

from array_api_compat import array_namespace, device

from xformer.layers.past import Past
from xformer.typing import Array

LEAST = 64  # tokens

_claiming = threading.Lock()


def _forked() -> None:
    global _claiming
    _claiming = threading.Lock()  # whoever held the parent's is not in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Room:
    """Buffers longer than what they hold; only whoever holds all up to `end` appends in place."""

    def __init__(self, past: Past, k: Array, v: Array) -> None:
        capacity = max(LEAST, 2 * (past.length + k.shape[2]))
        self.k, self.v = (_buffer(new, capacity) for new in (k, v))
        self.end = past.length
        self.plan: Any = None  # what a kernel remembers of the model for the next token
        self.places: Any = None  # and where these buffers are
        if past.k is not None and past.v is not None:
            self.k[:, :, : self.end, :] = past.k
            self.v[:, :, : self.end, :] = past.v

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"plan": None, "places": None}  # which have addresses

    def fits(self, k: Array, v: Array) -> bool:
        """Whether these are more tokens of its kind, and not too many."""
        n = k.shape[2]
        return self.end + n <= self.k.shape[2] and _alike(self.k, k) and _alike(self.v, v)


def columns_are_fixed(k: Array, v: Array, *, past: Past) -> str | None:
    """Why `append` cannot run."""
    return None if past.at is None else "columns are fixed"


def append(k: Array, v: Array, *, past: Past) -> Past:
    """Write behind what is there; where somebody did so before, or it is full, to a new buffer."""
    grown = reserved(k, v, past=past)
    new = slice(past.length, None)
    grown.k[:, :, new, :], grown.v[:, :, new, :] = k, v
    return grown


def reserved(k: Array, v: Array, *, past: Past) -> Any:
    """The same `Past`, but k and v are of shapes alone: the caller writes the last columns."""
    room, end = (None, -1) if past.room is None else past.room
    length, n = past.length, k.shape[2]
    with _claiming:  # a text may be continued by two threads at once
        if room is not None and room.end == end and room.fits(k, v):
            room.end = end + n
        else:
            room = None
    if room is None:
        room = Room(past, k, v)
        end = length
        room.end = length + n
    own = slice(end - length, end + n)
    return Past(room.k[:, :, own, :], room.v[:, :, own, :], (room, end + n))


def _alike(buffer: Array, new: Array) -> bool:
    one, other = buffer.shape, new.shape
    return (*one[:2], one[3], buffer.dtype) == (*other[:2], other[3], new.dtype)


def _buffer(new: Array, capacity: int) -> Array:
    shape = (*new.shape[:2], capacity, new.shape[3])
    return array_namespace(new).empty(shape, dtype=new.dtype, device=device(new))
