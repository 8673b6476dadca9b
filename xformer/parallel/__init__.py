"""Models cut among processes: tensor and sequence parallelism, and a pipeline."""

from typing import TYPE_CHECKING

from xformer.later import later

if TYPE_CHECKING:
    from xformer.parallel.between import between
    from xformer.parallel.blocks import ParallelBlock, parallel_block
    from xformer.parallel.collectives import enter, exchange, gather, join, leave, part, scatter
    from xformer.parallel.models import tensor_parallel
    from xformer.parallel.pipeline import Pipeline, pipeline, schedule
    from xformer.parallel.sharding import CUTS, ONE_KEY_HEAD, cut_of, shard, whole
    from xformer.parallel.vocabulary import cross_entropy, embedding

__all__ = [
    "CUTS",
    "ONE_KEY_HEAD",
    "ParallelBlock",
    "Pipeline",
    "between",
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
    "tensor_parallel",
    "whole",
]

later(
    __name__,
    between="between",
    blocks="ParallelBlock parallel_block",
    collectives="enter exchange gather join leave part scatter",
    models="tensor_parallel",
    pipeline="Pipeline pipeline schedule",
    sharding="CUTS ONE_KEY_HEAD cut_of shard whole",
    vocabulary="cross_entropy embedding",
)
