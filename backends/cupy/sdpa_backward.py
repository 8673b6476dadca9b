"""The gradients of `sdpa`: a launch for queries, one for keys and values, one for the bias."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.backends.cupy.attention import (
    BLOCK,
    WIDTHS,
    Attention,
    heads_first,
    rows,
    shared,
    strides,
    tile,
)
from xformer.backends.cupy.column_sums import column_sums
from xformer.backends.cupy.module import EVERY, Source, blocks, empty, launch, real_size
from xformer.backends.cupy.side_by_side import heads_beside, step_of
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.shapes import working_dtype

SOURCE = Source(__file__, dtypes=EVERY, WIDTH=WIDTHS)
OWN_BYTES = 16 << 10  # as in sdpa_backward.cu


def backward(
    a: Attention, by_token: Array, top: Array, total: Array, dctx: Array
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Return dq, dk, dv, dbias and dsinks; None for dbias and dsinks without bias and sinks.

    a, by_token, top, total: the fields of `SdpaCache`
    dctx: (B, H, T, M)
    """
    (n_batch, n_heads, n_queries, _), (_, n_groups, n_keys, _) = a.q.shape, a.v.shape
    dq, dk, dv = heads_beside(a.q, (a.q.shape, a.k.shape, a.v.shape))
    dctx = rows(dctx)
    first = *a.arguments(dctx, dq, dk, dv), top, total, dctx, *strides(dctx)[:3]
    run = Launcher(a, first)
    tiles, inner = blocks(n_queries, run.own), empty(top)
    parts = (
        None if a.sinks is None else empty(a.q, (1, n_batch * tiles, n_heads), working_dtype(a.q))
    )
    run("queries", n_batch * n_heads * tiles, by_token, inner, dq, parts, a.scale, step_of(dq))
    steps = step_of(dk), step_of(dv)
    run("keys", n_batch * n_groups * blocks(n_keys, run.own), inner, dk, dv, *steps)
    dbias = None if a.bias is None else _dbias(run, a.bias, inner)
    dsinks = None if parts is None else column_sums(parts)[0, :]
    return heads_first(dq), heads_first(dk), heads_first(dv), dbias, dsinks


class Launcher(NamedTuple):
    """Launches the kernels of backward, with their common arguments."""

    attention: Attention
    first: tuple[Any, ...]  # the common first arguments

    @property
    def own(self) -> int:
        """Rows of a block: queries, or keys in the kernel for keys and values."""
        return tile(self.attention.width, real_size(self.attention.q), OWN_BYTES)[0]

    @property
    def other(self) -> int:
        """Rows of a tile that a block loads: keys, or queries in the kernel for keys and values."""
        return tile(self.attention.width, real_size(self.attention.q), OWN_BYTES)[1]

    def __call__(self, name: str, grid: int, *args: Any) -> None:
        a = self.attention
        launch(
            SOURCE,
            f"sdpa_backward_{name}",
            a.q,
            grid=(grid,),
            block=(BLOCK,),
            args=(*self.first, *args),
            shared=shared(a.width, real_size(a.q), self.own, self.other, 2),
            WIDTH=a.width,
        )


def _dbias(run: Launcher, bias: Array, inner: Array) -> Array:
    """Return dbias: dscores summed over broadcast axes, first in each tile, then over the tiles."""
    xp, a = array_namespace(bias), run.attention
    (n_batch, _, n_queries, _), n_keys = a.q.shape, a.k.shape[2]
    lead_b, lead_h, t, s = (1,) * (4 - bias.ndim) + tuple(bias.shape)
    same_for_all = s == 1 and a.sinks is None  # one bias for all keys has no effect on softmax
    if same_for_all or 0 in (*a.q.shape[:3], n_keys):
        return xp.zeros_like(bias)
    row_tiles, column_tiles = blocks(n_queries, run.own), blocks(n_keys, run.other)
    n_parts = (row_tiles if t == 1 else 1) * (column_tiles if s == 1 else 1)
    parts = empty(bias, (lead_b * lead_h, n_parts, t * s))
    grid = lead_b * lead_h * row_tiles * column_tiles
    run("bias", grid, inner, parts, n_batch, lead_b, lead_h, int(t == 1), int(s == 1))
    return xp.reshape(column_sums(parts) if n_parts > 1 else parts, bias.shape)
