"""Scaled dot-product attention."""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace, device

from xformer.checks import number, require_gradient, require_mask
from xformer.dispatch import overridable
from xformer.ops.dropout import DropoutCache, dropout, require_rate
from xformer.ops.random_bits import Key
from xformer.shapes import shapes
from xformer.typing import Array


@overridable
@shapes("q (B, H, T, K)  k (B, G, S, K)  v (B, G, S, M)")
def sdpa(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    *,
    mask: Array | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key | None = None,
) -> tuple[Array, SdpaCache]:
    """ctx = dropout(softmax(scale * q k^T + bias)) v, over allowed keys (arXiv:1706.03762, eq. 1).

    q: (B, H, T, K)   k: (B, G, S, K)   v: (B, G, S, M)   ctx: (B, H, T, M), G dividing H: query
    head h reads key/value head h // (H / G). bias and mask broadcast to (B, H, T, S); mask is
    boolean, True = may attend. causal: query i sees keys j <= i + S - T (bottom-right aligned).
    scale: K^-1/2 unless given. A query with no key to attend to gives 0 and gradient 0.

    ValueError where shapes do not fit, TypeError where the mask is not boolean.
    Derivation: docs/derivations/sdpa.md
    """
    xp = array_namespace(q)
    _require_heads(q, k, bias, mask)
    rate = require_rate("sdpa", "dropout_rate", dropout_rate, "dropout_key", dropout_key)
    # Heads of no width score 0 whatever the scale.
    scale = max(q.shape[3], 1) ** -0.5 if scale is None else number("sdpa", "scale", scale)
    scores = _unfold(_fold(q, k) @ k.mT, q) * scale  # (B, H, T, S)
    if bias is not None:
        scores = scores + bias
    allowed = allowed_keys(scores, mask, causal)
    if allowed is not None:
        scores = xp.where(allowed, scores, -xp.inf)
    probs = _softmax_or_zero(scores)
    dropped, drop = dropout(probs, rate=rate, key=dropout_key)
    ctx = _unfold(_fold(dropped, k) @ v, q)  # (B, H, T, M)
    return ctx, SdpaCache(q, k, v, probs, scale, None if bias is None else bias.shape, drop)


class SdpaCache(NamedTuple):
    """What `sdpa` keeps for its backward."""

    q: Array  # (B, H, T, K)
    k: Array  # (B, G, S, K)
    v: Array  # (B, G, S, M)
    probs: Array  # (B, H, T, S), before dropout
    scale: float
    bias_shape: tuple[int, ...] | None
    drop: DropoutCache

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, Array | None]:
        """dscores = probs * (dprobs - sum(dprobs * probs)), dprobs = dctx v^T through dropout."""
        require_gradient("sdpa", "dctx", dctx, self.q, (*self.q.shape[:3], self.v.shape[3]))
        q, k, v, probs, scale, bias_shape, drop = self
        xp = array_namespace(dctx)
        dropped = drop.backward(probs)  # the mask is linear: it applies to probs as to dprobs
        dv = _fold(dropped, k).mT @ _fold(dctx, k)  # sums over the heads of a group
        dprobs = drop.backward(_unfold(_fold(dctx, k) @ v.mT, q))  # (B, H, T, S)
        dscores = probs * (dprobs - xp.sum(dprobs * probs, axis=-1, keepdims=True))
        dbias = None if bias_shape is None else sum_to(dscores, bias_shape)
        dscores = dscores * scale
        dq = _unfold(_fold(dscores, k) @ k, q)
        dk = _fold(dscores, k).mT @ _fold(q, k)
        return dq, dk, dv, dbias


def allowed_keys(scores: Array, mask: Array | None, causal: bool) -> Array | None:
    """The mask and causality together: boolean, broadcasting to scores; None where all may."""
    if not causal:
        return mask
    xp = array_namespace(scores)
    n_queries, n_keys = scores.shape[-2:]
    query = xp.arange(n_queries, device=device(scores))[:, None]
    key = xp.arange(n_keys, device=device(scores))[None, :]
    seen = key <= query + (n_keys - n_queries)  # (T, S)
    return seen if mask is None else seen & mask


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum x over the axes along which an array of `shape` was broadcast to it."""
    xp = array_namespace(x)
    lead = x.ndim - len(shape)
    wide = tuple(i + lead for i, n in enumerate(shape) if n == 1 and x.shape[i + lead] != 1)
    return xp.reshape(xp.sum(x, axis=(*range(lead), *wide)), shape)


def _softmax_or_zero(scores: Array) -> Array:
    """Softmax over the last axis; a row of -inf, or one without elements, gives zeros."""
    xp = array_namespace(scores)
    if scores.shape[-1] == 0:
        return scores
    top = xp.max(scores, axis=-1, keepdims=True)
    e = xp.exp(scores - xp.where(top == -xp.inf, 0.0, top))
    total = xp.sum(e, axis=-1, keepdims=True)
    return e / xp.where(total == 0, 1.0, total)


def _fold(x: Array, k: Array) -> Array:
    """(B, H, T, .) -> (B, G, H/G * T, .): the query heads of a group as more rows."""
    groups = k.shape[1]
    if x.shape[1] == groups:
        return x
    rows = x.shape[1] // groups * x.shape[2]
    return array_namespace(x).reshape(x, (x.shape[0], groups, rows, x.shape[3]))


def _unfold(x: Array, q: Array) -> Array:
    """(B, G, H/G * T, .) -> (B, H, T, .)."""
    if x.shape[1] == q.shape[1]:
        return x
    return array_namespace(x).reshape(x, (*q.shape[:3], x.shape[3]))


def _require_heads(q: Array, k: Array, bias: Array | None, mask: Array | None) -> None:
    heads, groups = q.shape[1], k.shape[1]
    if groups == 0:
        raise ValueError(f"sdpa: k must have at least one head, got shape {tuple(k.shape)}")
    if heads % groups:
        raise ValueError(f"sdpa: the {groups} heads of k must divide the {heads} heads of q")
    if mask is not None:
        require_mask("sdpa", "mask", mask, q)
    full = (*q.shape[:3], k.shape[2])
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None and not _broadcasts(tuple(array.shape), full):
            raise ValueError(
                f"sdpa: {name} must broadcast to (B, H, T, S) = {full}, got shape "
                f"{tuple(array.shape)}"
            )


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(n in (1, m) for n, m in pairs)
