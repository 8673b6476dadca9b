"""Gradients in one array, so that what several processes do to them is one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from array_api_compat import array_namespace, device

from xformer import tree
from xformer.checks import require_gradient
from xformer.optim._checks import require_arrays
from xformer.typing import Array

ALIGNED = 16  # elements: a leaf begins at a multiple of them, for accesses of several at a time


def reduced(grads: Any, reduce: Callable[[Array], Array]) -> Any:
    """`grads` after `reduce`, which is called once for each dtype, with all of them in one array.

    Data-parallel: reduce(flat) is the mean of flat (N,) over all processes, as by one all-reduce;
    it may write over what it is given, and nobody else may read what it returns, which clipping may
    write over. The leaves of the result are views of the array that it
    returns, where the library has views, in the order of `tree.flatten`, with zeros between some.

    ValueError, TypeError where that array is not like the one it was given.
    """
    leaves = tree.flatten(grads)
    require_arrays("reduced", leaves)
    groups: dict[str, list[str]] = {}
    for name, leaf in leaves.items():
        groups.setdefault(str(leaf.dtype), []).append(name)
    for names in groups.values():
        own = [leaves[name] for name in names]
        flat = _joined(own)
        found = reduce(flat)
        require_gradient("reduced", "what reduce returns", found, flat)
        leaves |= zip(names, _parts(found, own), strict=True)
    return tree.unflatten(grads, leaves)


def _joined(arrays: Sequence[Array]) -> Array:
    """All in one array (N,)."""
    xp, pieces = array_namespace(*arrays), []
    for array in arrays:
        pieces.append(xp.reshape(array, (-1,)))
        if behind := -math.prod(array.shape) % ALIGNED:
            pieces.append(xp.zeros(behind, dtype=array.dtype, device=device(array)))
    return xp.concat(pieces)


def _parts(flat: Array, like: Sequence[Array]) -> list[Array]:
    """The inverse, of the shapes of `like`."""
    xp, start, parts = array_namespace(flat), 0, []
    for array in like:
        size = math.prod(array.shape)
        parts.append(xp.reshape(flat[start : start + size], array.shape))
        start += size + -size % ALIGNED
    return parts
