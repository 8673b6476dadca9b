"""A sublayer whose heads or hidden units are on several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from xformer.base import tree
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.distributed.partition import reduced
from xformer.distributed.sharding import COPIED, CUTS, Cut, cut_of
from xformer.distributed.world import World
from xformer.layers.residual import Sublayer

Collective = Callable[[Array], tuple[Array, Any]]


def sharded_sublayer(
    enter: Collective,
    sublayer: Sublayer,
    leave: Collective,
    *,
    world: World,
    cuts: Mapping[str, Cut] = CUTS,
) -> Sublayer:
    """y = leave(sublayer(enter(x))), where each process has a part of the sublayer's parameters.

    The sublayer is `layers.attention` of some of the heads, or `layers.feed_forward` or
    `layers.mixture` of some of the hidden units, unchanged: its output is one addend of the whole
    output. The bias of its last linear layer is a part of one addend: only process 0 has it.

    enter, leave: `distributed.enter` and `leave`, or `gather` and `scatter` of the parts of each
        sequence (sequence parallelism, arXiv:2205.05198)
    cuts: which parameters every process has (`distributed.shard`)
    Source: arXiv:1909.08053, section 3. Derivation: docs/derivations/collectives.md
    """

    def run(x: Array) -> tuple[Array, BetweenCache]:
        x, into = enter(x)
        y, inner = sublayer(x)
        y, out = leave(y)
        return y, BetweenCache(into, inner, out, world, cuts)

    return run


@short
class BetweenCache(NamedTuple):
    """Saved by `sharded_sublayer` for backward: the caches of the sublayer and of both collectives.

    Other attributes, such as `kv_cache` or `router_logits`, are those of the sublayer's cache.
    """

    into: Any
    inner: Any
    out: Any
    world: World
    cuts: Mapping[str, Cut]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def backward(self, dy: Array, *dextra: Any) -> tuple[Any, ...]:
        """Gradients of x and params, and of side if the sublayer reads one.

        What every process has and uses for its own heads or units enters as x does: its gradient is
        the sum over all processes. These are some of the parameters (the norms of heads, Shaw's
        tables, a router), positions and a memory. A bias of the scores is of own heads only.

        dextra: the gradient of an auxiliary loss on the router. Every process has all of it; the
            sum must have it once.
        """
        dextra = dextra if self.world.rank == 0 else ()
        dx, dparams, *sides = self.inner.backward(self.out.backward(dy), *dextra)
        dx = self.into.backward(dx)
        leaves = tree.flatten(dparams)
        copied = {k: dp for k, dp in leaves.items() if cut_of(k, self.cuts) == COPIED}
        # A KeyValue has own heads only.
        entered = {
            name: dz
            for dside in sides
            for name, dz in dside._asdict().items()
            if name != "bias" and hasattr(dz, "shape")
        }
        sums = iter(reduced([*copied.values(), *entered.values()], self.world))
        leaves |= {name: next(sums) for name in copied}
        entered = {name: next(sums) for name in entered}
        return dx, tree.unflatten(dparams, leaves), *(dside._replace(**entered) for dside in sides)
