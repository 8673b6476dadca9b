"""Several processes: `world`, tensor and sequence parallelism, and a pipeline."""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.distributed.blocks import ParallelBlock, parallel_block
    from xformer.distributed.collectives import enter, exchange, gather, join, leave, part, scatter
    from xformer.distributed.models import tensor_parallel
    from xformer.distributed.pipeline import Pipeline, pipeline, schedule
    from xformer.distributed.sharded_sublayer import sharded_sublayer
    from xformer.distributed.sharding import CUTS, ONE_KEY_HEAD, cut_of, shard, whole
    from xformer.distributed.vocabulary import cross_entropy, embedding

__all__ = [
    "CUTS",
    "ONE_KEY_HEAD",
    "ParallelBlock",
    "Pipeline",
    "cross_entropy",
    "cut_of",
    "embedding",
    "enter",
    "exchange",
    "gather",
    "join",
    "leave",
    "parallel_block",
    "part",
    "pipeline",
    "scatter",
    "schedule",
    "shard",
    "sharded_sublayer",
    "tensor_parallel",
    "whole",
]

later(
    __name__,
    blocks="ParallelBlock parallel_block",
    collectives="enter exchange gather join leave part scatter",
    models="tensor_parallel",
    launcher="",
    partition="",
    pipeline="Pipeline pipeline schedule",
    sharded_sublayer="sharded_sublayer",
    sharding="CUTS ONE_KEY_HEAD cut_of shard whole",
    vocabulary="cross_entropy embedding",
    world="world",
)
