"""The gradient of broadcasting."""

from __future__ import annotations

from array_api_compat import array_namespace

from xformer.dispatch import overridable
from xformer.typing import Array


@overridable(backward=False)
def sum_to(x: Array, *, shape: tuple[int, ...]) -> Array:
    """Sum x over the axes along which an array of `shape` was broadcast to it."""
    xp = array_namespace(x)
    lead = x.ndim - len(shape)
    wide = tuple(i + lead for i, n in enumerate(shape) if n == 1 and x.shape[i + lead] != 1)
    return xp.reshape(xp.sum(x, axis=(*range(lead), *wide)), shape)
