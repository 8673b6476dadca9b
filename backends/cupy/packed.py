"""Arrays of a tree in one: equal ones that follow each other are then equally far apart.

So a product takes several maps of one x at once, as to queries, keys and values (`linear_lt`).
Each of them keeps all in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from array_api_compat import array_namespace

from xformer import tree
from xformer.backends.cupy.leaves import LEAVES, launches
from xformer.backends.cupy.module import Source, blocks, contiguous, empty, launch
from xformer.shapes import STORED
from xformer.typing import Array

SOURCE = Source(__file__, dtypes=STORED, WIDE=(0, 1), LEAVES=(LEAVES,))
SHARE = 1 << 13  # elements of a block
ALIGNMENT = 256  # bytes, at multiples of which each of them begins


def packed(params: Any, dtype: Any) -> Any:
    """Copies of float32 parameters rounded to two bytes, by few launches over all leaves.

    params: a tree of float32 arrays on the current device
    dtype: of `STORED`
    Returns the same tree. Leaves follow each other in its order, each by columns if it was, else
    by rows.
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
        own = flat[start : start + math.prod(leaf.shape)]
        start += blocks(own.size, step) * step
        sources.append(rows)
        targets.append(own)
        own = array_namespace(own).reshape(own, rows.shape)
        return own.T if by_columns else own

    found = tree.map(placed, params)
    for args, options in launches(SHARE, sources, targets):
        launch(SOURCE, "rounded", flat, args=args, **options)
    return found


def distance(arrays: Sequence[Array | None]) -> int | None:
    """Elements from each to the next where they are alike and lie as `packed` places them.

    0 where all are None; None where they lie otherwise.
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
