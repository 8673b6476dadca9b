"""A block whose sublayers are cut among processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from xformer.backends import Generator
from xformer.base import tree
from xformer.distributed.collectives import enter, gather, leave, scatter
from xformer.distributed.partition import own_size
from xformer.distributed.sharded_sublayer import sharded_sublayer
from xformer.distributed.sharding import CUTS, FIRST, ONE_KEY_HEAD, Cut, cut_of
from xformer.distributed.world import World
from xformer.layers.attention_config import AttentionConfig
from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.feed_forward import FeedForwardConfig
from xformer.layers.residual import Sublayer


@dataclass(frozen=True)
class ParallelBlock(BlockConfig):
    """The configuration of a block with this process's heads and hidden units (`parallel_block`).

    sequence: x and y of the block are this process's part of each sequence, so that norms,
        residuals and what they save are cut too (sequence parallelism, arXiv:2205.05198)
    """

    world: World = dataclasses.field(kw_only=True)
    sequence: bool = dataclasses.field(default=False, kw_only=True)
    one_key_head: bool = dataclasses.field(default=False, kw_only=True)  # which all processes have

    @property
    def cuts(self) -> dict[str, Cut]:
        """How the parameters of this block are cut."""
        return ONE_KEY_HEAD | CUTS if self.one_key_head else CUTS

    def init(self, rng: Generator, **options: Any) -> BlockParams:
        """Parameters of this process's shapes. Others than process 0 have no last biases."""
        params = super().init(rng, **options)
        if self.world.rank == 0:
            return params
        leaves = tree.flatten(params)
        own = {name: None if cut_of(name) == FIRST else leaf for name, leaf in leaves.items()}
        return tree.unflatten(params, own)

    def sublayer(self, fn: Sublayer) -> Sublayer:
        """`fn`, between the collectives."""
        pair: Any = (enter, leave)
        where: Any = {"world": self.world}
        if self.sequence:
            pair, where = (gather, scatter), where | {"axis": -2}
        into, out = (partial(collective, **where) for collective in pair)
        return sharded_sublayer(into, fn, out, world=self.world, cuts=self.cuts)


def parallel_block(config: BlockConfig, world: World, *, sequence: bool = False) -> ParallelBlock:
    """The part of a block that this process has.

    ValueError, which names the option, for a block that cannot be cut.
    """
    attn = require_attention(config)
    of_block = {f.name: getattr(config, f.name) for f in dataclasses.fields(BlockConfig)}
    if world.size > 1:
        _require_cut(config, attn, world)
    units: Any = {name: own_size(n, world) for name, n in _hidden_units(config).items()}
    of_block["ffn"] = dataclasses.replace(config.ffn, **units)
    of_block["attn"] = dataclasses.replace(
        attn,
        n_heads=attn.n_heads // world.size,
        n_kv_heads=max(1, attn.kv_heads // world.size),
        d_head=attn.head_width,
        d_value=attn.value_width,
    )
    options: Any = {"sequence": sequence, "one_key_head": attn.kv_heads == 1}
    return ParallelBlock(**of_block, world=world, **options)


def require_attention(config: BlockConfig) -> AttentionConfig:
    """The block's attention. ValueError for another layer, which is not cut by heads."""
    if not isinstance(config.attn, AttentionConfig):
        raise ValueError(
            f"parallel: attn must be an AttentionConfig, got {type(config.attn).__name__}, which "
            "is not cut by heads"
        )
    return config.attn


def _hidden_units(config: BlockConfig) -> dict[str, int]:
    """The numbers of hidden units that are cut, by their names in `config.ffn`."""
    units = {"d_ff": config.ffn.d_ff, "d_shared": getattr(config.ffn, "d_shared", None)}
    return {name: n for name, n in units.items() if n is not None}


def _require_cut(config: BlockConfig, attn: AttentionConfig, world: World) -> None:
    """ValueError unless the sublayers are sums over their heads and hidden units."""
    for name, n in (("n_heads", attn.n_heads), ("n_kv_heads", attn.kv_heads)):
        if n % world.size and not (name == "n_kv_heads" and n == 1):
            raise ValueError(f"parallel: {world.size} processes must divide {name} = {n}")
    if attn.output != "linear":
        raise ValueError(
            f'parallel: attn.output must be "linear", which sums over heads, got {attn.output!r}'
        )
    if attn.qk_norm == "all":
        raise ValueError(
            'parallel: attn.qk_norm must be None or "head", got "all": a norm of all heads needs '
            "those of other processes"
        )
    for name, n in _hidden_units(config).items():
        if n < world.size:
            raise ValueError(
                f"parallel: {world.size} processes need as many hidden units, got {name} = {n}"
            )
    if isinstance(config.ffn, FeedForwardConfig) and not config.ffn.down:
        raise ValueError(
            "parallel: ffn.down must be True, got False: only a linear layer sums over hidden units"
        )


def require_no_inner_dropout(configs: Iterable[BlockConfig]) -> None:
    """ValueError if dropout within a sublayer is on: its mask depends on the index in all heads."""
    for config in configs:
        for name, rate in (
            ("attn.dropout", config.attn.dropout),
            ("ffn.dropout", getattr(config.ffn, "dropout", 0.0)),
        ):
            if rate:
                raise ValueError(
                    f"parallel: {name} must be 0, got {rate}: its mask depends on the index in "
                    "the array of all heads or hidden units"
                )
