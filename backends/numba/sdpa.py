"""`sdpa`, a part of it in one call: its tiles need neither Python nor the GIL."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba.compiled import AMD, LOG2_E
from xformer.backends.numba.flash import loops
from xformer.backends.numba.gemm import no_products, products
from xformer.backends.numpy.threads import blocks
from xformer.backends.numpy.tiles import FEW, ROWS, THREADED, TILE

from xformer.checks import require_gradient
from xformer.ops._attention import require_heads, scale_of, window_of
from xformer.ops.random_bits import Key
from xformer.typing import Array

COLUMNS, WIDE = 256 if AMD else 384, 1024  # keys of a tile, and of one that has them all, at most
# Queries of a tile where some see less than others: fewer in short texts, since half of a tile on
# the diagonal is for nothing. Tiles of long texts are multiples of a product's, 12 by 32.
LOW = 32, 128 if AMD else 288
FAR = 1 << 40  # where no window ends


def outside(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
    *,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key | None = None,
) -> str | None:
    """Why the kernel cannot run."""
    if any(x.dtype != np.float32 or x.ndim != 4 for x in (q, k, v)):
        return "only float32, and four axes"
    if bias is not None or sinks is not None or softcap is not None or dropout_rate != 0:
        return "no bias, sinks, softcap or dropout"
    if mask is not None and np.shape(mask)[1:] != (1, 1, k.shape[2]):
        return "only masks of keys"
    if q.shape[2] < FEW or 0 in (*q.shape, *v.shape):
        return f"only {FEW} queries or more, and no empty arrays"
    return no_products()


def sdpa(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
    *,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key | None = None,
) -> tuple[Array, SdpaCache]:
    """Keys' heads are shared out among threads, and with them those of their queries."""
    require_heads("sdpa", q, k, mask)
    left, right = window_of("sdpa", window)
    if causal:
        right = 0
    ahead = k.shape[2] - q.shape[2]
    cache = SdpaCache(
        q,
        k,
        v,
        pad_of(mask, k.shape[0], k.shape[2], k.dtype),
        FAR if left is None else min(left, FAR) - ahead,
        FAR if right is None else min(right, FAR) + ahead,
        scale_of("sdpa", scale, q),
        np.empty((*_tokens(q).shape[:3], v.shape[3]), q.dtype),
        *np.empty((2, *q.shape[:3]), q.dtype),
    )
    attend, arguments = loops()[0], cache.arguments(np.float32(cache.scale) * LOG2_E)
    cache.run(lambda start, stop: attend(products(), start, stop, *arguments))
    return _tokens(cache.ctx), cache


class SdpaCache(NamedTuple):
    """What `sdpa` keeps for its backward."""

    q: Array  # (B, H, T, K)
    k: Array  # (B, G, S, K)
    v: Array  # (B, G, S, M)
    pad: Array  # (B, S) or (B, 0)
    left: int  # how many keys before that of its own number a query sees
    right: int
    scale: float
    ctx: Array  # (B, T, H, M)
    top: Array  # (B, H, T)
    total: Array  # (B, H, T)

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, None, None]:
        """dscores = probs * (dprobs - inner), inner = sum(dprobs * probs) = dctx . ctx."""
        require_gradient("sdpa", "dctx", dctx, _tokens(self.ctx))
        grads = [np.empty(_tokens(x).shape, x.dtype) for x in (self.q, self.k, self.v)]
        dout, backward = _rows(np.ascontiguousarray(_tokens(dctx))), loops()[1]
        arguments = *self.arguments(np.float32(self.scale)), dout, *grads
        self.run(lambda start, stop: backward(products(), start, stop, *arguments))
        dq, dk, dv = map(_tokens, grads)
        return dq, dk, dv, None, None

    def arguments(self, scale: Any) -> tuple[Any, ...]:
        """Those of the loops, after the heads."""
        tile = tile_of(self.q.shape[2], self.k.shape[2], self.right)
        given = (_rows(_tokens(x)) for x in (self.q, self.k, self.v))
        options = self.pad, self.left, self.right, scale, tile
        return *given, *options, self.ctx, self.top, self.total

    def run(self, fn: Any) -> None:
        """fn(start, stop) for all heads of keys; on threads, where that pays."""
        n_heads = self.k.shape[0] * self.k.shape[1]
        size = self.q.size * self.k.shape[2]
        blocks(fn, n_heads, max(1, n_heads * THREADED // max(1, size)))


def _tokens(x: Array) -> Array:
    """(B, T, H, K) of (B, H, T, K), and the other way round."""
    return x.transpose(0, 2, 1, 3)


def pad_of(mask: Array | None, n_texts: int, n_keys: int, dtype: Any) -> Array:
    """What is added to scores, as the loops want it."""
    if mask is None or mask.all():
        return np.empty((n_texts, 0), dtype)
    pad = np.where(mask.reshape(-1, n_keys), 0, -np.inf).astype(dtype)
    return np.broadcast_to(pad, (n_texts, n_keys))


def tile_of(n_queries: int, n_keys: int, right: int) -> tuple[int, int]:
    """Rows and columns of a tile. right: how far a query sees."""
    n_columns = max(1, n_keys) if n_keys <= WIDE else COLUMNS
    n_rows = min(max(LOW[0], n_keys // 16), LOW[1]) if right < n_keys else ROWS[1]
    return min(n_rows, n_queries, TILE // n_columns), n_columns


def _rows(x: Array) -> Array:
    """As BLAS can read it, of whatever lengths: with contiguous rows of K that are apart."""
    down, across = x.strides[1], x.strides[3]
    fits = across == x.itemsize and down >= x.shape[3] * x.itemsize and down % x.itemsize == 0
    return x if fits else x.copy()
