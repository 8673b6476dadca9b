"""Embedding, heads and cross-entropy of a vocabulary whose parts are on different processes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from array_api_compat import device

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_gradient, require_ids, require_shape
from xformer.distributed.collectives import CollectiveCache, enter, join
from xformer.distributed.partition import bounds
from xformer.distributed.world import World
from xformer.layers.linear import LinearParams, linear
from xformer.models.heads import MaskedLMHead
from xformer.models.lm_head import LMHead
from xformer.ops._loss import loss_options, one
from xformer.ops.cross_entropy import split_ignored


def embedding(
    table: Array, *, ids: Array, vocab_size: int, world: World
) -> tuple[Array, EmbeddingCache]:
    """y = table[ids], with this process's rows of the table.

    Each row is looked up by the process that has it; for the others it is 0. The sum over all
    processes is exact, as only one addend of each number is not 0.

    table: (V_rank, D), the part of (V, D)   ids: (...) integers in [0, V)   y: (..., D)
    TypeError if ids are not integers, ValueError if one is out of range or the table is not a part.
    Derivation: docs/derivations/vocabulary.md
    """
    first, last = bounds(vocab_size, world)
    require_shape("embedding", "table", table, (last - first, table.shape[-1]))
    ids = require_ids("embedding", "ids", ids, vocab_size, table)
    xp = array_namespace(table)
    own = (ids >= first) & (ids < last)
    rows, cache = ops.embedding(table, ids=xp.where(own, ids - first, 0))
    y = world.all_reduce(xp.where(own[..., None], rows, 0.0))
    return y, EmbeddingCache(cache, own)


@short
class EmbeddingCache(NamedTuple):
    """Saved by `embedding` for backward: the lookup's cache, and which ids are this process's."""

    lookup: Any  # of `ops.embedding`
    own: Array  # (...), boolean

    def backward(self, dy: Array) -> Array:
        """dtable: dy, added to this process's rows `ids`."""
        xp = array_namespace(dy)
        dtable: Array = self.lookup.backward(xp.where(self.own[..., None], dy, 0.0))
        return dtable


def cross_entropy(
    logits: Array, *, targets: Array, vocab_size: int, world: World, **options: Any
) -> tuple[Array, CrossEntropyCache]:
    """`ops.cross_entropy` of logits whose last axis is cut among the processes.

    Three numbers for each token are summed and one is gathered; the logits stay where they are.

    logits: (..., V_rank), the part of (..., V)   targets: (...) integers in [0, V)
    loss: (), or (...) for reduction "none"; every process has it
    options: ignore_index, label_smoothing, z_loss, reduction

    Raises as `ops.cross_entropy` does. Derivation: docs/derivations/vocabulary.md
    """
    ignore_index, label_smoothing, z_loss, reduction = loss_options(**options)
    first, last = bounds(vocab_size, world)
    require_shape("cross_entropy", "logits", logits, (*targets.shape, last - first))
    xp = array_namespace(logits)
    targets, kept = split_ignored(logits, targets, ignore_index, vocab_size)
    x = logits if kept is None else xp.where(kept[..., None], logits, 0.0)
    tops = world.all_gather(xp.max(x, axis=-1, keepdims=True))
    top = xp.max(xp.concat(tops, axis=-1), axis=-1, keepdims=True)  # (..., 1), of all processes
    shifted = x - top
    own = (targets >= first) & (targets < last)
    local = xp.where(own, targets - first, 0)
    hit = xp.take_along_axis(shifted, local[..., None], axis=-1)  # (..., 1)
    addends = [xp.sum(xp.exp(shifted), axis=-1, keepdims=True), xp.where(own[..., None], hit, 0.0)]
    if label_smoothing > 0:  # else 0 times a logit of -inf would be NaN
        addends.append(xp.sum(shifted, axis=-1, keepdims=True))
    sums = world.all_reduce(xp.concat(addends, axis=-1))
    total = sums[..., :1]
    loss = xp.log(total)[..., 0]  # lse - top
    if label_smoothing < 1:
        loss = loss - (1 - label_smoothing) * sums[..., 1]
    if label_smoothing > 0:
        loss = loss - label_smoothing * sums[..., 2] / vocab_size
    if z_loss:
        loss = loss + z_loss * (xp.log(total) + top)[..., 0] ** 2
    weight = xp.ones_like(loss) if kept is None else xp.astype(kept, loss.dtype)
    loss = loss * weight
    if reduction == "mean":
        weight = weight / xp.maximum(xp.sum(weight), 1.0)
    smoothing = label_smoothing, vocab_size
    cache = CrossEntropyCache(x, local, own, top, total, weight, smoothing, z_loss, reduction)
    return (loss if reduction == "none" else xp.sum(loss * weight)), cache


@short
class CrossEntropyCache(NamedTuple):
    """Saved by `cross_entropy` for backward; probabilities are recomputed from top and total.

    Both are of the whole vocabulary, so backward needs no collective.
    """

    x: Array  # (..., V_rank), the logits; 0 for ignored tokens
    local: Array  # (...), targets as indices of x; 0 if another process has the target
    own: Array  # (...), boolean: whether this process has the target
    top: Array  # (..., 1), max of all logits
    total: Array  # (..., 1), sum of exp(x - top) over all logits
    weight: Array  # (...), 0 for ignored tokens
    smoothing: tuple[float, int]  # label_smoothing and V
    z_loss: float
    reduction: str

    def backward(self, dloss: Array | None = None) -> Array:
        """dlogits = dloss * weight * (p (1 + 2 z lse) - (1 - a) onehot(target) - a / V)."""
        dloss = one(self.x) if dloss is None else dloss
        shape = self.local.shape if self.reduction == "none" else ()
        require_gradient("cross_entropy", "dloss", dloss, self.x, shape)
        xp = array_namespace(dloss)
        label_smoothing, vocab_size = self.smoothing
        column = xp.arange(self.x.shape[-1], dtype=self.local.dtype, device=device(self.local))
        onehot = (column == self.local[..., None]) & self.own[..., None]
        lse = xp.log(self.total) + self.top
        dlogits = xp.exp(self.x - self.top) * ((1 + 2 * self.z_loss * lse) / self.total)
        dlogits = dlogits - (1 - label_smoothing) * xp.astype(onehot, dloss.dtype)
        if label_smoothing:
            dlogits = dlogits - label_smoothing / vocab_size
        return dlogits * (dloss * self.weight)[..., None]


@dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """`forward` and `loss` of a head whose vocabulary is cut: each process has a part."""

    vocab_size: int  # V, of all processes
    world: World

    def forward(self, x: Array, params: Any, table: Array, **_: Any) -> tuple[Array, ThenCache]:
        """Logits (B, T, V), on every process. x: (B, T, D)   table: (V_rank, D)."""
        logits, cache = self._own_logits(x, params, table)
        y, then = join(logits, world=self.world, axis=-1)
        return y, ThenCache(cache, then)

    def loss(
        self,
        x: Array,
        params: Any,
        table: Array,
        *,
        targets: Array,
        mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
        **options: Any,
    ) -> tuple[Array, ThenCache]:
        """The cross-entropy of targets (B, T). options: of `ops.cross_entropy`."""
        logits, cache = self._own_logits(x, params, table)
        of: Any = {"vocab_size": self.vocab_size, "world": self.world}
        loss, then = cross_entropy(logits, targets=targets, **of, **options)
        return loss, ThenCache(cache, then)

    def _own_logits(self, x: Array, params: Any, table: Array) -> tuple[Array, Any]:
        """Logits (B, T, V_rank)."""
        top = partial(_entered_linear, self.world)
        logits, cache = self._topped(top, x, params, table)  # type: ignore[attr-defined]
        return logits, cache


@dataclass(frozen=True)
class ParallelLMHead(_Vocabulary, LMHead):  # type: ignore[misc]
    """An `LMHead` whose vocabulary is cut."""

    def _own_logits(self, x: Array, params: Any, table: Array) -> tuple[Array, Any]:
        logits, cache = super()._own_logits(x, params, table)
        if self.softcap is None:
            return logits, cache
        logits, cap = ops.softcap(logits, cap=self.softcap)
        return logits, cache._replace(cap=cap)


@dataclass(frozen=True)
class ParallelMaskedLMHead(_Vocabulary, MaskedLMHead):  # type: ignore[misc]
    """A `MaskedLMHead` whose vocabulary is cut."""


def parallel_head(head: Any, vocab_size: int, world: World) -> Any:
    """The part of a head that this process has. Heads over other labels are not cut."""
    for kind, part in ((LMHead, ParallelLMHead), (MaskedLMHead, ParallelMaskedLMHead)):
        if isinstance(head, kind):
            options = {f.name: getattr(head, f.name) for f in dataclasses.fields(head)}
            return part(**options, vocab_size=vocab_size, world=world)
    return head


@short
class ThenCache(NamedTuple):
    """Saved for backward by two steps: the cache of the logits, and of what was done with them."""

    logits: Any  # its backward takes dlogits, of this process's part
    then: Any  # of `join`, or of `cross_entropy`

    def backward(self, dy: Array | None = None) -> Any:
        """Gradients, as the backward of the logits' cache returns them. dy: None: 1, of a loss."""
        return self.logits.backward(self.then.backward(dy))


def _entered_linear(world: World, x: Array, params: LinearParams) -> tuple[Array, Any]:
    x, into = enter(x, world=world)
    y, cache = linear(x, params)
    return y, EnteredCache(into, cache)


@short
class EnteredCache(NamedTuple):
    """Saved for backward by a linear layer of an array that every process has."""

    into: CollectiveCache
    linear: Any

    def backward(self, dy: Array) -> tuple[Array, LinearParams]:
        """Gradients of x, the sum over all processes, and of params."""
        dx, dparams = self.linear.backward(dy)
        return self.into.backward(dx), dparams
