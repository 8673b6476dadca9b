"""Several processes: `world`, tensor and sequence parallelism, and a pipeline."""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.distributed.blocks import ParallelBlock as ParallelBlock
    from xformer.distributed.blocks import parallel_block as parallel_block
    from xformer.distributed.collectives import enter as enter
    from xformer.distributed.collectives import exchange as exchange
    from xformer.distributed.collectives import gather as gather
    from xformer.distributed.collectives import join as join
    from xformer.distributed.collectives import leave as leave
    from xformer.distributed.collectives import part as part
    from xformer.distributed.collectives import scatter as scatter
    from xformer.distributed.pipeline import Pipeline as Pipeline
    from xformer.distributed.pipeline import pipeline as pipeline
    from xformer.distributed.pipeline import schedule as schedule
    from xformer.distributed.sharded_models import tensor_parallel as tensor_parallel
    from xformer.distributed.sharded_sublayer import sharded_sublayer as sharded_sublayer
    from xformer.distributed.sharded_vocabulary import cross_entropy as cross_entropy
    from xformer.distributed.sharded_vocabulary import embedding as embedding
    from xformer.distributed.sharding import CUTS as CUTS
    from xformer.distributed.sharding import ONE_KEY_HEAD as ONE_KEY_HEAD
    from xformer.distributed.sharding import cut_of as cut_of
    from xformer.distributed.sharding import shard as shard
    from xformer.distributed.sharding import whole as whole

later(__name__, "launcher", "partition", "world")
