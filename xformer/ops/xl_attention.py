"""Attention with relative positions of Transformer-XL (Dai et al.)."""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import shapes
from xformer.ops._attention import fold, forbid, require_heads, scale_of, softmax_or_zero, unfold
from xformer.ops.dropout import DropoutCache, dropout, require_rate
from xformer.ops.random_bits import RandomKey


@overridable
@shapes(
    "q (B, H, T, K)  k (B, G, S, K)  v (B, G, S, M)  r (G, N, K)  "
    "content_bias (H, K)  position_bias (H, K)"
)
def xl_attention(
    q: Array,
    k: Array,
    v: Array,
    r: Array,
    content_bias: Array,
    position_bias: Array,
    *,
    mask: Array | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: RandomKey | None = None,
) -> tuple[Array, XLAttentionCache]:
    """ctx = dropout(softmax(scores)) v, with keys for the content and for the distance.

    scores_ij = scale * ((q_i + content_bias) . k_j + (q_i + position_bias) . r[d]), d = i - j
    (arXiv:1901.02860, section 3.3; its u and v are the biases). i is counted from S - T.

    q: (B, H, T, K)   k: (B, G, S, K)   v: (B, G, S, M)   ctx: (B, H, T, M)
        The keys of earlier segments come first. G must divide H. Query head h attends to key/value
        head h // (H / G).
    r: (G, N, K), a key for each distance, from the largest to the smallest: S - 1, ..., -(T - 1),
        so that N = S + T - 1. If causal, the last one is 0, and N = S.
    content_bias, position_bias: (H, K)
    mask: boolean, broadcasts to (B, H, T, S); True = may attend.
    causal: query i attends to keys j <= i + S - T (bottom-right aligned).
    scale: K^-1/2 if None.
    dropout_rate: of the probabilities; a rate above 0 needs dropout_key.

    A query without an allowed key gives 0 and has gradient 0.

    ValueError if shapes do not fit, TypeError if the mask is not boolean.
    Derivation: docs/derivations/xl_attention.md
    """
    require_heads("xl_attention", q, k, mask)
    n_queries, n_keys = q.shape[2], k.shape[2]
    wanted = n_keys if causal else max(n_keys + n_queries - 1, 0)
    if r.shape[1] != wanted:
        raise ValueError(
            f"xl_attention: r must be (G, N, K) with N = {wanted}, a row for each distance"
            f"{' of at least 0' if causal else ''}, got shape {tuple(r.shape)}"
        )
    rate = require_rate("xl_attention", "dropout_rate", dropout_rate, "dropout_key", dropout_key)
    scale = scale_of("xl_attention", scale, q)
    content = unfold(fold(q + content_bias[:, None, :], k) @ k.mT, q)  # (B, H, T, S)
    position = unfold(fold(q + position_bias[:, None, :], k) @ r.mT, q)  # (B, H, T, N)
    scores = (content + shift(position, n_keys)) * scale
    probs, _ = softmax_or_zero(forbid(scores, mask, causal))
    dropped, drop = dropout(probs, rate=rate, key=dropout_key)
    ctx = unfold(fold(dropped, k) @ v, q)  # (B, H, T, M)
    return ctx, XLAttentionCache(q, k, v, r, content_bias, position_bias, probs, scale, drop)


@short
class XLAttentionCache(NamedTuple):
    """Saved by `xl_attention` for backward: the inputs and the probabilities before dropout.

    The scores are not needed: the derivative of the softmax depends only on the probabilities. The
    mask is not needed, because the probabilities are 0 where it forbids a key. The sums of queries
    and biases are computed again.
    """

    q: Array  # (B, H, T, K)
    k: Array  # (B, G, S, K)
    v: Array  # (B, G, S, M)
    r: Array  # (G, N, K)
    content_bias: Array  # (H, K)
    position_bias: Array  # (H, K)
    probs: Array  # (B, H, T, S), before dropout
    scale: float
    drop: DropoutCache  # generates the dropout mask again

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, Array, Array, Array]:
        """dq = dqc + dqp, with the gradients of both sums: dqc = dscores k, dqp = dposition r.

        dk = dscores^T (q + content_bias), dr = dposition^T (q + position_bias), where dposition is
        `unshift` of dscores. The biases get the sums of dqc and dqp over batch and queries.
        """
        require_gradient("xl_attention", "dctx", dctx, self.q, (*self.q.shape[:3], self.v.shape[3]))
        q, k, v, r, content_bias, position_bias, probs, scale, drop = self
        xp = array_namespace(dctx)
        dv = fold(drop.backward(probs), k).mT @ fold(dctx, k)
        dprobs = drop.backward(unfold(fold(dctx, k) @ v.mT, q))  # (B, H, T, S)
        dscores = probs * (dprobs - xp.sum(dprobs * probs, axis=-1, keepdims=True)) * scale
        dqc = unfold(fold(dscores, k) @ k, q)
        dk = fold(dscores, k).mT @ fold(q + content_bias[:, None, :], k)
        dposition = fold(unshift(dscores, r.shape[1]), k)  # (B, G, H/G * T, N)
        dqp = unfold(dposition @ r, q)
        dr = xp.sum(dposition.mT @ fold(q + position_bias[:, None, :], k), axis=0)
        return dqc + dqp, dk, dv, dr, xp.sum(dqc, axis=(0, 2)), xp.sum(dqp, axis=(0, 2))


def shift(x: Array, n_keys: int) -> Array:
    """y_ij = x_ic with c = T - 1 - i + j: (B, H, T, N) -> (B, H, T, S), S = n_keys.

    Column c of x is for the distance S - 1 - c. y is 0 if c >= N. (Row i moves to the left by
    T - 1 - i. In rows of T + S columns this is a slice and a reshape.)
    """
    xp = array_namespace(x)
    b, h, n_queries, n_columns = x.shape
    if n_queries == 0:
        return _zeros(x, 0, n_keys)
    width = n_queries + n_keys
    left, right = (_zeros(x, n_queries, n) for n in (1, width - n_columns - 1))
    flat = xp.reshape(xp.concat([left, x, right], axis=3), (b, h, n_queries * width))
    rows = xp.reshape(flat[:, :, n_queries:], (b, h, n_queries, width - 1))
    return rows[..., :n_keys]


def unshift(y: Array, n_columns: int) -> Array:
    """x_ic = y_ij with j = c - (T - 1) + i, 0 if there is no such key: the transpose of `shift`.

    (B, H, T, S) -> (B, H, T, N), N = n_columns.
    """
    xp = array_namespace(y)
    b, h, n_queries, n_keys = y.shape
    if n_queries == 0:
        return _zeros(y, 0, n_columns)
    width = n_queries + n_keys
    rows = xp.concat([y, _zeros(y, n_queries, n_queries - 1)], axis=3)
    flat = xp.reshape(rows, (b, h, 1, n_queries * (width - 1)))
    flat = xp.concat([_zeros(y, 1, n_queries), flat], axis=3)
    return xp.reshape(flat, (b, h, n_queries, width))[..., 1 : n_columns + 1]


def _zeros(like: Array, n_rows: int, n: int) -> Array:
    """(B, H, n_rows, n)."""
    shape = (*like.shape[:2], n_rows, n)
    return array_namespace(like).zeros(shape, dtype=like.dtype, device=device(like))
