"""One computation over all leaves of trees, element by element, in one job for all threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from xformer.backends.numpy.rows import BLOCK
from xformer.backends.numpy.threads import run, scratch
from xformer.typing import Array

SMALL = 1 << 13  # elements, at most, of leaves that are gathered: calls cost more than copies
KINDS = (np.ndarray, np.generic)

Step = Callable[..., Any]


def over(
    step: Step, *trees: Sequence[Array], replaced: tuple[int, ...] = (), donate: bool = False
) -> list[list[Array]]:
    """What step(*parts, *outs), of flat parts of all leaves, writes in the place of some trees.

    replaced: which of the trees have an `out`. donate: an out is the part itself, which is written
    over, but for leaves that are read-only or not contiguous. They must be `apart`.
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


def apart(leaves: Sequence[Array]) -> bool:
    """Whether no two arrays share memory, as views of one may: else none may be written over."""
    owners = []
    for x in leaves:
        base = x.base
        if base is not None and (type(base) is not np.ndarray or base.base is not None):
            return _spans_are_apart(leaves)  # memory of something else, as of a file
        owners.append(id(x if base is None else base))
    return len(set(owners)) == len(owners) or _spans_are_apart(leaves)


def _spans_are_apart(leaves: Sequence[Array]) -> bool:
    spans = sorted(np.lib.array_utils.byte_bounds(x) for x in leaves if x.size)
    return all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))


def unlike(leaves: Sequence[Array]) -> str | None:
    """Why these leaves cannot go through one loop: the first does not speak for the others."""
    kind = leaves[0].dtype
    if kind.char in "fd" and all(isinstance(x, KINDS) and x.dtype == kind for x in leaves):
        return None
    return "the leaves must all be NumPy's, and all float32 or all float64"


class Leaf:
    """Arrays of one shape, flat: in the order in which the elements of the first one lie.

    That of its shape, or of the reverse, as of weights that a file holds sideways.
    """

    def __init__(self, arrays: Sequence[Array], replaced: tuple[int, ...], donate: bool) -> None:
        flags = arrays[0].flags
        self.turned = flags.f_contiguous and not flags.c_contiguous
        lying = [x.T for x in arrays] if self.turned else arrays
        self.size, self.shape = lying[0].size, lying[0].shape
        self.old = [x.reshape(-1) for x in lying]
        self.new: list[Array] = []
        self.own: list[Array | None] = []  # what is written over, as it was given
        for k in replaced:
            own = donate and lying[k].flags.c_contiguous and lying[k].flags.writeable
            self.new.append(self.old[k] if own else np.empty_like(self.old[k]))
            self.own.append(arrays[k] if own else None)

    def shaped(self, i: int) -> Array:
        """What was written as the i-th."""
        if self.own[i] is not None:
            return self.own[i]
        x = self.new[i].reshape(self.shape)
        return x.T if self.turned else x


def _evenly(size: int) -> Iterator[tuple[int, int]]:
    """Parts of at most a block, as large as each other."""
    n = -(-size // BLOCK)
    length = -(-size // n)
    return ((start, min(start + length, size)) for start in range(0, size, length))


def _groups(leaves: Sequence[Leaf]) -> Iterator[list[Leaf]]:
    """Leaves that are, together, no longer small."""
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


def _sliced(step: Step, leaf: Leaf, at: slice) -> None:
    step(*[x[at] for x in (*leaf.old, *leaf.new)])


def _gathered(step: Step, leaves: list[Leaf]) -> None:
    """The same for several leaves at once, which are copied to one and back."""
    size, kind = sum(leaf.size for leaf in leaves), leaves[0].old[0].dtype
    n_old, n_new = len(leaves[0].old), len(leaves[0].new)
    rows = scratch("leaves", (n_old + n_new, size), kind)
    for i in range(n_old):
        np.concatenate([leaf.old[i] for leaf in leaves], out=rows[i])
    step(*rows)
    for i in range(n_new):
        stop = 0
        for leaf in leaves:
            start, stop = stop, stop + leaf.size
            leaf.new[i][:] = rows[n_old + i, start:stop]
