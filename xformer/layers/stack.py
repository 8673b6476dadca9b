"""A stack of blocks: an encoder, a decoder, or the body of a decoder-only model."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer import ops, tree
from xformer.backends.base import Generator
from xformer.initial import Draw, xavier_uniform
from xformer.layers.attention import KeyValue, KeyValueParams, key_value
from xformer.layers.block import SITES, BlockConfig, BlockParams, block
from xformer.layers.norm import LayerNormParams
from xformer.typing import Array


class StackParams(NamedTuple):
    """Parameters of all blocks, and what stands around them."""

    blocks: tuple[BlockParams, ...]
    norm: LayerNormParams | None  # the final norm that pre-LN needs
    memory: KeyValueParams | None  # keys and values of the memory, shared by all blocks

    @staticmethod
    def init(
        rng: Generator,
        config: BlockConfig,
        n_layers: int,
        *,
        cross: bool = False,
        shared_memory: bool = False,
        draw: Draw = xavier_uniform,
        out_scale: float = 1.0,
    ) -> StackParams:
        """Initial parameters, as `BlockConfig.init`; a final norm where config.norm is "pre"."""
        blocks = tuple(
            config.init(
                rng, cross=cross, shared_memory=shared_memory, draw=draw, out_scale=out_scale
            )
            for _ in range(n_layers)
        )
        pre = config.norm == "pre"
        norm = LayerNormParams.init(rng, config.d_model, bias=config.bias) if pre else None
        shared = config.key_value_init(rng, draw=draw) if shared_memory else None
        return StackParams(blocks, norm, shared)


def stack(
    x: Array,
    params: StackParams,
    memory: Array | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    config: BlockConfig,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.Key | None = None,
) -> tuple[Array, StackCache]:
    """y = norm(block_n(... block_1(x))); every block sees memory, bias and the positions.

    x, y: (B, T, D); the rest as in `layers.block`. With params.memory the keys and values of the
    memory are projected once, for all blocks.
    """
    if not params.blocks:
        raise ValueError("stack: params must hold at least one block, got none")
    source: Array | KeyValue | None = memory
    memory_cache = None
    if params.memory is not None:
        if memory is None:
            raise ValueError("stack: memory must be given where params.memory is")
        source, memory_cache = key_value(
            memory, params.memory, memory_pos, n_kv_heads=config.kv_heads
        )
        memory_pos = None  # it is in the keys and values
    caches = []
    for i, block_params in enumerate(params.blocks):
        key = None if dropout_key is None else dropout_key.at(SITES * i)
        x, cache = block(
            x,
            block_params,
            source,
            bias,
            pos,
            memory_pos,
            config=config,
            mask=mask,
            causal=causal,
            memory_mask=memory_mask,
            dropout_key=key,
        )
        caches.append(cache)
    norm_cache = None
    if params.norm is not None:
        x, norm_cache = ops.layer_norm(x, *params.norm, eps=config.eps)
    return x, StackCache(tuple(caches), norm_cache, memory_cache)


class StackCache(NamedTuple):
    """What `stack` keeps for its backward."""

    blocks: tuple[Any, ...]
    norm: Any
    memory: Any

    def backward(self, dy: Array) -> tuple[Any, ...]:
        """Gradients of x, params, memory, bias, pos, memory_pos, in that order."""
        dnorm: Any = None
        if self.norm is not None:
            dy, *dnorm = self.norm.backward(dy)
            dnorm = LayerNormParams(*dnorm)
        dx, dblocks = dy, []
        shared: Any = None
        for cache in reversed(self.blocks):
            dx, dblock, *dshared = cache.backward(dx)
            dblocks.append(dblock)
            shared = dshared if shared is None else _add(shared, dshared)
        dmemory, dbias, dpos, dmemory_pos = shared
        dmemory_params = None
        if self.memory is not None:
            dmemory, dmemory_params, dmemory_pos = self.memory.backward(*dmemory)
        dparams = StackParams(tuple(reversed(dblocks)), dnorm, dmemory_params)
        return dx, dparams, dmemory, dbias, dpos, dmemory_pos


def dropout_streams(key: ops.Key | None, n_layers: int) -> tuple[ops.Key | None, ops.Key | None]:
    """Keys of an embedding and of the stack after it, none of whose sites meet; None for None."""
    return (None, None) if key is None else (key.at(SITES * n_layers), key)


def _add(a: Any, b: Any) -> Any:
    return tree.map(lambda x, y: x + y, a, b)
