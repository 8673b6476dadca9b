"""A stack of blocks: an encoder, a decoder, or the body of a decoder-only model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xformer import layers, ops
from xformer.base.printing import short
from xformer.base.tree import Frozen, value
from xformer.base.typing import Array
from xformer.dispatch.backend import Generator
from xformer.dispatch.grad_callback import Ready, report
from xformer.initializers import Draw, xavier_uniform
from xformer.layers.attention import KeyValue, KeyValueParams, key_value
from xformer.layers.attention_config import AttentionConfig
from xformer.layers.block import NO_CROSS, BlockConfig, BlockParams
from xformer.layers.blocks import blocks
from xformer.layers.blocks_cache import order_of
from xformer.layers.kv_cache import KVCache
from xformer.layers.norm import NormParams, norm
from xformer.layers.protocol import SITES, Context, SideInputs, rate
from xformer.layers.validate import require_blocks
from xformer.ops.sum_to import sum_to


@short
class StackParams(NamedTuple):
    """Parameters of a stack: all blocks, a final norm, and parameters that blocks share."""

    blocks: tuple[BlockParams, ...]
    norm: NormParams | None  # the final norm that pre-LN needs
    memory: KeyValueParams | None  # the projection of the memory, shared by all blocks
    relative_bias: Array | None = None  # (N, H), the table of a relative bias, shared by all blocks

    @staticmethod
    def init(
        rng: Generator,
        configs: Sequence[BlockConfig],
        *,
        final_norm: bool | None = None,
        cross: bool = False,
        shared_memory: bool = False,
        relative_bias: layers.RelativeConfig | None = None,
        draw: Draw = xavier_uniform,
        out_scale: float = 1.0,
    ) -> StackParams:
        """Initial parameters, with a block for each of configs.

        final_norm: None: True unless the blocks are post-LN or without norms
        cross, draw, out_scale: of `BlockConfig.init`
        shared_memory: one projection of the memory for all blocks
        relative_bias: the configuration of a relative bias, or None
        """
        require_configs("stack", configs)
        options: Any = {"cross": cross, "draw": draw, "out_scale": out_scale}
        blocks = tuple(
            config.init(rng, shared_memory=shared_memory, **options) for config in configs
        )
        config = configs[0]
        last_norm = None
        if config.final_norm if final_norm is None else final_norm:
            last_norm = config.norm.init(rng, config.d_model)
        shared = None
        if shared_memory:
            if not isinstance(config.attn, AttentionConfig):
                raise ValueError(NO_CROSS)
            shared = config.attn.key_value_init(rng, config.norm, draw=draw)
        table = None if relative_bias is None else relative_bias.init(rng, draw=draw)
        return StackParams(blocks, last_norm, shared, table)


def stack(
    x: Array,
    params: StackParams,
    side: SideInputs = SideInputs(),
    *,
    configs: Sequence[BlockConfig],
    context: Context = Context(),
    relative_bias: layers.RelativeConfig | None = None,
    n_cached: int | Array = 0,
    dropout_rate: float = 0.0,
    activation_checkpointing: bool = False,
) -> tuple[Array, StackCache]:
    """y = dropout(norm(block_n(... block_1(x)))). Every block gets side and context.

    x, y: (B, T, D), or one sequence (T, D)
    params: of each block; with fewer blocks than layers, equal runs of layers share a block
        (ALBERT, arXiv:1909.11942). With params.memory, the memory is projected to keys and values
        once for all blocks. Without params.norm there is no final norm.
    side.memory: (B, S, D) or (S, D); for decoding, keys and values for each layer (`memory_of`);
        None without cross-attention
    configs: one for each layer
    context: of `layers.blocks`. With a KV cache the result's cache has the new ones.
    relative_bias: the configuration of params.relative_bias; the relative bias is added to bias
    n_cached: the number of tokens before x, including those that windows have dropped; for a static
        KV cache an integer array (). It is used only with relative_bias.
    dropout_rate: of y
    activation_checkpointing: each block saves only its arguments, and runs again in backward; the
        gradients are the same
    ValueError for shapes and numbers that do not fit.
    """
    require_configs("stack", configs)
    bias_shape = None if side.bias is None else tuple(side.bias.shape)
    memory_cache = relative_bias_cache = None
    if isinstance(side.memory, Sequence):
        params = _without_memory(params)
    elif params.memory is not None:
        if side.memory is None:
            raise ValueError("stack: params.memory needs a memory, got None")
        heads = _memory_heads(configs[0])
        memory, memory_cache = key_value(side.memory, params.memory, side.memory_pos, **heads)
        side = side._replace(memory=memory, memory_pos=None)  # the keys and values include it
    if (params.relative_bias is None) != (relative_bias is None):
        raise ValueError(
            "stack: params.relative_bias and relative_bias need each other, got only one"
        )
    if relative_bias is not None:
        sizes = _sizes(x.shape[-2], context.kv_cache, n_cached)
        table = value(params.relative_bias)
        bias, relative_bias_cache = layers.relative_bias(table, config=relative_bias, **sizes)
        side = side._replace(bias=bias if side.bias is None else side.bias + bias)
    x, blocks_cache = blocks(
        x,
        params.blocks,
        side,
        configs=configs,
        context=context,
        activation_checkpointing=activation_checkpointing,
    )
    norm_cache = None
    if params.norm is not None:
        x, norm_cache = norm(x, params.norm, config=configs[-1].norm)
    key = context.dropout_key and context.dropout_key.at(SITES * len(configs) + 1)
    y, drop = ops.dropout(x, rate=rate(dropout_rate, context), key=key)
    frozen = isinstance(params.relative_bias, Frozen)
    return y, StackCache(
        blocks_cache, norm_cache, memory_cache, drop, relative_bias_cache, bias_shape, frozen
    )


@short
class StackCache(NamedTuple):
    """Saved by `stack` for backward: the caches of the layers and of the steps around them."""

    layers: Any  # of `layers.blocks`
    norm: Any  # of the final norm; None: no final norm
    memory: Any  # of `key_value` for all layers; None: there is no shared projection
    drop: Any  # of `ops.dropout`
    relative_bias: Any  # of `layers.relative_bias`; None: no relative bias
    bias_shape: tuple[int, ...] | None  # of the argument bias
    frozen_relative_bias: bool

    @property
    def blocks(self) -> tuple[Any, ...]:
        """The cache of each layer. AttributeError if threads ran parts of the batch."""
        caches: tuple[Any, ...] = self.layers.blocks
        return caches

    def backward(
        self,
        dy: Array,
        drouter_logits: Sequence[Any] | None = None,
        *,
        ready: Ready | None = None,
    ) -> tuple[Array, StackParams, SideInputs]:
        """Gradients of x, params and side.

        drouter_logits: for each layer, the gradient of an auxiliary loss on its router, or None.
        ready: called with the name and the gradients of each part of params ("norm", "blocks.0",
            "memory", "relative_bias"), as soon as nothing is added to them any more
        """
        dnorm = None
        dy = self.drop.backward(dy)
        if self.norm is not None:
            dy, dnorm = self.norm.backward(dy)
            report(ready, "norm", dnorm)
        dx, dblocks, dside = self.layers.backward(dy, drouter_logits, ready=ready)
        dmemory_params = drelative_bias = None
        if self.memory is not None:
            dmemory, dmemory_params, dmemory_pos = self.memory.backward(*dside.memory)
            dside = dside._replace(memory=dmemory, memory_pos=dmemory_pos)
            report(ready, "memory", dmemory_params)
        if self.relative_bias is not None and not self.frozen_relative_bias:
            drelative_bias = self.relative_bias.backward(
                sum_to(dside.bias, shape=(1, *dside.bias.shape[-3:]))
            )
            report(ready, "relative_bias", drelative_bias)
        dbias = None if self.bias_shape is None else sum_to(dside.bias, shape=self.bias_shape)
        dparams = StackParams(dblocks, dnorm, dmemory_params, drelative_bias)
        return dx, dparams, dside._replace(bias=dbias)


def memory_of(
    params: StackParams,
    memory: Array,
    memory_pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
) -> tuple[KeyValue, ...]:
    """Keys and values of the memory for each layer, which all decoding steps of `stack` share.

    params: of the decoder's stack, with cross-attention. With params.memory, all layers share one
        projection.
    memory: (B, S, D), the output of the encoder
    memory_pos: (S, K), added to the keys and values; None: nothing is added
    configs: one for each layer
    ValueError for shapes and numbers that do not fit.
    """
    if params.memory is not None:
        shared, _ = key_value(memory, params.memory, memory_pos, **_memory_heads(configs[0]))
        return (shared,) * len(configs)

    def of_layer(cross: Any, config: BlockConfig) -> KeyValue:
        return key_value(memory, cross.kv, memory_pos, **_memory_heads(config))[0]

    require_configs("stack", configs)
    order = order_of(params.blocks, configs)
    return tuple(of_layer(params.blocks[order[i]].cross, c) for i, c in enumerate(configs))


def _sizes(
    n_queries: int, kv_cache: Sequence[KVCache] | None, n_cached: int | Array
) -> dict[str, Any]:
    """The arguments of `relative_bias`: the numbers of queries and keys, and the first query."""
    if kv_cache and kv_cache[0].write_index is not None:
        return {"n_queries": n_queries, "n_keys": kv_cache[0].length, "at": n_cached}
    return {"n_queries": n_queries, "n_keys": n_cached + n_queries}


def _memory_heads(config: BlockConfig) -> dict[str, Any]:
    """The options of `key_value` for the memory."""
    return {"n_kv_heads": config.attn.kv_heads, "k_norm": config.norm}


def _without_memory(params: StackParams) -> StackParams:
    """`params` without projections of the memory, for a memory of keys and values."""
    ready = (
        p if p.cross is None else p._replace(cross=p.cross._replace(kv=None)) for p in params.blocks
    )
    return params._replace(blocks=tuple(ready), memory=None)


def dropout_streams(
    key: ops.RandomKey | None, n_layers: int
) -> tuple[ops.RandomKey | None, ops.RandomKey | None]:
    """Dropout keys of an embedding and of the stack after it, with distinct streams, or None."""
    return (None, None) if key is None else (key.at(SITES * n_layers), key)


def require_configs(op: str, configs: Sequence[BlockConfig]) -> None:
    """ValueError unless there is a config, and all agree on what concerns the whole stack."""
    if not configs:
        raise ValueError(f"{op}: configs must hold at least one BlockConfig, got none")
    for name in ("d_model", "norm_placement", "reversible"):
        if len(values := sorted({getattr(config, name) for config in configs})) > 1:
            raise ValueError(f"{op}: all configs must have one {name}, got {values}")


def require_stack(
    op: str,
    name: str,
    params: StackParams,
    configs: Sequence[BlockConfig],
    final_norm: bool | None,
    n: int,
    *,
    cross: bool = False,
    shared_memory: bool = False,
) -> None:
    """ValueError unless params have the parts and shapes that `StackParams.init` would give.

    name: names params in the message
    n: the number of blocks; each is for an equal run of configs
    """
    wants = configs[0].final_norm if final_norm is None else final_norm
    for what, got, wanted in (
        ("blocks", len(params.blocks), n),
        ("a final norm", params.norm is not None, wants),
    ):
        if got != wanted:
            raise ValueError(f"{op}: params must have {what}: {wanted} by config, got {got}")
    options: Any = {"cross": cross, "shared_memory": shared_memory}
    require_blocks(op, f"{name}.blocks", params.blocks, configs, **options)
