"""`sdpa` in tiles of queries and keys. A tile's scores fit in the cache; backward recomputes them.

A thread computes as many heads at once as fit in the cache, so that its NumPy calls are long. NumPy
computes without the GIL, but only one thread at a time can start a call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numpy.flash import Attention, Gradients, attend, backward
from xformer.backends.numpy.tiles import Scores
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_gradient
from xformer.ops._attention import sdpa_options
from xformer.ops.sdpa import sdpa as reference


def unsupported(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
    *,
    mask: Array | None = None,
    **options: Any,
) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return "there are no queries" if 0 in q.shape[:3] else None


@kernel(reference, "numpy", unsupported=unsupported)
def sdpa(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
    *,
    mask: Array | None = None,
    **options: Any,
) -> tuple[Array, NumpySdpaCache]:
    """Compute ctx part by part, with no more scratch memory than the queries, keys and values."""
    checked = sdpa_options(q, k, bias, mask=mask, **options)
    scores = Scores(q, k, _four_axes(bias), _four_axes(mask), checked, *checked.band)
    ctx = _empty((*q.shape[:3], v.shape[3]), q.dtype)
    top, total = np.empty((2, *q.shape[:3], 1), q.dtype)
    attn = Attention(scores, v, sinks, ctx, top, total)
    scores.run(lambda part: attend(attn, part), q.shape[3] + v.shape[3], (True, True))
    return ctx, NumpySdpaCache(attn, None if bias is None else bias.shape)


@short
class NumpySdpaCache(NamedTuple):
    """Saved by `sdpa` for backward: its inputs, ctx, and the maximum and sum of each softmax.

    Backward recomputes the probabilities from them, tile by tile.
    """

    attention: Attention
    bias_shape: tuple[int, ...] | None

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, Array | None, Array | None]:
        """dscores = probs * (dprobs - inner), inner = sum(dprobs * probs) = dctx . ctx."""
        attn = self.attention
        require_gradient("sdpa", "dctx", dctx, attn.ctx)
        q, k, v, bias = attn.scores.q, attn.scores.k, attn.v, attn.scores.bias
        grads = Gradients(
            _empty(q.shape, q.dtype),
            _empty(k.shape, k.dtype),
            _empty(v.shape, v.dtype),
            None if bias is None else np.zeros(bias.shape, q.dtype),
            None if attn.sinks is None else np.zeros(attn.top.shape, q.dtype),
        )
        independent = (True, True)
        if bias is not None and attn.bias_matters:  # parts with the same bias add to the same dbias
            independent = bias.shape[0] > 1, bias.shape[1] > 1
        width = 3 * q.shape[3] + 2 * v.shape[3]
        attn.scores.run(lambda part: backward(attn, part, dctx, grads), width, independent)
        dbias = dsinks = None
        if grads.bias is not None:
            dbias = grads.bias.reshape(self.bias_shape)
        if attn.sinks is not None:
            shares = np.exp(attn.sinks[:, None, None] - attn.top)  # probability of a sink, * total
            dsinks = -np.sum(shares * grads.inner, axis=(0, 2, 3))
        return grads.q, grads.k, grads.v, dbias, dsinks


def _empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an empty (B, H, T, K) stored as (B, T, H, K), so that no copy merges the heads."""
    b, h, t, k = shape
    return np.empty((b, t, h, k), dtype).transpose(0, 2, 1, 3)


def _four_axes(x: Array | None) -> Array | None:
    return None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)
