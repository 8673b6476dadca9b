"""What takes Python long to find out of arrays, until the first of them goes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from xformer.typing import Array


class Known:
    """By the arrays themselves, in their order, None where there is none.

    Of an array whose `shape`, `strides` or `dtype` is set in place it would not hear. None is
    resized meanwhile: NumPy refuses it of an array that something refers to weakly.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], tuple[Any, list[Any]]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def of(self, arrays: Iterable[Array | None]) -> Any:
        """What was kept, or None."""
        found = self._found.get(tuple(map(id, arrays)))
        return None if found is None else found[0]

    def keep(self, arrays: Iterable[Array | None], what: Any) -> None:
        """As long as there are all of them."""
        arrays = list(arrays)
        key = tuple(map(id, arrays))

        def forget(_: Any) -> None:
            self._found.pop(key, None)

        self._found[key] = what, [weakref.ref(x, forget) for x in arrays if x is not None]
