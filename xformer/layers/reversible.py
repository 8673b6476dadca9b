"""Reversible blocks: backward rebuilds the input of each block from its output.

y1 = x1 + f(x2), y2 = x2 + g(y1);   x2 = y2 - g(y1), x1 = y1 - f(x2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from xformer import ops
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import again, current_contexts, saved
from xformer.dispatch.grad_callback import Ready
from xformer.dispatch.shapes import STORED, dtype_name
from xformer.layers.block import BlockConfig, BlockParams, block_gradients, branches_of
from xformer.layers.blocks_cache import BlocksCache, order_of, report_block
from xformer.layers.protocol import Context, SideInputs, plus, rate
from xformer.layers.residual import BranchCache, branched
from xformer.ops.barrier import barrier

_Branch = Callable[[Array], tuple[Array, BranchCache]]


def reversible(
    x: Array,
    params: tuple[BlockParams, ...],
    side: SideInputs,
    *,
    configs: Sequence[BlockConfig],
    context: Context,
) -> tuple[Array, BlocksCache | ReversibleCache]:
    """y = (x1 + x2) / 2 after all blocks; x1 = x2 = x before (arXiv:2001.04451, section 3).

    Each block computes y1 = x1 + f(x2) and y2 = x2 + g(y1), where f is its attention and g its
    feed-forward network, each with norms and dropout (`layers.residual.branched`). Only the two
    streams after the last block are saved, whatever the number of blocks.

    x, y: (B, T, D) or (T, D)
    context.rotary: of each layer
    For the other arguments see `layers.blocks`.
    ValueError for shapes and numbers that do not fit. TypeError for bfloat16 and float16: an input
    that is rebuilt from rounded numbers is off, and the errors add up over the blocks.
    """
    if dtype_name(x) in STORED:
        raise TypeError(
            f"blocks: reversible blocks must be float32 or float64, since backward rebuilds their "
            f"inputs, got {dtype_name(x)}"
        )
    if context.segment_memory is not None:
        raise ValueError("blocks: reversible excludes segment_memory")
    if not (side.memory is None and side.memory_pos is None and context.memory_mask is None):
        raise ValueError("blocks: reversible blocks have no cross-attention, got a memory")
    kept = context._replace(kv_cache=None, dropout_key=None)
    network = _Network(params, side, configs, order_of(params, configs), kept)
    kv_caches: list[Any] = []
    x1 = x2 = x
    for i in range(len(configs)):
        f, g = network.branches(i, context)
        r, cache = f(x2)
        kv_caches.append(cache.sublayer.kv_cache)
        del cache  # frees it before the next sublayer runs
        x1 = x1 + r
        r, _ = g(x1)
        x2 = x2 + r
    y = (x1 + x2) / 2
    if context.kv_cache is not None:
        return y, BlocksCache((), network.order, False, tuple(kv_caches))
    return y, saved(ReversibleCache(x1, x2, network, context.dropout_key, current_contexts()))


class _Network(NamedTuple):
    """The blocks and their common arguments. It holds no activations."""

    params: tuple[BlockParams, ...]
    side: SideInputs
    configs: Sequence[BlockConfig]
    order: tuple[int, ...]  # the index of each layer's block
    context: Context  # without KV cache and dropout key

    def branches(self, i: int, context: Context) -> list[_Branch]:
        """f and g of layer i."""
        config, of_layer = self.configs[i], context.of_layer(i)
        around: Any = {"config": config.norm, "multiplier": config.residual_multiplier}
        around["dropout_rate"] = rate(config.dropout, of_layer)
        return [
            partial(branched, branch=branch, **around)
            for branch in branches_of(self.params[self.order[i]], self.side, config, of_layer)
        ]


@short
class ReversibleCache(NamedTuple):
    """Saved by `reversible` for backward: both streams after the last block.

    The other arrays are arguments. Each block's input follows from its output, and dropout's bits
    from the key.
    """

    y1: Array  # (B, T, D) or (T, D)
    y2: Array  # (B, T, D)
    network: _Network
    dropout_key: ops.RandomKey | None
    contexts: tuple[Any, ...]  # of the forward

    @property
    def blocks(self) -> NoReturn:
        """Raise AttributeError: unlike `BlocksCache`, this has no cache for each layer."""
        raise AttributeError("blocks: reversible blocks save no cache of each layer")

    def backward(
        self,
        dy: Array,
        drouter_logits: Sequence[None] | None = None,
        *,
        ready: Ready | None = None,
    ) -> tuple[Array, tuple[BlockParams, ...], SideInputs]:
        """Gradients of x, params and side.

        For each block, from the last to the first:
        - A second forward of g at y1 gives x2 = y2 - g(y1); its backward gives
          dy1 += g'(y1)^T dy2.
        - A second forward of f at x2 gives x1 = y1 - f(x2); its backward gives
          dx2 = dy2 + f'(x2)^T dy1, and dx1 = dy1.

        x1 and x2 are y1 and y2 of the block before. After the last block dy1 = dy2 = dy / 2.
        Before the first block dx = dx1 + dx2.

        dy: (B, T, D) or (T, D), the gradient of y
        drouter_logits: None, or None for each layer: there are no routers.
        ready: called with "blocks.i" and the gradients of this block, as soon as they are complete
        """
        if any(dlogits is not None for dlogits in drouter_logits or ()):
            raise ValueError("blocks: drouter_logits must be None, there are no experts")
        y1, y2, network, key, _ = self
        dy1 = dy2 = dy / 2
        dparams: list[Any] = [None] * (max(network.order) + 1)
        dside = SideInputs()
        for i in reversed(range(len(network.configs))):
            y1, _, key = barrier(y1, memory=None, key=key, dy=dy2)
            f, g = network.branches(i, network.context._replace(dropout_key=key))
            x2, dy1, ffn = self._through(g, y1, y2, dy1, dy2)
            x1, dy2, attn = self._through(f, x2, y1, dy2, dy1)
            y1, y2 = x1, x2  # the outputs of the block before
            dblock, of_layer = block_gradients(attn, ffn)
            which = network.order[i]
            dparams[which] = plus(dparams[which], dblock)
            report_block(ready, network.order, i, dparams)
            dside = dside.plus(of_layer)
        return dy1 + dy2, tuple(dparams), dside

    def _through(
        self, f: _Branch, x: Array, y: Array, dx: Array, dy: Array
    ) -> tuple[Array, Array, tuple[Any, ...]]:
        """Return z, the gradient of x, and the gradients of the parameters of f, for y = z + f(x).

        dx: the gradient of x from its other uses
        """
        r, cache = self.again(f, x)
        more, *grads = cache.backward(dy)
        return y - r, dx + more, tuple(grads)

    def again(self, f: _Branch, x: Array) -> tuple[Array, Any]:
        """f(x) and its cache, from a second forward."""
        with again(self.contexts):
            return f(x)
