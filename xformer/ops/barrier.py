"""`barrier`: arrays of a second forward, which a compiler must not merge with the first."""

from __future__ import annotations

from typing import Any

from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.ops.random_bits import RandomKey


@overridable(backward=False)
def barrier(x: Array, *, memory: Any, key: RandomKey | None, dy: Array) -> tuple[Any, ...]:
    """x, memory and key, unchanged, for a second forward that must run after dy is computed.

    A compiler would merge it with the first forward and keep its activations in memory. So a
    backend that compiles makes all three depend on dy.
    """
    return x, memory, key
