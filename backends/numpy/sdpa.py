"""`sdpa` in tiles of queries and keys: scores live in a core's cache, and are made anew backward.

Each thread takes a batch element with as many of its heads as fit, so that its calls are long: they
compute without the GIL, but one thread at a time begins them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numpy.flash import Attention, Gradients, attend, backward
from xformer.backends.numpy.tiles import Scores
from xformer.checks import require_gradient
from xformer.dispatch import kernel
from xformer.ops._attention import sdpa_options
from xformer.ops.sdpa import sdpa as reference
from xformer.showing import short
from xformer.typing import Array


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
    """Why the kernel cannot run."""
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
) -> tuple[Array, SdpaCache]:
    """In parts that need no more memory than their queries, keys and values."""
    checked = sdpa_options(q, k, bias, mask=mask, **options)
    scores = Scores(q, k, _four_axes(bias), _four_axes(mask), checked, *checked.band)
    ctx = _empty((*q.shape[:3], v.shape[3]), q.dtype)
    top, total = np.empty((2, *q.shape[:3], 1), q.dtype)
    all_parts = Attention(scores, v, sinks, ctx, top, total)
    scores.run(lambda part: attend(all_parts, part), q.shape[3] + v.shape[3], (True, True))
    return ctx, SdpaCache(all_parts, None if bias is None else bias.shape)


@short
class SdpaCache(NamedTuple):
    """Saved by `sdpa` for backward."""

    attention: Attention
    bias_shape: tuple[int, ...] | None

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, Array | None, Array | None]:
        """dscores = probs * (dprobs - inner), inner = sum(dprobs * probs) = dctx . ctx."""
        own = self.attention
        require_gradient("sdpa", "dctx", dctx, own.ctx)
        q, k, v, bias = own.scores.q, own.scores.k, own.v, own.scores.bias
        grads = Gradients(
            _empty(q.shape, q.dtype),
            _empty(k.shape, k.dtype),
            _empty(v.shape, v.dtype),
            None if bias is None else np.zeros(bias.shape, q.dtype),
            None if own.sinks is None else np.zeros(own.top.shape, q.dtype),
        )
        apart = (True, True)
        if bias is not None and own.bias_matters:  # nobody adds where another one does
            apart = bias.shape[0] > 1, bias.shape[1] > 1
        width = 3 * q.shape[3] + 2 * v.shape[3]
        own.scores.run(lambda part: backward(own, part, dctx, grads), width, apart)
        dbias = dsinks = None
        if grads.bias is not None:
            dbias = grads.bias.reshape(self.bias_shape)
        if own.sinks is not None:
            shares = np.exp(own.sinks[:, None, None] - own.top)  # times total
            dsinks = -np.sum(shares * grads.inner, axis=(0, 2, 3))
        return grads.q, grads.k, grads.v, dbias, dsinks


def _empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """(B, H, T, K), the heads of a token side by side in memory: merged without a copy."""
    b, h, t, k = shape
    return np.empty((b, t, h, k), dtype).transpose(0, 2, 1, 3)


def _four_axes(x: Array | None) -> Array | None:
    return None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)
