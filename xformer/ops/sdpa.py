"""Scaled dot-product attention."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import shapes
from xformer.ops._attention import (
    fold,
    forbid,
    sdpa_options,
    softmax_or_zero,
    unfold,
)
from xformer.ops.dropout import DropoutCache, dropout
from xformer.ops.random_bits import RandomKey
from xformer.ops.sum_to import sum_to


@overridable
@shapes("q (B, H, T, K)  k (B, G, S, K)  v (B, G, S, M)  sinks (H)")
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
    dropout_key: RandomKey | None = None,
) -> tuple[Array, SdpaCache]:
    """ctx = dropout(softmax(scale * q k^T + bias)) v, over allowed keys (arXiv:1706.03762, eq. 1).

    q: (B, H, T, K)   k: (B, G, S, K)   v: (B, G, S, M)   ctx: (B, H, T, M)
        G must divide H. Query head h attends to key/value head h // (H / G).
    bias: broadcasts to (B, H, T, S), and is added to the scores.
    sinks: (H,), scores of a further key without a value: exp(sink) is added to the denominator of
        the softmax (gpt-oss).
    mask: boolean, broadcasts to (B, H, T, S); True = may attend.
    causal: query i attends to keys j <= i + S - T (bottom-right aligned).
    window: (left, right); query i attends to i + S - T - left <= j <= i + S - T + right. None means
        unbounded. For Mistral's sliding_window w, which includes the query, left = w - 1.
    softcap: c replaces scale * q k^T by c tanh(scale * q k^T / c), to which bias is then added
        (Gemma 2, arXiv:2408.00118).
    scale: K^-1/2 if None.
    dropout_rate: of the probabilities; a rate above 0 needs dropout_key.

    A key is allowed if mask, causal and window all allow it.

    A query without an allowed key gives 0 and has gradient 0.

    ValueError if shapes do not fit, and for a wrong window or softcap; TypeError if the mask is not
    boolean. Derivation: docs/derivations/sdpa.md
    """
    xp = array_namespace(q)
    causal, window, softcap, scale, rate, key = sdpa_options(
        q,
        k,
        bias,
        mask=mask,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
    )
    scores = unfold(fold(q, k) @ k.mT, q) * scale  # (B, H, T, S)
    if softcap is not None:
        scores = softcap * xp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    probs, shares = softmax_or_zero(forbid(scores, mask, causal, window), sinks)
    dropped, drop = dropout(probs, rate=rate, key=key)
    ctx = unfold(fold(dropped, k) @ v, q)  # (B, H, T, M)
    bias_shape = None if bias is None else bias.shape
    return ctx, SdpaCache(q, k, v, probs, shares, scale, softcap, bias_shape, drop)


@short
class SdpaCache(NamedTuple):
    """Saved by `sdpa` for backward: q, k, v and the probabilities before dropout.

    The scores are not needed: the derivative of the softmax depends only on the probabilities. Mask
    and window are not needed, because the probabilities are 0 where they forbid a key. Scores for a
    softcap and the dropout mask are computed again.
    """

    q: Array  # (B, H, T, K)
    k: Array  # (B, G, S, K)
    v: Array  # (B, G, S, M)
    probs: Array  # (B, H, T, S), before dropout
    shares: Array | None  # (B, H, T, 1), the probabilities of the sinks
    scale: float
    softcap: float | None
    bias_shape: tuple[int, ...] | None
    drop: DropoutCache

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, Array | None, Array | None]:
        """dq = scale * dscores k, dk = scale * dscores^T q, dv = dropout(probs)^T dctx.

        dscores = probs * (dprobs - sum(dprobs * probs)), dprobs = dctx v^T through dropout. dbias
        is dscores summed over the axes along which bias was repeated; dsinks sums a sink's dscores.
        With a softcap, its derivative multiplies dscores in dq and dk. The gradients of q, k, v,
        bias and sinks are returned; None for an absent bias or sinks.
        """
        require_gradient("sdpa", "dctx", dctx, self.q, (*self.q.shape[:3], self.v.shape[3]))
        q, k, v, probs, shares, scale, softcap, bias_shape, drop = self
        xp = array_namespace(dctx)
        dropped = drop.backward(probs)  # dropout is linear: its backward is the same map
        dv = fold(dropped, k).mT @ fold(dctx, k)  # a sum over the heads of a group
        dprobs = drop.backward(unfold(fold(dctx, k) @ v.mT, q))  # (B, H, T, S)
        inner = xp.sum(dprobs * probs, axis=-1, keepdims=True)  # (B, H, T, 1)
        dsinks = None if shares is None else -xp.sum(shares * inner, axis=(0, 2, 3))
        dscores = probs * (dprobs - inner)
        dbias = None if bias_shape is None else sum_to(dscores, shape=bias_shape)
        if softcap is not None:  # recomputed: saving it would double the memory
            capped = xp.tanh(unfold(fold(q, k) @ k.mT, q) * scale / softcap)
            dscores = dscores * (1 - capped**2)
        dscores = dscores * scale
        dq = unfold(fold(dscores, k) @ k, q)
        dk = fold(dscores, k).mT @ fold(q, k)
        return dq, dk, dv, dbias, dsinks
