"""The gradient of broadcasting."""

from __future__ import annotations

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import overridable


@overridable(backward=False)
def sum_to(x: Array, *, shape: tuple[int, ...]) -> Array:
    """x summed over the axes along which an array of `shape` was broadcast to the shape of x."""
    xp = array_namespace(x)
    lead = x.ndim - len(shape)
    wide = tuple(i + lead for i, n in enumerate(shape) if n == 1 and x.shape[i + lead] != 1)
    return xp.reshape(xp.sum(x, axis=(*range(lead), *wide)), shape)
