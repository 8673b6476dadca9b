"""Stores all arrays of a tree in one array, so that equal neighbours are at equal distances.

One batched matmul then computes several linear maps of one x, as for queries, keys and values
(`linear_many_lt`). Each array of the tree is a view, and keeps the whole array in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from xformer.backends.cupy.leaves import LEAVES, launches
from xformer.backends.cupy.module import Source, blocks, contiguous, empty, launch
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.shapes import STORED

SOURCE = Source(__file__, dtypes=STORED, WIDE=(0, 1), LEAVES=(LEAVES,))
SHARE = 1 << 13  # elements of a block
ALIGNMENT = 256  # bytes; each array begins at a multiple of it


def packed(params: Any, dtype: Any) -> Any:
    """Return a copy of float32 parameters in bfloat16 or float16.

    params: a tree of float32 arrays on the current device
    dtype: the dtype object; its name is one of `STORED`

    The leaves are views of one new array, in the order of the tree. Each begins at a multiple of
    `ALIGNMENT` bytes. A leaf in column-major (Fortran) order keeps it. One launch rounds many
    leaves.
    """
    leaves = tree.flatten(tree.thaw(params)).values()
    if not leaves:
        return params
    step = ALIGNMENT // dtype.itemsize
    total = sum(blocks(math.prod(leaf.shape), step) * step for leaf in leaves)
    flat, start = empty(next(iter(leaves)), (total,), dtype), 0
    sources: list[Array] = []
    targets: list[Array] = []

    def placed(leaf: Array) -> Array:
        nonlocal start
        by_columns = leaf.flags.f_contiguous and not leaf.flags.c_contiguous
        rows = contiguous(leaf.T if by_columns else leaf)
        target = flat[start : start + math.prod(leaf.shape)]
        start += blocks(target.size, step) * step
        sources.append(rows)
        targets.append(target)
        view = array_namespace(target).reshape(target, rows.shape)
        return view.T if by_columns else view

    views = tree.map(placed, params)
    for args, options in launches(SHARE, sources, targets):
        launch(SOURCE, "rounded", flat, args=args, **options)
    return views


def distance(arrays: Sequence[Array | None]) -> int | None:
    """Return the elements from each array to the next, or None if they are not at equal distances.

    The arrays must have one shape, dtype and layout, and a distance that `packed` may have made.
    Returns 0 if all arrays are None.
    """
    first = arrays[0]
    if first is None or arrays[1] is None:
        return 0 if all(a is None for a in arrays) else None
    kind = first.shape, first.strides, first.dtype
    if not all(a is not None and (a.shape, a.strides, a.dtype) == kind for a in arrays):
        return None
    at = [a.data.ptr for a in arrays]  # type: ignore[union-attr]
    step = at[1] - at[0]
    even = all(b - a == step for a, b in itertools.pairwise(at)) and step % ALIGNMENT == 0
    return step // first.dtype.itemsize if even and step >= first.nbytes > 0 else None
