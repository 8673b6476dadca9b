"""`blocks`: each thread takes its share of the batch through all layers.

Threads wait for each other once forward and once backward, not in every op, and while one waits for
memory another computes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numpy.threads import n_threads
from xformer.backends.numpy.threads import run as on_threads

from xformer import ops, tree
from xformer.checks import require_shape
from xformer.dispatch import keeps_nothing, kernel
from xformer.layers.attention import KeyValue
from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.blocks import BlocksCache, add
from xformer.layers.blocks import blocks as reference
from xformer.layers.past import Past
from xformer.layers.rotary import Rotary
from xformer.typing import Array

ROWS = 512  # tokens of a share, for each other one: the gradients of all shares must be added
UNEVEN = 9 / 8  # the largest share over the mean, at most


def unshared(
    x: Array,
    params: tuple[BlockParams, ...],
    memory: Array | KeyValue | Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    rotary: Rotary | None = None,
    past: Sequence[Past] | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.Key | None = None,
    checkpoint: bool = False,
) -> str | None:
    """Why the kernel cannot run."""
    if past is not None:
        return "a text that grows"
    if x.ndim != 3 or any(len(a) != len(x) for a in tree.flatten((memory,)).values()):
        return "x or memory is no batch of sequences"
    if any(config.experts is not None for config in configs):
        return "experts, whose router sees the whole batch"
    if dropout_key is not None and any(
        config.dropout or config.probs_dropout or config.hidden_dropout for config in configs
    ):
        return "dropout, whose mask goes by the place in the whole batch"
    n, size = n_threads(), -(-len(x) // n_threads())
    if n == 1:
        return "one thread"
    if size * n > UNEVEN * len(x):
        return f"{len(x)} sequences do not part evenly among {n} threads"
    if size * x.shape[1] < ROWS * (1 if keeps_nothing() else n - 1):
        return f"{size} sequences of {x.shape[1]} tokens are too little for a thread"
    return None


@kernel(reference, "numpy", unsupported=unshared)
def blocks(
    x: Array,
    params: tuple[BlockParams, ...],
    memory: Array | KeyValue | Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    rotary: Rotary | None = None,
    past: Sequence[Past] | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.Key | None = None,
    checkpoint: bool = False,
) -> tuple[Array, SharesCache | BlocksCache]:
    """Shares of x, of memory, and of what else each sequence has its own of."""
    run: Any = partial(reference.reference, configs=configs, causal=causal, checkpoint=checkpoint)
    n, y = len(x), np.empty(x.shape, x.dtype)
    shares = _shares(n)
    caches: list[Any] = [None] * len(shares)

    def forward(i: int) -> None:
        own = partial(_own, shares[i], n)
        options: Any = {"mask": own(mask, 4), "memory_mask": own(memory_mask, 4)}
        if rotary is not None:
            tables = own(rotary.cos, 3), own(rotary.sin, 3)
            options["rotary"] = Rotary(*tables, rotary.interleaved)
        its = tree.map(lambda a: a[shares[i]], memory)
        y[shares[i]], caches[i] = run(
            x[shares[i]], params, its, own(bias, 4), pos, memory_pos, **options
        )

    try:
        on_threads([partial(forward, i) for i in range(len(shares))])
    except (TypeError, ValueError):  # which names shapes of a share
        options: Any = {"rotary": rotary, "mask": mask, "memory_mask": memory_mask}
        return run(x, params, memory, bias, pos, memory_pos, **options)
    return y, SharesCache(tuple(shares), tuple(caches), y.shape, _is_own(bias, 4, n))


class SharesCache(NamedTuple):
    """What `blocks` keeps for its backward."""

    shares: tuple[slice, ...]  # of the batch
    caches: tuple[BlocksCache, ...]  # of each share
    shape: tuple[int, ...]
    own_bias: bool  # whether each sequence has its own

    def backward(self, dy: Array, drouter_logits: None = None) -> tuple[Any, ...]:
        """Gradients of x, params, memory, bias, pos, memory_pos; there are no routers.

        Those of a layer's parameters are added when the last share has them, and not kept.
        """
        require_shape("blocks", "dy", dy, self.shape)
        order = self.caches[0].order
        totals = [_Total() for _ in order]
        dx = np.empty(self.shape, dy.dtype)
        rest: list[Any] = [None] * len(self.shares)

        def backward(i: int) -> None:
            layers = zip(self.caches[i].blocks, totals, strict=True)
            cache = self.caches[i]._replace(blocks=tuple(_Layer(*pair, i) for pair in layers))
            dx[self.shares[i]], _, *rest[i] = cache.backward(dy[self.shares[i]])

        on_threads([partial(backward, i) for i in range(len(self.shares))])
        dparams: list[Any] = [None] * (max(order) + 1)
        for which, total in zip(order, totals, strict=True):
            more = total.value
            dparams[which] = more if dparams[which] is None else add(dparams[which], more)
        dmemory, dbias, *dpositions = zip(*rest, strict=True)
        return (
            dx,
            tuple(dparams),
            tree.map(_together, *dmemory),
            tree.map(_together if self.own_bias else _sum, *dbias),
            *(tree.map(_sum, *dpos) for dpos in dpositions),
        )


class _Total:
    """The sum of a layer's gradients, in the order of the shares, whichever is ready first."""

    def __init__(self) -> None:
        self.value: Any = None
        self._lock, self._next, self._early = threading.Lock(), 0, dict[int, Any]()

    def add(self, share: int, dparams: Any) -> None:
        with self._lock:
            self._early[share] = dparams
            while self._next in self._early:
                more = self._early.pop(self._next)
                self.value = more if self._next == 0 else add(self.value, more)
                self._next += 1


class _Layer(NamedTuple):
    """The cache of one layer and share, which hands on the gradients of the parameters."""

    cache: Any
    total: _Total
    share: int

    def backward(self, dy: Array) -> tuple[Any, ...]:
        """As `BlockCache.backward`, None in the place of dparams."""
        dx, dparams, *rest = self.cache.backward(dy)
        self.total.add(self.share, dparams)
        return dx, None, *rest


def _shares(n: int) -> list[slice]:
    size = -(-n // n_threads())
    return [slice(start, start + size) for start in range(0, n, size)]


def _is_own(a: Array | None, ndim: int, n: int) -> bool:
    """Whether each of n sequences has its own, in an array of ndim dimensions."""
    return a is not None and a.ndim == ndim and a.shape[0] == n


def _own(share: slice, n: int, a: Array | None, ndim: int) -> Array | None:
    return a[share] if a is not None and _is_own(a, ndim, n) else a


def _together(*shares: Array) -> Array:
    return np.concatenate(shares)


def _sum(*shares: Array) -> Array:
    return sum(shares[1:], start=shares[0])
