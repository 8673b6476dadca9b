"""Attention with relative position embeddings (Shaw et al.)."""

from __future__ import annotations

import math
from typing import NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import shapes
from xformer.ops._attention import (
    aligned,
    fold,
    forbid,
    require_heads,
    scale_of,
    softmax_or_zero,
    unfold,
)
from xformer.ops._pointwise import clip
from xformer.ops.dropout import DropoutCache, dropout, require_rate
from xformer.ops.random_bits import RandomKey


@overridable
@shapes("q (B, H, T, K)  k (B, G, S, K)  v (B, G, S, M)  rel_k (2L+1, K)  rel_v (2L+1, M)")
def shaw(
    q: Array,
    k: Array,
    v: Array,
    rel_k: Array,
    rel_v: Array | None = None,
    *,
    mask: Array | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: RandomKey | None = None,
) -> tuple[Array, ShawCache]:
    """Attention with learned embeddings of the relative position, for keys and for values.

    scores_ij = scale * q_i . (k_j + rel_k[c]), ctx_i = sum_j probs_ij (v_j + rel_v[c]), with
    c = L + min(max(j - i, -L), L) (arXiv:1803.02155, eqs. 3 to 5). i is counted from S - T.

    q: (B, H, T, K)   k: (B, G, S, K)   v: (B, G, S, M)   ctx: (B, H, T, M)
        G must divide H. Query head h attends to key/value head h // (H / G).
    rel_k: (2L+1, K)   rel_v: (2L+1, M), or None for zeros. All heads share them.
    mask: boolean, broadcasts to (B, H, T, S); True = may attend.
    causal: query i attends to keys j <= i + S - T (bottom-right aligned).
    scale: K^-1/2 if None.

    ValueError if shapes do not fit, TypeError if the mask is not boolean.
    Derivation: docs/derivations/shaw.md
    """
    require_heads("shaw", q, k, mask)
    if rel_k.shape[0] % 2 == 0:
        raise ValueError(
            "shaw: rel_k must have an odd number of rows, for the distances -L to L, got shape "
            f"{tuple(rel_k.shape)}"
        )
    rate = require_rate("shaw", "dropout_rate", dropout_rate, "dropout_key", dropout_key)
    scale = scale_of("shaw", scale, q)
    relative = spread(q @ rel_k.mT, k.shape[2])  # (B, H, T, S)
    scores = (unfold(fold(q, k) @ k.mT, q) + relative) * scale
    probs, _ = softmax_or_zero(forbid(scores, mask, causal))
    dropped, drop = dropout(probs, rate=rate, key=dropout_key)
    ctx = unfold(fold(dropped, k) @ v, q)  # (B, H, T, M)
    if rel_v is not None:
        ctx = ctx + gather(dropped, rel_v.shape[0]) @ rel_v
    return ctx, ShawCache(q, k, v, rel_k, rel_v, probs, scale, drop)


@short
class ShawCache(NamedTuple):
    """Saved by `shaw` for backward: the inputs and the probabilities before dropout.

    The scores are not needed: the derivative of the softmax depends only on the probabilities. The
    mask is not needed, because the probabilities are 0 where it forbids a key.
    """

    q: Array  # (B, H, T, K)
    k: Array  # (B, G, S, K)
    v: Array  # (B, G, S, M)
    rel_k: Array  # (2L+1, K)
    rel_v: Array | None  # (2L+1, M)
    probs: Array  # (B, H, T, S), before dropout
    scale: float
    drop: DropoutCache  # generates the dropout mask again

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, Array, Array | None]:
        """dq, dk, dv, drel_k and drel_v. `gather` is the transpose of `spread`, and vice versa."""
        require_gradient("shaw", "dctx", dctx, self.q, (*self.q.shape[:3], self.v.shape[3]))
        q, k, v, rel_k, rel_v, probs, scale, drop = self
        xp = array_namespace(dctx)
        dropped = drop.backward(probs)
        dv = fold(dropped, k).mT @ fold(dctx, k)
        ddropped = unfold(fold(dctx, k) @ v.mT, q)  # (B, H, T, S)
        drel_v = None
        if rel_v is not None:
            drel_v = _rows(gather(dropped, rel_v.shape[0])).mT @ _rows(dctx)
            ddropped = ddropped + spread(dctx @ rel_v.mT, k.shape[2])
        dprobs = drop.backward(ddropped)
        dscores = probs * (dprobs - xp.sum(dprobs * probs, axis=-1, keepdims=True)) * scale
        drelative = gather(dscores, rel_k.shape[0])  # (B, H, T, 2L+1)
        dq = unfold(fold(dscores, k) @ k, q) + drelative @ rel_k
        dk = fold(dscores, k).mT @ fold(q, k)
        return dq, dk, dv, _rows(drelative).mT @ _rows(q), drel_v


def spread(x: Array, n_keys: int) -> Array:
    """y_ij = x_ic, c the row for the distance from i to j: (B, H, T, 2L+1) -> (B, H, T, S)."""
    n_queries, n_rows = x.shape[2:]
    key, query = aligned(x, n_queries, n_keys)
    row = clip(key - query + n_rows // 2, 0, n_rows - 1)
    return _take(x, row)


def gather(x: Array, n_rows: int) -> Array:
    """y_ic = sum of x_ij over the keys j of row c: (B, H, T, S) -> (B, H, T, 2L+1)."""
    xp = array_namespace(x)
    n_queries, n_keys = x.shape[2:]
    if n_keys == 0:
        return xp.zeros((*x.shape[:3], n_rows), dtype=x.dtype, device=device(x))
    key, query = aligned(x, n_queries, n_keys)
    last = n_rows // 2  # L
    row = xp.arange(n_rows, device=device(x))  # (2L+1,)
    # Each distance within L has at most one key. The first and last row sum all farther keys too.
    at = query + (row - last)  # (T, 2L+1)
    y = xp.where((at >= 0) & (at < n_keys), _take(x, clip(at, 0, n_keys - 1)), 0.0)
    far = key - query  # (T, S)
    before = xp.sum(xp.where(far < -last, x, 0.0), axis=-1, keepdims=True)  # (B, H, T, 1)
    behind = xp.sum(xp.where(far > last, x, 0.0), axis=-1, keepdims=True)
    return y + xp.where(row == 0, before, 0.0) + xp.where(row == 2 * last, behind, 0.0)


def _take(x: Array, column: Array) -> Array:
    """y[b, h, i, j] = x[b, h, i, column[i, j]]."""
    xp = array_namespace(x)
    b, h, n_rows, n_columns = x.shape
    start = xp.arange(n_rows, device=device(x))[:, None] * n_columns
    flat = xp.reshape(column + start, (math.prod(column.shape),))
    y = xp.take(xp.reshape(x, (b, h, n_rows * n_columns)), flat, axis=2)
    return xp.reshape(y, (b, h, *column.shape))


def _rows(x: Array) -> Array:
    """(B, H, T, .) -> (N, .)."""
    return array_namespace(x).reshape(x, (math.prod(x.shape[:3]), x.shape[3]))
