"""Attention within buckets of similar queries, found by locality-sensitive hashing (Reformer)."""

from __future__ import annotations

import math
from typing import NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient, require_sizes
from xformer.dispatch.shapes import shapes
from xformer.ops.l2_normalize import l2_normalize
from xformer.ops.random_bits import RandomKey, random_bits, require_key

SELF = -1e5  # the score of a token for itself: it counts only if there is no other key


@overridable
@shapes("qk (B, H, T, K)  v (B, H, T, M)")
def lsh_attention(
    qk: Array,
    v: Array,
    *,
    key: RandomKey,
    n_buckets: int,
    chunk_len: int,
    n_rounds: int = 1,
    causal: bool = False,
) -> tuple[Array, LshAttentionCache]:
    """ctx_i = sum_j probs_ij v_j over the keys that share a chunk with query i (arXiv:2001.04451).

    Keys are the queries at length 1: scores_ij = q_i . q_j / |q_j|. In each round, tokens are
    sorted by bucket and position and cut into chunks. A chunk attends to itself and to the chunk
    before it; the first chunk to the last. The softmax is over the keys of all rounds together; a
    key of several rounds counts once. A token attends to itself only if it has no other key.

    qk: (B, H, T, K)   v, ctx: (B, H, T, M)
    key: of the random rotations, which are different for each head and round
    n_buckets: an even number (`lsh_buckets`)
    chunk_len: tokens of a chunk; it divides T
    causal: query i attends to keys j <= i

    The buckets have no gradient. ValueError for sizes and shapes that do not fit, TypeError if key
    is not a `RandomKey`. Derivation: docs/derivations/lsh_attention.md
    """
    (chunk_len,) = require_sizes("lsh_attention", 1, chunk_len=chunk_len)
    length = qk.shape[2]
    if qk.shape[3] == 0:
        raise ValueError(f"lsh_attention: qk must have K of at least 1, got {tuple(qk.shape)}")
    if length % chunk_len:
        raise ValueError(f"lsh_attention: chunk_len must divide T = {length}, got {chunk_len}")
    buckets = lsh_buckets(qk, key=key, n_buckets=n_buckets, n_rounds=n_rounds)
    xp = array_namespace(qk)
    index = xp.arange(length, dtype=buckets.dtype, device=device(buckets))
    order = xp.argsort(buckets * length + index, axis=-1)  # (B, H, R, T)
    rank = xp.argsort(order, axis=-1)  # the index of each token in its round's order
    sorting = _Sorting(order, rank, chunk_len, causal)
    scores = sorting.scores(qk)
    top = xp.max(sorting.back(xp.max(scores, axis=-1, keepdims=True)), axis=2)  # (B, H, T, 1)
    e = xp.exp(scores - sorting.chunks(top))
    total = xp.sum(sorting.back(xp.sum(e, axis=-1, keepdims=True)), axis=2)
    ctx = xp.sum(sorting.back(e @ sorting.keys(v)), axis=2) / total
    return ctx, LshAttentionCache(qk, v, ctx, top, total, sorting)


def lsh_buckets(qk: Array, *, key: RandomKey, n_buckets: int, n_rounds: int) -> Array:
    """The bucket of each token in each round: argmax of [x R, -x R] (arXiv:1509.02897).

    R has independent normal numbers from `key`, other ones for each head and round.

    qk: (B, H, T, K)   buckets: (B, H, R, T), integers in [0, n_buckets)
    n_buckets: an even number of at least 2. n_rounds: R, at least 1. ValueError for others.
    """
    n_buckets, n_rounds = require_sizes("lsh_attention", 1, n_buckets=n_buckets, n_rounds=n_rounds)
    if n_buckets % 2:
        raise ValueError(f"lsh_attention: n_buckets must be even, got {n_buckets}")
    require_key("lsh_attention", key)
    xp = array_namespace(qk)
    b, heads, length, width = qk.shape
    half = n_buckets // 2
    n = heads * width * n_rounds * half
    bits = xp.astype(random_bits(qk, key=key, size=2 * n), qk.dtype)
    uniform = (bits + 0.5) / 2**32
    # Box and Muller: two uniform numbers give a normal one.
    normal = xp.sqrt(-2 * xp.log(uniform[:n])) * xp.cos(2 * math.pi * uniform[n:])
    rotated = qk @ xp.reshape(normal, (heads, width, n_rounds * half))
    rotated = xp.reshape(rotated, (b, heads, length, n_rounds, half))
    both = xp.concat([rotated, -rotated], axis=-1)
    return xp.permute_dims(xp.argmax(both, axis=-1), (0, 1, 3, 2))


@short
class LshAttentionCache(NamedTuple):
    """Saved by `lsh_attention` for backward: the inputs, the output, and the order of each round.

    Scores and probabilities are computed again, with the top score and the sum of each query.
    """

    qk: Array  # (B, H, T, K)
    v: Array  # (B, H, T, M)
    ctx: Array  # (B, H, T, M)
    top: Array  # (B, H, T, 1), the largest score
    total: Array  # (B, H, T, 1), the sum of exp(scores - top)
    sorting: _Sorting

    def backward(self, dctx: Array) -> tuple[Array, Array]:
        """Gradients of qk and v.

        dv = probs^T dctx and dscores = probs (dctx v^T - dctx . ctx), summed over the rounds. qk
        gets dscores k as queries, and through the norm dscores^T q as keys.
        """
        require_gradient("lsh_attention", "dctx", dctx, self.v)
        qk, v, ctx, top, total, sorting = self
        xp = array_namespace(dctx)
        probs = xp.exp(sorting.scores(qk) - sorting.chunks(top)) / sorting.chunks(total)
        dctx_chunks = sorting.chunks(dctx)
        dv = sorting.back_keys(probs.mT @ dctx_chunks)
        inner = sorting.chunks(xp.sum(dctx * ctx, axis=-1, keepdims=True))
        dscores = probs * (dctx_chunks @ sorting.keys(v).mT - inner)
        dscores = xp.where(sorting.is_self(), 0.0, dscores)  # its score is a constant
        k, norm = l2_normalize(qk)
        dq = xp.sum(sorting.back(dscores @ sorting.keys(k)), axis=2)
        dk = sorting.back_keys(dscores.mT @ sorting.chunks(qk))
        return dq + norm.backward(dk), dv


class _Sorting(NamedTuple):
    """The chunks of each round. N chunks of C = chunk_len tokens; S = 2C keys, or C if N = 1."""

    order: Array  # (B, H, R, T), the token at each index
    rank: Array  # (B, H, R, T), the index of each token in `order`
    chunk_len: int
    causal: bool

    @property
    def n_chunks(self) -> int:
        return int(self.order.shape[3]) // self.chunk_len

    def chunks(self, x: Array) -> Array:
        """The rows of x (B, H, T, .) in each round's order: (B, H, R, N, C, .)."""
        return self._in_chunks(_rows(x[:, :, None, :, :], self.order))

    def keys(self, x: Array) -> Array:
        """The rows of x that each chunk attends to: (B, H, R, N, S, .)."""
        return self._with_previous(self.chunks(x))

    def back(self, chunks: Array) -> Array:
        """The inverse of `chunks` for each round: (B, H, R, N, C, .) -> (B, H, R, T, .)."""
        shape = (*self.order.shape, chunks.shape[-1])
        return _rows(array_namespace(chunks).reshape(chunks, shape), self.rank)

    def back_keys(self, keys: Array) -> Array:
        """The transpose of `keys`: (B, H, R, N, S, .) -> (B, H, T, .), a sum over all uses."""
        xp = array_namespace(keys)
        if self.n_chunks > 1:
            previous, current = keys[..., : self.chunk_len, :], keys[..., self.chunk_len :, :]
            keys = current + xp.roll(previous, -1, axis=3)
        return xp.sum(self.back(keys), axis=2)

    def scores(self, qk: Array) -> Array:
        """q . q' / |q'| minus log n; n counts the rounds with this pair: (B, H, R, N, C, S)."""
        xp = array_namespace(qk)
        scores = self.chunks(qk) @ self.keys(l2_normalize(qk)[0]).mT
        if self.order.shape[2] > 1:
            scores = scores - xp.log(self._counts(scores))
        token, other = self._tokens()
        scores = xp.where(token == other, SELF, scores)
        return xp.where(other > token, -xp.inf, scores) if self.causal else scores

    def is_self(self) -> Array:
        """Whether query and key are the same token: (B, H, R, N, C, S)."""
        token, other = self._tokens()
        return token == other

    def _tokens(self) -> tuple[Array, Array]:
        """The queries (B, H, R, N, C, 1) and keys (B, H, R, N, 1, S) of each chunk."""
        queries = self._in_chunks(self.order[..., None])
        return queries, self._with_previous(queries).mT

    def _counts(self, like: Array) -> Array:
        """The number of rounds in which the query's chunk attends to the key's."""
        xp = array_namespace(like)
        total = xp.zeros_like(like)
        for r in range(self.order.shape[2]):
            index = self.chunks(self.rank[:, :, r, :, None])  # in round r, in each round's order
            of_query, of_key = (x // self.chunk_len for x in (index, self._with_previous(index).mT))
            is_pair = (of_query == of_key) | (of_query == (of_key + 1) % self.n_chunks)
            total = total + xp.astype(is_pair, like.dtype)
        return total

    def _in_chunks(self, x: Array) -> Array:
        shape = (*self.order.shape[:3], self.n_chunks, self.chunk_len, x.shape[-1])
        return array_namespace(x).reshape(x, shape)

    def _with_previous(self, x: Array) -> Array:
        """(B, H, R, N, C, .) -> (B, H, R, N, S, .): the chunk before, then the chunk itself."""
        if self.n_chunks < 2:
            return x
        xp = array_namespace(x)
        return xp.concat([xp.roll(x, 1, axis=3), x], axis=4)


def _rows(x: Array, ids: Array) -> Array:
    """y[b, h, r, i] = x[b, h, r, ids[b, h, r, i]]. x: (B, H, R or 1, T, .), ids: (B, H, R, T)."""
    xp = array_namespace(x)
    *lead, length, width = x.shape
    n = math.prod(lead)
    start = xp.reshape(xp.arange(n, dtype=ids.dtype, device=device(ids)) * length, (*lead, 1))
    flat = xp.reshape(ids + start, (math.prod(ids.shape),))
    y = xp.take(xp.reshape(x, (n * length, width)), flat, axis=0)
    return xp.reshape(y, (*ids.shape, width))
