"""Additive attention (Bahdanau et al.)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import shapes
from xformer.ops._attention import fold, forbid, require_heads, softmax_or_zero, unfold

# Elements of `hidden` in a block of queries, 256 KB in float32. A block has at least one query.
BLOCK = 2**16


@overridable
@shapes("q (B, H, T, A)  k (B, G, S, A)  v (B, G, S, M)  w (H, A)")
def additive_attention(
    q: Array,
    k: Array,
    v: Array,
    w: Array,
    *,
    mask: Array | None = None,
    causal: bool = False,
) -> tuple[Array, AdditiveAttentionCache]:
    """ctx_i = sum_j probs_ij v_j, with probs = softmax(scores) over the allowed keys.

    scores_ij = sum_a w_a hidden_ija, hidden_ija = tanh(q_ia + k_ja) (arXiv:1409.0473, A.1.2).

    q: (B, H, T, A)   k: (B, G, S, A)   v: (B, G, S, M)   ctx: (B, H, T, M)
        q and k are projected: the paper's W_a s and U_a h, which `linear` computes.
        G must divide H. Query head h attends to key/value head h // (H / G).
    w: (H, A), a vector for each head; the paper's v_a is w with H = 1.
    mask: boolean, broadcasts to (B, H, T, S); True = may attend.
    causal: query i attends to keys j <= i + S - T (bottom-right aligned).

    A query without an allowed key gives 0 and has gradient 0.

    ValueError if shapes do not fit, TypeError if the mask is not boolean.
    Derivation: docs/derivations/additive_attention.md
    """
    require_heads("additive_attention", q, k, mask)
    xp = array_namespace(q)
    scores = xp.concat([_scores(q[:, :, rows, :], k, w) for rows in _blocks(q, k)], axis=2)
    probs, _ = softmax_or_zero(forbid(scores, mask, causal))  # (B, H, T, S)
    ctx = unfold(fold(probs, k) @ v, q)  # (B, H, T, M)
    return ctx, AdditiveAttentionCache(q, k, v, w, probs)


@short
class AdditiveAttentionCache(NamedTuple):
    """Saved by `additive_attention` for backward: the inputs and the probabilities.

    `hidden`, of shape (B, H, T, S, A), is not saved. Backward computes it again from q and k, one
    block of queries after the other. The mask is not needed, because probs is 0 where it forbids.
    """

    q: Array  # (B, H, T, A)
    k: Array  # (B, G, S, A)
    v: Array  # (B, G, S, M)
    w: Array  # (H, A)
    probs: Array  # (B, H, T, S)

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, Array]:
        """dq = sum_j dsums, dk = sum_i dsums, with dsums = dscores * w * (1 - hidden^2).

        dv = probs^T dctx, dw = sum of dscores * hidden over batch, queries and keys, with dscores =
        probs * (dprobs - sum(dprobs * probs)), dprobs = dctx v^T.
        """
        op = "additive_attention"
        require_gradient(op, "dctx", dctx, self.q, (*self.q.shape[:3], self.v.shape[3]))
        q, k, v, w, probs = self
        xp = array_namespace(dctx)
        dv = fold(probs, k).mT @ fold(dctx, k)  # a sum over the heads of a group
        dprobs = unfold(fold(dctx, k) @ v.mT, q)  # (B, H, T, S)
        dscores = probs * (dprobs - xp.sum(dprobs * probs, axis=-1, keepdims=True))
        dq, dk, dw = [], xp.zeros_like(k), xp.zeros_like(w)
        for rows in _blocks(q, k):
            dq_block, dk_block, dw_block = _backward(q[:, :, rows, :], k, w, dscores[:, :, rows, :])
            dq.append(dq_block)
            dk, dw = dk + dk_block, dw + dw_block
        return xp.concat(dq, axis=2), dk, dv, dw


def _blocks(q: Array, k: Array) -> Iterator[slice]:
    """Slices of the queries, in order, each with about BLOCK elements of `hidden`."""
    n_batch, n_heads, n_queries, width = q.shape
    size = max(1, BLOCK // max(1, n_batch * n_heads * k.shape[2] * width))
    for start in range(0, max(1, n_queries), size):  # without queries one empty block
        yield slice(start, min(start + size, n_queries))


def _scores(q: Array, k: Array, w: Array) -> Array:
    """scores (B, H, n, S) of n queries."""
    scores = _hidden(q, k) @ w[:, :, None]  # (B, H, n * S, 1)
    return array_namespace(q).reshape(scores, (*q.shape[:3], k.shape[2]))


def _backward(q: Array, k: Array, w: Array, dscores: Array) -> tuple[Array, Array, Array]:
    """The gradients of q (B, H, n, A), k and w from n queries, with dscores (B, H, n, S)."""
    xp = array_namespace(q)
    n_batch, n_heads, n_queries, width = q.shape
    groups, n_keys = k.shape[1:3]
    pairs = n_queries * n_keys
    hidden = _hidden(q, k)  # (B, H, n * S, A)
    dscores = xp.reshape(dscores, (n_batch, n_heads, pairs, 1))
    dw = xp.sum(dscores.mT @ hidden, axis=(0, 2))  # (H, A)
    dsums = dscores * w[:, None, :] * (1 - hidden**2)  # (B, H, n * S, A)
    dq = xp.sum(xp.reshape(dsums, (n_batch, n_heads, n_queries, n_keys, width)), axis=3)
    rows = n_heads // groups * n_queries
    dk = xp.sum(xp.reshape(dsums, (n_batch, groups, rows, n_keys, width)), axis=2)
    return dq, dk, dw


def _hidden(q: Array, k: Array) -> Array:
    """hidden = tanh(q_i + k_j) (B, H, n * S, A); row i * S + j is of query i and key j.

    q: (B, H, n, A), n queries   k: (B, G, S, A), all keys
    """
    xp = array_namespace(q)
    sums = fold(q, k)[:, :, :, None, :] + k[:, :, None, :, :]  # (B, G, H/G * n, S, A)
    n_batch, n_heads, n_queries, width = q.shape
    return xp.reshape(xp.tanh(sums), (n_batch, n_heads, n_queries * k.shape[2], width))
