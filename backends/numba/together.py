"""The pasts of all layers as one: none is made for a token that a kernel alone looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from xformer.backends.append import Room, claimed, given_back, last_columns

from xformer.layers.past import Past


class Together(Sequence[Past]):
    """The pasts of layers that grow together; each is made when somebody looks at it."""

    def __init__(self, rooms: tuple[Room, ...], length: int) -> None:
        """Of each room the first columns."""
        self.rooms, self.length = rooms, length
        self.known: Any = None  # what a kernel remembers for the next token
        self._made: dict[int, Past] = {}

    @staticmethod
    def of(past: Sequence[Past]) -> Together | None:
        """The same pasts; None where they are not as many first columns of rooms each."""
        if isinstance(past, Together):
            return past
        rooms, lengths = [], set()
        for own in past:
            if own.place is None or not own.place.is_of(own) or own.place.end != own.length:
                return None
            rooms.append(own.place.room)
            lengths.add(own.length)
        return Together(tuple(rooms), lengths.pop()) if len(lengths) == 1 else None

    @property
    def capacity(self) -> int:
        """Columns that the rooms have."""
        return min(room.capacity for room in self.rooms)

    def longer(self, n: int) -> Together | None:
        """With n columns more, which nobody has written yet; None where there are none."""
        if not claimed(self.rooms, self.length, n):
            return None
        return Together(self.rooms, self.length + n)

    def shorten(self, n: int) -> None:
        """By n of the columns that `longer` has given it: nobody else knows of them."""
        given_back(self.rooms, self.length, n)
        self.length -= n

    def __len__(self) -> int:
        return len(self.rooms)

    @overload
    def __getitem__(self, i: int) -> Past: ...

    @overload
    def __getitem__(self, i: slice) -> tuple[Past, ...]: ...

    def __getitem__(self, i: int | slice) -> Past | tuple[Past, ...]:
        if isinstance(i, slice):
            return tuple(self)[i]
        i = range(len(self.rooms))[i]
        if i not in self._made:
            self._made[i] = last_columns(self.rooms[i], self.length, self.length)
        return self._made[i]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)
