"""The auxiliary losses of the routers of all layers together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import saved
from xformer.layers.block import BlockConfig


def router_loss(
    blocks: Sequence[BlockConfig], cache: Any, mask: Array | None, weights: tuple[float, float]
) -> tuple[Array, RouterLossCache]:
    """The weighted sum of `ops.load_balancing` and `ops.router_z_loss` of all routers.

    cache: of the stack. mask: (B, T), True = a token, not padding. weights: of the two losses.
    """
    mixed = [i for i, config in enumerate(blocks) if config.experts is not None]
    routers = [cache.blocks[i].router for i in mixed]
    xp = array_namespace(routers[0].router_logits)
    logits = xp.concat([router.router_logits for router in routers])  # (layers * N, E)
    ids = xp.concat([router.ids for router in routers])
    rows = routers[0].router_logits.shape[0]
    tiled = None if mask is None else xp.tile(xp.reshape(mask, (rows,)), (len(mixed),))
    balance, balance_cache = ops.load_balancing(logits, ids=ids, mask=tiled)
    z, z_cache = ops.router_z_loss(logits, mask=tiled)
    return weights[0] * balance + weights[1] * z, saved(
        RouterLossCache(balance_cache, z_cache, weights, tuple(mixed), len(blocks))
    )


@short
class RouterLossCache(NamedTuple):
    """Saved by the auxiliary losses of routers for backward: the cache of both losses."""

    balance: Any  # of `ops.load_balancing`
    z: Any  # of `ops.router_z_loss`
    weights: tuple[float, float]  # of both losses
    layers: tuple[int, ...]  # indices of the layers with a router
    n_layers: int

    def backward(self, dloss: Array) -> tuple[Array | None, ...]:
        """The gradient of the router's logits of each layer; None for a layer without a router."""
        balance, z = self.weights
        dlogits = balance * self.balance.backward(dloss) + z * self.z.backward(dloss)
        rows = dlogits.shape[0] // len(self.layers)
        per_layer: list[Array | None] = [None] * self.n_layers
        for n, i in enumerate(self.layers):
            per_layer[i] = dlogits[n * rows : (n + 1) * rows, :]
        return tuple(per_layer)
