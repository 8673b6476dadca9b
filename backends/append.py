"""`append` for libraries whose arrays can be written to: amortised, without copying the past."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

from xformer.layers.past import Past
from xformer.typing import Array

LEAST = 64  # tokens


class Room:
    """Buffers longer than what they hold; only whoever holds all up to `end` appends in place."""

    def __init__(self, past: Past, k: Array, v: Array) -> None:
        capacity = max(LEAST, 2 * (past.length + k.shape[2]))
        self.k, self.v = (_buffer(new, capacity) for new in (k, v))
        self.end = past.length
        self.plan: Any = None  # what a kernel remembers for the next token
        if past.k is not None and past.v is not None:
            self.k[:, :, : self.end, :] = past.k
            self.v[:, :, : self.end, :] = past.v

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"plan": None}  # which may know where the buffers are

    def fits(self, n: int) -> bool:
        """Whether `n` more tokens do."""
        return self.end + n <= self.k.shape[2]


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
    if room is None or room.end != end or not room.fits(k.shape[2]):
        room = Room(past, k, v)
    start, room.end = room.end - past.length, room.end + k.shape[2]
    own = slice(start, room.end)
    return Past(room.k[:, :, own, :], room.v[:, :, own, :], (room, room.end))


def _buffer(new: Array, capacity: int) -> Array:
    shape = (*new.shape[:2], capacity, new.shape[3])
    return array_namespace(new).empty(shape, dtype=new.dtype, device=device(new))
