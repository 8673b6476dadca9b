"""Heads over a vocabulary whose parts are on different processes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from xformer import ops
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.distributed.collectives import EnterCache, enter, join
from xformer.distributed.vocabulary import cross_entropy
from xformer.distributed.world import World
from xformer.layers.linear import LinearParams, linear
from xformer.models.heads import MaskedLMHead
from xformer.models.lm_head import LMHead


class _Vocabulary:
    """`forward` and `loss` of a head of which each process has a part of the vocabulary."""

    vocab_size: int
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
    """An `LMHead` of which each process has a part of the vocabulary."""

    vocab_size: int = dataclasses.field(kw_only=True)  # V, of all processes
    world: World = dataclasses.field(kw_only=True)

    def _own_logits(self, x: Array, params: Any, table: Array) -> tuple[Array, Any]:
        logits, cache = super()._own_logits(x, params, table)
        if self.softcap is None:
            return logits, cache
        logits, cap = ops.softcap(logits, cap=self.softcap)
        return logits, cache._replace(cap=cap)


@dataclass(frozen=True)
class ParallelMaskedLMHead(_Vocabulary, MaskedLMHead):  # type: ignore[misc]
    """A `MaskedLMHead` of which each process has a part of the vocabulary."""

    vocab_size: int = dataclasses.field(kw_only=True)  # V, of all processes
    world: World = dataclasses.field(kw_only=True)


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

    into: EnterCache
    linear: Any

    def backward(self, dy: Array) -> tuple[Array, LinearParams]:
        """Gradients of x, the sum over all processes, and of params."""
        dx, dparams = self.linear.backward(dy)
        return self.into.backward(dx), dparams
