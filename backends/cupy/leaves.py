"""One launch over many leaves: their addresses travel in its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from xformer.backends.cupy.module import blocks, wide
from xformer.typing import Array

LEAVES = 50  # of a launch: adamw takes 72 bytes for each, and all its arguments 4,096 at most
BLOCK = 256  # threads


def apart(leaves: Sequence[Array]) -> bool:
    """Whether no two contiguous arrays share memory: else none may be written over."""
    spans = sorted((x.data.ptr, x.data.ptr + x.nbytes) for x in leaves if x.size)
    return all(stop <= start for (_, stop), (start, _) in pairwise(spans))


def launches(
    share: int, *trees: Sequence[Array]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """First arguments, and options, of the launches that go over all leaves, contiguous, of trees.

    The arguments: for each tree the list of its leaves, then their sizes, their first blocks, and
    share, the elements of a block. Leaves that can be read 16 bytes at a time come first.
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
