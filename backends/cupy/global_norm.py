"""The norm over all gradients, on the device."""

from __future__ import annotations

from collections.abc import Sequence

from xformer.backends.cupy.module import Source, blocks, contiguous, empty, launch, wide

from xformer.typing import Array

SOURCE = Source(__file__, WIDE=(0, 1))
BLOCK = 256  # threads
MAX_BLOCKS = 512  # a fixed number, so that every device makes the same sums


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
