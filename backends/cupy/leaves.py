"""One launch over many leaves: its arguments hold their addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from xformer.backends.cupy.module import blocks, wide
from xformer.base.typing import Array

LEAVES = 50  # of a launch: adamw needs 72 bytes for each, and arguments have at most 4,096 bytes
BLOCK = 256  # threads


def apart(leaves: Sequence[Array]) -> bool:
    """Return whether no two of the arrays share memory. If two do, none may be overwritten.

    leaves: contiguous
    """
    spans = sorted((x.data.ptr, x.data.ptr + x.nbytes) for x in leaves if x.size)
    return all(stop <= start for (_, stop), (start, _) in pairwise(spans))


def launches(
    share: int, *trees: Sequence[Array]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the first arguments and the options of each launch, for all leaves of the trees.

    share: elements of a block
    trees: lists of contiguous leaves; leaves of one index have one size

    The arguments are, for each tree, the list of its leaves; then the sizes of the leaves, the
    number of the first block of each, and `share`. Leaves that can be read 16 bytes at a time are
    first.
    """
    groups: dict[int, list[tuple[Array, ...]]] = {1: [], 0: []}
    for leaf in zip(*trees, strict=True):
        if leaf[0].size:
            groups[wide(leaf[0].size, *leaf)].append(leaf)
    for vec, leaves in groups.items():
        for start in range(0, len(leaves), LEAVES):
            group = leaves[start : start + LEAVES]
            sizes = [leaf[0].size for leaf in group]
            firsts = [0, *accumulate(blocks(size, share) for size in sizes)]
            lacking = LEAVES - len(group)
            lists = ([*column, *[None] * lacking] for column in zip(*group, strict=True))
            ends = [firsts[-1]] * (lacking - 1)
            args = (*lists, [*sizes, *[0] * lacking], [*firsts, *ends][:LEAVES], share)
            yield args, {"grid": (firsts[-1],), "block": (BLOCK,), "WIDE": vec, "LEAVES": LEAVES}
