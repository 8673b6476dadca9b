"""All gradients in one array, so that an all-reduce over processes is one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from array_api_compat import device

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.checks import require_gradient
from xformer.optim._checks import require_arrays

ALIGNED = 16  # elements: each leaf starts at a multiple of it, for vectorised access


def reduced(grads: Any, reduce: Callable[[Array], Array]) -> Any:
    """`grads` after `reduce`, which is called once for each dtype, with all gradients in one array.

    reduce: for data-parallel training, `reduce(flat)` returns the mean of flat (N,) over all
        processes, by one all-reduce. It may overwrite flat. The array that it returns must not be
        used elsewhere, because clipping may overwrite it.

    The leaves of the result are views of the array that `reduce` returns, if the library has views.
    They are in the order of `tree.flatten`; zeros pad each leaf to a multiple of `ALIGNED`.

    ValueError or TypeError if the returned array does not have the shape, dtype and device of flat.
    """
    leaves = tree.flatten(grads)
    require_arrays("reduced", leaves)
    groups: dict[str, list[str]] = {}
    for name, leaf in leaves.items():
        groups.setdefault(str(leaf.dtype), []).append(name)
    for names in groups.values():
        arrays = [leaves[name] for name in names]
        flat = _joined(arrays)
        mean = reduce(flat)
        require_gradient("reduced", "what reduce returns", mean, flat)
        leaves |= zip(names, _parts(mean, arrays), strict=True)
    return tree.unflatten(grads, leaves)


def _joined(arrays: Sequence[Array]) -> Array:
    """The arrays in one array (N,), each padded with zeros to a multiple of `ALIGNED`."""
    xp, pieces = array_namespace(*arrays), []
    for array in arrays:
        pieces.append(xp.reshape(array, (-1,)))
        if behind := -math.prod(array.shape) % ALIGNED:
            pieces.append(xp.zeros(behind, dtype=array.dtype, device=device(array)))
    return xp.concat(pieces)


def _parts(flat: Array, like: Sequence[Array]) -> list[Array]:
    """The inverse of `_joined`: arrays with the shapes of `like`."""
    xp, start, parts = array_namespace(flat), 0, []
    for array in like:
        size = math.prod(array.shape)
        parts.append(xp.reshape(flat[start : start + size], array.shape))
        start += size + -size % ALIGNED
    return parts
