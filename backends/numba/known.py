"""What takes Python long to find out of arrays, until the first of them goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from xformer.tree import Frozen
from xformer.typing import Array

# NumPy refuses to resize an array that something refers to weakly, `refcheck=False` or not: as long
# as it lives, its memory is where it was.
Pin = weakref.ref[Any]


class Known:
    """By the arrays themselves, in their order, None where there is none.

    It does not notice a `shape`, `strides` or `dtype` that is set in place: the memory stays.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], tuple[Any, list[Pin]]] = {}

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

        self._found[key] = what, pinned(arrays, forget)


def pinned(arrays: Iterable[Any], forget: Callable[[Any], None] | None = None) -> list[Pin]:
    """Weak references, with which NumPy resizes none of these arrays; None is left out."""
    return [weakref.ref(x, forget) for x in arrays if x is not None]


def gather(node: Any, leaves: list[Any]) -> None:
    """All leaves of parameters, as `tree.flatten` in a tenth of its time; None where one is not.

    Behind what is frozen follows what it holds.
    """
    for part in node:
        if isinstance(part, tuple):
            gather(part, leaves)
        else:
            leaves.append(part)
            if type(part) is Frozen:
                leaves.append(part.value)
