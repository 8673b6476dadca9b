"""Clipping by the norm over all gradients, on the device."""

from __future__ import annotations

from collections.abc import Sequence

from array_api_compat import array_namespace
from xformer.backends.cupy.module import (
    Source,
    blocks,
    contiguous,
    empty,
    launch,
    not_alike,
    wide,
)

from xformer.dispatch import kernel
from xformer.optim.clip import clip_leaves as reference
from xformer.typing import Array

SOURCE = Source(__file__, WIDE=(0, 1))
BLOCK = 256  # threads
MAX_BLOCKS = 512  # a fixed number, so that every device makes the same sums


def of_several_kinds(
    grads: Sequence[Array], *, max_norm: float, donate: bool = False
) -> str | None:
    """All leaves must be as the first."""
    return not_alike(grads)


@kernel(reference, "cupy", unsupported=of_several_kinds)
def clip_leaves(
    grads: Sequence[Array], *, max_norm: float, donate: bool = False
) -> tuple[Sequence[Array], Array]:
    """Never in place: whether the norm is finite would have to be waited for."""
    norm = global_norm(grads)
    scale = array_namespace(norm).minimum(max_norm / (norm + 1e-6), 1.0)
    return [g * scale for g in grads], norm


def global_norm(arrays: Sequence[Array]) -> Array:
    """sqrt(sum of x^2) over arrays of one dtype, at least one: ()."""
    counts = [min(MAX_BLOCKS, blocks(x.size, BLOCK)) for x in arrays]
    parts, start = empty(arrays[0], (sum(counts),)), 0
    for x, count in zip(arrays, counts, strict=True):
        x = contiguous(x)
        launch(
            SOURCE,
            "squares",
            x,
            grid=(count,),
            block=(BLOCK,),
            args=(x, parts, x.size, start),
            WIDE=wide(x.size, x),
        )
        start += count
    out = empty(parts, ())
    args = (parts, out, start)
    launch(SOURCE, "norm_of_parts", parts, grid=(1,), block=(BLOCK,), args=args, WIDE=0)
    return out
