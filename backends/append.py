"""`append` for libraries whose arrays can be written to: amortised, without copying the past."""

from __future__ import annotations

import os
from typing import Any

from array_api_compat import array_namespace, device
from xformer.backends.exclusive import Exclusive

from xformer.layers.past import Past
from xformer.typing import Array

LEAST = 64  # tokens

_claims = Exclusive()


def _forked() -> None:
    global _claims
    _claims = Exclusive()  # whoever held the parent's lock is not in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Room:
    """Buffers longer than what they hold; only whoever holds all up to `end` appends in place."""

    def __init__(self, past: Past, k: Array, v: Array) -> None:
        self.capacity = max(LEAST, 2 * (past.length + k.shape[2]))
        self.k, self.v = (_buffer(new, self.capacity) for new in (k, v))
        self.end = past.length
        if past.k is not None and past.v is not None:
            self.k[:, :, : self.end, :] = past.k
            self.v[:, :, : self.end, :] = past.v


class Place:
    """Where a past is kept: its k and v are columns of a room, of which `end` is the next one."""

    __slots__ = ("end", "k", "room", "v")

    def __init__(self, room: Room, end: int, k: Array, v: Array) -> None:
        self.room, self.end, self.k, self.v = room, end, k, v

    def is_of(self, past: Past) -> bool:
        """Whether the past has its arrays still, and has not been given others."""
        return past.k is self.k and past.v is self.v

    def narrowed(self, past: Past, k: Array, v: Array) -> Place | None:
        """That of the past's last columns k and v."""
        return Place(self.room, self.end, k, v) if self.is_of(past) else None


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
    n, place = k.shape[2], past.place
    if place is not None and _alike(place.room.k, k) and _alike(place.room.v, v):
        grown = longer(past, n)
        if grown is not None:
            return grown
    room = Room(past, k, v)
    room.end += n
    return last_columns(room, room.end, room.end)


def longer(past: Past, n: int) -> Any:
    """`past` with n columns more, which nobody has written yet; None where there are none."""
    place = past.place
    if place is None or not place.is_of(past) or not claimed(place.room, place.end, n):
        return None
    return last_columns(place.room, place.end + n, past.length + n)


def claimed(room: Room, end: int, n: int) -> bool:
    """Whether n columns behind `end` were free; then they are taken."""
    return _claims.run(_claim, room, end, n)  # a text may be continued by two threads at once


def _claim(room: Room, end: int, n: int) -> bool:
    if room.end != end or end + n > room.capacity:
        return False
    room.end = end + n
    return True


def last_columns(room: Room, end: int, n: int) -> Past:
    """The last n columns up to `end`."""
    own = slice(end - n, end)
    k, v = room.k[:, :, own, :], room.v[:, :, own, :]
    return Past(k, v, Place(room, end, k, v))


def _alike(buffer: Array, new: Array) -> bool:
    one, other = buffer.shape, new.shape
    return (*one[:2], one[3], buffer.dtype) == (*other[:2], other[3], new.dtype)


def _buffer(new: Array, capacity: int) -> Array:
    shape = (*new.shape[:2], capacity, new.shape[3])
    return array_namespace(new).empty(shape, dtype=new.dtype, device=device(new))
