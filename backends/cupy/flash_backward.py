"""The gradients of `flash`: a launch for the rows, one for queries, one for keys and values."""

from __future__ import annotations

from typing import Any

from xformer.backends.cupy.attention import BLOCK, Attention, heads_first, strides
from xformer.backends.cupy.column_sums import row_sums
from xformer.backends.cupy.module import Source, blocks, empty, launch
from xformer.backends.cupy.side_by_side import heads_beside, step_of
from xformer.base.typing import Array
from xformer.dispatch.shapes import STORED

PACK = 8  # numbers that are accessed together: 16 bytes
WIDTHS = (32, 64, 128)  # of the heads, rounded up
SOURCE = Source(__file__, dtypes=STORED, WIDTH=WIDTHS)
WARPS = 4  # of a block
# Head width -> (rows of a block, rows that it loads at a time), as in flash_backward.cu.
TILES = {32: (128, 32), 64: (128, 16), 128: (64, 32)}


def width_of(a: Attention) -> int:
    """Return the head width that the kernels are compiled for."""
    return next(width for width in WIDTHS if width >= a.width)


def shared(a: Attention, n_rows: int) -> int:
    """Return the bytes of shared memory for `n_rows` rows."""
    return a.q.dtype.itemsize * n_rows * (width_of(a) + PACK)


def backward(
    a: Attention, by_token: Array, top: Array, total: Array, dctx: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    """Return dq, dk, dv, None (no bias) and dsinks.

    a, by_token, top, total: the fields of `FlashCache`
    dctx: (B, H, T, M), with rows aligned to 16 bytes
    """
    (n_batch, n_heads, n_queries, _), (_, n_groups, n_keys, m) = a.q.shape, a.v.shape
    dq, dk, dv = heads_beside(a.q, (a.q.shape, a.k.shape, a.v.shape))
    lse, inner, shares, at_dctx = empty(top), empty(top), None, strides(dctx)[:3]
    if a.sinks is not None:
        shares = empty(top, (n_batch * n_queries, n_heads))
    rows = by_token, dctx, a.sinks, top, total, lse, inner, shares
    sizes = n_heads, n_queries, m, *at_dctx, top.size
    _launch(a, "rows", blocks(top.size, WARPS), 0, *rows, *sizes)
    n_own, n_other = TILES[width_of(a)]
    first = *a.arguments(dctx, dq, dk, dv), lse, inner, dctx, *at_dctx, a.scale
    size = shared(a, 2 * n_own + 4 * n_other)
    _launch(
        a, "queries", n_batch * n_heads * blocks(n_queries, n_own), size, *first, dq, step_of(dq)
    )
    steps = step_of(dk), step_of(dv)
    _launch(a, "keys", n_batch * n_groups * blocks(n_keys, n_own), size, *first, dk, dv, *steps)
    dsinks = None if shares is None else row_sums(shares)
    return heads_first(dq), heads_first(dk), heads_first(dv), None, dsinks


def _launch(a: Attention, name: str, grid: int, size: int, *args: Any) -> None:
    launch(
        SOURCE,
        f"flash_backward_{name}",
        a.q,
        grid=(grid,),
        block=(BLOCK,),
        args=args,
        shared=size,
        WIDTH=width_of(a),
    )
