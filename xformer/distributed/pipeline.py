"""Pipelines: each process has some of the layers, and passes micro-batches on to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xformer import backends
from xformer.base import tree
from xformer.base.choices import require_one_of
from xformer.base.namespace import array_namespace
from xformer.base.pairwise_sum import PairwiseSum
from xformer.base.typing import Array
from xformer.dispatch.checks import require_sizes
from xformer.distributed.partition import bounds
from xformer.distributed.world import World
from xformer.layers.embed import EmbedParams
from xformer.models.language_model import LanguageModel, LanguageModelParams
from xformer.models.loss import LossCache

KINDS = ("1f1b", "gpipe")
Task = tuple[str, int]  # ("F", i) or ("B", i): forward or backward of micro-batch i


def schedule(kind: str, n_batches: int, *, stage: int, n_stages: int) -> list[Task]:
    """What a stage does, in order: ("F", i) and ("B", i), forward and backward of micro-batch i.

    "gpipe": all forwards, then all backwards (arXiv:1811.06965). All caches are in memory at once.
    "1f1b": a backward as soon as there is one (arXiv:2006.09503, section 3). At most
        n_stages - stage caches are in memory.

    With both, a stage is idle in (n_stages - 1) / (n_batches + n_stages - 1) of the time.

    ValueError for another kind, a size below 1, and a stage outside [0, n_stages).
    """
    require_one_of("schedule: kind", kind, KINDS)
    require_sizes("schedule", 1, n_batches=n_batches, n_stages=n_stages)
    if not 0 <= stage < n_stages:
        raise ValueError(f"schedule: stage must be in [0, {n_stages}), got {stage}")
    ahead = n_batches if kind == "gpipe" else min(n_stages - 1 - stage, n_batches)
    tasks = [("F", i) for i in range(ahead)]
    for i in range(n_batches - ahead):
        tasks += [("F", ahead + i), ("B", i)]
    return tasks + [("B", i) for i in range(n_batches - ahead, n_batches)]


@dataclass(frozen=True)
class Pipeline:
    """The stage of a LanguageModel that this process has: some of its layers (`pipeline`).

    Stage 0 also has the embedding, the last one the final norm and the head. Both have the table of
    a tied head.
    """

    model: LanguageModel
    world: World

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.world.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head."""
        return self.world.rank == self.world.size - 1

    @cached_property
    def stage(self) -> LanguageModel:
        """This stage, from tokens or hidden states to hidden states."""
        return self.model.with_layers(
            range(*bounds(len(self.model.blocks), self.world)),
            embed=self.model.embed if self.is_first else None,
            final_norm=self.model.final_norm if self.is_last else False,
            head=None,
        )

    def shard(self, params: LanguageModelParams) -> LanguageModelParams:
        """The parameters of this stage, of those of the whole model. Other leaves are None."""
        first, last = bounds(len(self.model.blocks), self.world)
        stack = params.stack._replace(
            blocks=params.stack.blocks[first:last], norm=params.stack.norm if self.is_last else None
        )
        embed = params.embed if self.is_first else None
        if self.is_last and not self.is_first and self._is_tied:
            embed = _table_only(params.embed.table)  # type: ignore[union-attr]
        return LanguageModelParams(embed, stack, params.head if self.is_last else None)

    def whole(self, params: LanguageModelParams) -> LanguageModelParams:
        """The inverse of `shard`. All processes must call it, and all get the result."""
        stages: list[LanguageModelParams] = self.world.gather(params)
        blocks = tuple(block for stage in stages for block in stage.stack.blocks)
        stack = stages[-1].stack._replace(blocks=blocks)
        return LanguageModelParams(stages[0].embed, stack, stages[-1].head)

    def gradients(
        self,
        params: LanguageModelParams,
        batches: Sequence[tuple[Array, Array]],
        *,
        kind: str = "1f1b",
        shares: Sequence[float] | None = None,
        **options: Any,
    ) -> tuple[Array, LanguageModelParams]:
        """The loss of all micro-batches, on every process, and the gradients of this stage.

        params: of `shard`
        batches: (tokens, targets) of each micro-batch, (B, T) integers in [0, V)
        kind: of `schedule`
        shares: the weight of each micro-batch; None: all the same
        options: of `ops.cross_entropy`

        Gradients are added pairwise over micro-batches (`PairwiseSum`), so that they have the bits
        of the whole model's, but for the table of a tied head, whose two gradients are added last.
        """
        n = len(batches)
        tasks = schedule(kind, n, stage=self.world.rank, n_stages=self.world.size)
        shares = [1 / n] * n if shares is None else shares
        if len(shares) != n:
            raise ValueError(f"pipeline: shares must be {n}, one a micro-batch, got {len(shares)}")
        total = PairwiseSum(lambda a, b: tree.map(lambda x, y: x + y, a, b))
        loss = PairwiseSum(lambda a, b: a + b)
        kept: dict[int, Any] = {}  # the caches of micro-batches between their forward and backward
        for what, i in tasks:
            if what == "F":
                kept[i], value = self._forward(params, batches[i], options)
                if value is not None:
                    loss.add(value * shares[i])
            else:
                total.add(self._backward(kept.pop(i), shares[i]))
        grads: LanguageModelParams = total.total()
        value = loss.total() if self.is_last else None
        if self._is_tied and self.world.size > 1:
            grads = self._tied(grads)
        value = self.world.broadcast(value, root=self.world.size - 1)
        return value, grads

    def _forward(
        self, params: LanguageModelParams, batch: tuple[Array, Array], options: dict[str, Any]
    ) -> tuple[tuple[Any, Any], Array | None]:
        """The caches of a micro-batch, and its loss on the last stage."""
        tokens, targets = batch
        rank = self.world.rank
        x = tokens if self.is_first else self._received(rank - 1, params)
        own = params._replace(embed=params.embed if self.is_first else None, head=None)
        x, cache = self.stage.hidden(own, x)
        if not self.is_last:
            self.world.send(x, rank + 1)
            return (cache, params), None
        head: Any = self.model.head
        table = None if params.embed is None else params.embed.table
        value, top = head.loss(x, params.head, table=table, targets=targets, **options)
        return (cache, LossCache(top, value)), value

    def _backward(self, caches: tuple[Any, Any], share: float) -> LanguageModelParams:
        """The gradients of a micro-batch.

        caches: of the stage, and of the loss; on other stages than the last, params instead
        """
        cache, above = caches
        dhead = dtable = None
        if self.is_last:
            dloss = array_namespace(above.value).full_like(above.value, share)
            dx, dhead, dtable = above.backward(dloss)
        else:
            dx = self._received(self.world.rank + 1, above)
        grads, dx = cache.backward_all(dx)
        if not self.is_first:
            self.world.send(dx, self.world.rank - 1)
        embed = grads.embed
        if dtable is not None:
            embed = _table_only(dtable) if embed is None else _plus(embed, dtable)
        return LanguageModelParams(embed, grads.stack, dhead)

    def _received(self, source: int, like: LanguageModelParams) -> Array:
        """The next array of another stage, in the library of the parameters."""
        leaf = tree.value(next(iter(tree.flatten(like).values())))
        return backends.backend_of(leaf).asarray(self.world.receive(source))

    @property
    def _is_tied(self) -> bool:
        return bool(getattr(self.model.head, "tied", False))

    def _tied(self, grads: LanguageModelParams) -> LanguageModelParams:
        """`grads` with the sum of both gradients of the table, on the first and the last stage."""
        other = {0: self.world.size - 1, self.world.size - 1: 0}.get(self.world.rank)
        if other is None or grads.embed is None or grads.embed.table is None:  # or it is frozen
            return grads
        self.world.send(grads.embed.table, other)
        return grads._replace(embed=_plus(grads.embed, self._received(other, grads)))


def pipeline(model: Any, world: World) -> Pipeline:
    """The stage of a model that this process has, and a training step of all stages.

        part = distributed.pipeline(model, world)
        params = part.shard(params)
        loss, grads = part.gradients(params, batches)

    model: a LanguageModel, with a head that gives a loss

    ValueError, which names the option, for what layers of several stages have in common: shared
    parameters, a relative bias, positions for queries and keys, reversible streams, losses of
    routers; and for fewer layers than processes. There is no dropout.
    """
    if not isinstance(model, LanguageModel):
        raise TypeError(f"pipeline: model must be a LanguageModel, got {type(model).__name__}")
    if not hasattr(model.head, "loss"):
        got = type(model.head).__name__
        raise ValueError(f"pipeline: a loss needs a head that gives logits, got {got}")
    if model.embed is None:
        raise ValueError("pipeline: the model must have an embedding, got None")
    if len(model.blocks) < world.size:
        raise ValueError(
            f"pipeline: {world.size} processes need as many layers, got {len(model.blocks)}"
        )
    in_common = {
        "n_shared_layer_groups": model.n_shared_layer_groups is not None,
        "relative_bias": model.relative_bias is not None,
        'embed.mode "qkv"': model.embed.mode == "qkv" and model.embed.positions != "none",
        "reversible": model.blocks[0].reversible,
        "load_balancing_weight": model.load_balancing_weight != 0,
        "router_z_weight": model.router_z_weight != 0,
    }
    if world.size > 1 and (present := [name for name, there in in_common.items() if there]):
        raise ValueError(
            f"pipeline: layers on several processes exclude {', '.join(present)}, which they share"
        )
    return Pipeline(model, world)


def _table_only(table: Array) -> EmbedParams:
    return EmbedParams(table, None, None)


def _plus(embed: EmbedParams, dtable: Array) -> EmbedParams:
    return embed._replace(table=embed.table + dtable)
