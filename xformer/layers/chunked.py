"""A feed-forward network on some tokens at a time, so that few hidden units are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from xformer import tree
from xformer.dispatch import again, current_contexts, saved
from xformer.dispatch.checks import require_gradient, require_sizes
from xformer.layers.checkpoint import held
from xformer.layers.feed_forward import FeedForwardParams, feed_forward
from xformer.namespace import array_namespace
from xformer.showing import short
from xformer.typing import Array


def chunked_feed_forward(
    x: Array, params: FeedForwardParams, *, chunk_len: int, activation: str = "relu"
) -> tuple[Array, ChunkedCache]:
    """y = `feed_forward` of x, for `chunk_len` tokens at a time (arXiv:2001.04451, section 3).

    The hidden units (..., chunk_len, F) of one chunk are in memory, instead of (..., T, F). Only x
    and params are saved: backward computes the hidden units of each chunk again.

    x, y: (..., T, D)
    chunk_len: tokens of a chunk; the last chunk may have fewer
    activation: a name in `ops.activation.ACTIVATIONS`
    ValueError for a chunk_len below 1, an unknown activation and shapes that do not fit.
    """
    require_sizes("feed_forward", 1, chunk_len=chunk_len)
    xp = array_namespace(x)
    parts = [
        feed_forward(x[..., chunk, :], params, activation=activation)[0]
        for chunk in _chunks(x, chunk_len)
    ]
    cache = ChunkedCache(x, params, chunk_len, activation, current_contexts())
    return xp.concat(parts, axis=-2), saved(cache)


@short
class ChunkedCache(NamedTuple):
    """Saved by `chunked_feed_forward` for backward: its arguments."""

    x: Array  # (..., T, D)
    params: FeedForwardParams
    chunk_len: int
    activation: str
    contexts: tuple[Any, ...]  # of the forward

    def backward(self, dy: Array) -> tuple[Array, FeedForwardParams]:
        """Gradients of x and params. The gradient of params is the sum over the chunks."""
        x, chunk_len = self.x, self.chunk_len
        require_gradient("feed_forward", "dy", dy, x)
        parts: list[Array] = []
        dparams: Any = None
        for chunk in _chunks(x, chunk_len):
            dpart = dy[..., chunk, :]
            part, _, _ = held(x[..., chunk, :], memory=None, key=None, dy=dpart)
            dx, more = self.again(part).backward(dpart)  # frees the cache before the next chunk
            parts.append(dx)
            dparams = more if dparams is None else tree.map(lambda a, b: a + b, dparams, more)
        return array_namespace(dy).concat(parts, axis=-2), dparams

    def again(self, part: Array) -> Any:
        """The cache of the network on one chunk, from a second forward."""
        with again(self.contexts):
            return feed_forward(part, self.params, activation=self.activation)[1]


def _chunks(x: Array, chunk_len: int) -> Iterator[slice]:
    """The slices of the tokens; one empty slice if there are none."""
    n = x.shape[-2]
    return (slice(start, min(start + chunk_len, n)) for start in range(0, max(n, 1), chunk_len))
