"""Elementwise computations over all leaves of several trees, as one job for all threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from xformer.backends.numpy.rows import BLOCK
from xformer.backends.numpy.threads import run, scratch
from xformer.base.typing import Array

SMALL = 1 << 13  # elements; smaller leaves are gathered: NumPy calls for each would cost more
ARRAY_TYPES = (np.ndarray, np.generic)

Step = Callable[..., Any]  # step(*ins, *outs), 1-D arrays of one length: writes to `outs`


def map_leaves(
    step: Step, *trees: Sequence[Array], replaced: tuple[int, ...] = (), donate: bool = False
) -> list[list[Array]]:
    """Compute new leaves for some of the trees: the arrays that `step` writes.

    step: called as step(*ins, *outs) on 1-D parts of the leaves: ins has a part of each tree, outs
        a part of each new leaf.
    trees: lists of leaves; leaf i has the same shape in all trees.
    replaced: indices of the trees for which new leaves are computed.
    donate: overwrite the old leaves, except leaves that are read-only or not contiguous. No two
        leaves may then share memory (`share_no_memory`).

    Returns a list of new leaves for each index in `replaced`.
    """
    leaves = [Leaf(arrays, replaced, donate) for arrays in zip(*trees, strict=True)]
    small = [leaf for leaf in leaves if leaf.size <= SMALL]
    parts = [
        partial(_sliced, step, leaf, slice(start, stop))
        for leaf in leaves
        if leaf.size > SMALL
        for start, stop in _evenly(leaf.size)
    ]
    run([*parts, *(partial(_gathered, step, group) for group in _groups(small))])
    return [[leaf.shaped(i) for leaf in leaves] for i in range(len(replaced))]


def share_no_memory(leaves: Sequence[Array]) -> bool:
    """Return whether no two arrays share memory, so that each can be overwritten."""
    owners = []
    for x in leaves:
        base = x.base
        if base is not None and (type(base) is not np.ndarray or base.base is not None):
            return _spans_are_disjoint(leaves)  # another object owns the memory, such as a file
        owners.append(id(x if base is None else base))
    return len(set(owners)) == len(owners) or _spans_are_disjoint(leaves)


def _spans_are_disjoint(leaves: Sequence[Array]) -> bool:
    spans = sorted(np.lib.array_utils.byte_bounds(x) for x in leaves if x.size)
    return all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))


def unsupported_leaves(leaves: Sequence[Array]) -> str | None:
    """Return why `map_leaves` cannot run on these leaves, or None if it can."""
    dtype = leaves[0].dtype
    if dtype.char in "fd" and all(isinstance(x, ARRAY_TYPES) and x.dtype == dtype for x in leaves):
        return None
    return "the leaves must all be NumPy's, and all float32 or all float64"


class Leaf:
    """Leaf i of all trees, as 1-D arrays in the memory order of the first tree's leaf.

    The order is C or Fortran order: a checkpoint may store a weight matrix transposed.
    `old` has the leaf of each tree, `new` the output for each index in `replaced`.
    """

    def __init__(self, arrays: Sequence[Array], replaced: tuple[int, ...], donate: bool) -> None:
        flags = arrays[0].flags
        self.is_transposed = flags.f_contiguous and not flags.c_contiguous
        in_order = [x.T for x in arrays] if self.is_transposed else arrays
        self.size, self.shape = in_order[0].size, in_order[0].shape
        self.old = [x.reshape(-1) for x in in_order]
        self.new: list[Array] = []
        self.overwritten: list[Array | None] = []  # the array of the caller behind `new`, or None
        for k in replaced:
            overwrite = donate and in_order[k].flags.c_contiguous and in_order[k].flags.writeable
            self.new.append(self.old[k] if overwrite else np.empty_like(self.old[k]))
            self.overwritten.append(arrays[k] if overwrite else None)

    def shaped(self, i: int) -> Array:
        """Return new[i] in the shape of the leaf."""
        if self.overwritten[i] is not None:
            return self.overwritten[i]
        x = self.new[i].reshape(self.shape)
        return x.T if self.is_transposed else x


def _evenly(size: int) -> Iterator[tuple[int, int]]:
    """Return (start, stop) of equal parts of [0, size), of at most BLOCK elements each."""
    n = -(-size // BLOCK)
    length = -(-size // n)
    return ((start, min(start + length, size)) for start in range(0, size, length))


def _groups(leaves: Sequence[Leaf]) -> Iterator[list[Leaf]]:
    """Group leaves so that each group but the last has more than SMALL elements."""
    group: list[Leaf] = []
    size = 0
    for leaf in leaves:
        group.append(leaf)
        size += leaf.size
        if size > SMALL:
            yield group
            group, size = [], 0
    if group:
        yield group


def _sliced(step: Step, leaf: Leaf, part: slice) -> None:
    step(*[x[part] for x in (*leaf.old, *leaf.new)])


def _gathered(step: Step, leaves: list[Leaf]) -> None:
    """Call `step` once for several leaves: concatenate them, and copy the outputs back."""
    size, dtype = sum(leaf.size for leaf in leaves), leaves[0].old[0].dtype
    n_old, n_new = len(leaves[0].old), len(leaves[0].new)
    rows = scratch("leaves", (n_old + n_new, size), dtype)
    for i in range(n_old):
        np.concatenate([leaf.old[i] for leaf in leaves], out=rows[i])
    step(*rows)
    for i in range(n_new):
        stop = 0
        for leaf in leaves:
            start, stop = stop, stop + leaf.size
            leaf.new[i][:] = rows[n_old + i, start:stop]
