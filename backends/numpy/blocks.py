"""`blocks`: each thread takes its share of the batch through all layers.

Threads wait for each other once forward and once backward, not in every op, and while one waits for
memory another computes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np

from xformer import layers, ops, tree
from xformer.backends.numpy.threads import n_threads
from xformer.backends.numpy.threads import run as on_threads
from xformer.checks import require_shape
from xformer.dispatch import is_inference, kernel
from xformer.layers.attention import KeyValue
from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.blocks import BlocksCache, add
from xformer.layers.blocks import blocks as reference
from xformer.layers.kv_cache import KVCache
from xformer.showing import short
from xformer.typing import Array

ROWS = 128  # tokens of a share, for each other one: the gradients of all shares must be added
UNEVEN = 9 / 8  # the largest share over the mean, at most


def unsupported(
    x: Array,
    params: tuple[BlockParams, ...],
    memory: Array | KeyValue | Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    rotary: layers.RopeTables | None = None,
    kv_cache: Sequence[KVCache] | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.RandomKey | None = None,
    activation_checkpointing: bool = False,
) -> str | None:
    """Why the kernel cannot run."""
    if kv_cache is not None:
        return "a text that grows"
    is_batch, kept = _is_array(x) and x.ndim == 3, tree.flatten((memory,)).values()
    if not is_batch or not all(_is_array(a) and a.shape[:1] == x.shape[:1] for a in kept):
        return "x or memory is no batch of sequences"
    n = len(x)
    fits = [_fits(a, 4, 1, n) for a in (bias, mask, memory_mask) if a is not None]
    if rotary is not None:
        fits += _fits(rotary.cos, 3, n), _fits(rotary.sin, 3, n)
    if not all(fits):
        return f"bias, masks or rotary are neither one for all {n} sequences nor one for each"
    if any(config.experts is not None for config in configs):
        return "experts, whose router sees the whole batch"
    if dropout_key is not None and any(
        config.dropout or config.attn.dropout or getattr(config.ffn, "dropout", 0.0)
        for config in configs
    ):
        return "dropout, whose mask goes by the place in the whole batch"
    return unparted(n, x.shape[1])


def unparted(n: int, length: int) -> str | None:
    """Why n sequences of this length are no shares of a batch."""
    threads = n_threads()
    size = -(-n // threads)
    if threads == 1:
        return "one thread"
    if size * threads > UNEVEN * n:
        return f"{n} sequences do not part evenly among {threads} threads"
    if size * length < ROWS * (1 if is_inference() else threads - 1):
        return f"{size} sequences of {length} tokens are too little for a thread"
    return None


@kernel(reference, "numpy", unsupported=unsupported)
def blocks(
    x: Array,
    params: tuple[BlockParams, ...],
    memory: Array | KeyValue | Sequence[KeyValue] | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    configs: Sequence[BlockConfig],
    rotary: layers.RopeTables | None = None,
    kv_cache: Sequence[KVCache] | None = None,
    mask: Array | None = None,
    causal: bool = False,
    memory_mask: Array | None = None,
    dropout_key: ops.RandomKey | None = None,
    activation_checkpointing: bool = False,
) -> tuple[Array, SharesCache | BlocksCache]:
    """Shares of x, of memory, and of what else each sequence has its own of."""
    how: Any = {
        "configs": configs,
        "causal": causal,
        "activation_checkpointing": activation_checkpointing,
    }
    n, y = len(x), np.empty(x.shape, x.dtype)
    shares = _shares(n)
    caches: list[Any] = [None] * len(shares)

    def forward(i: int) -> None:
        own = partial(_own, shares[i], n)
        options: Any = {"mask": own(mask, 4), "memory_mask": own(memory_mask, 4)}
        if rotary is not None:
            tables = own(rotary.cos, 3), own(rotary.sin, 3)
            options["rotary"] = layers.RopeTables(*tables, rotary.interleaved)
        its = tree.map(lambda a: a[shares[i]], memory)
        given: Any = x[shares[i]], params, its, own(bias, 4), pos, memory_pos
        run: Any = reference.reference
        y[shares[i]], caches[i] = run(*given, **how, **options)

    with suppress(TypeError, ValueError):  # which name shapes of a share
        on_threads([partial(forward, i) for i in range(len(shares))])
        return y, SharesCache(tuple(shares), tuple(caches), y.shape, _is_own(bias, 4, n))
    options: Any = {"rotary": rotary, "mask": mask, "memory_mask": memory_mask}
    return reference.reference(x, params, memory, bias, pos, memory_pos, **how, **options)


@short
class SharesCache(NamedTuple):
    """Saved by `blocks` for backward."""

    shares: tuple[slice, ...]  # of the batch
    caches: tuple[BlocksCache, ...]  # of each share
    shape: tuple[int, ...]
    own_bias: bool  # whether each sequence has its own

    @property
    def blocks(self) -> NoReturn:
        """AttributeError, where `BlocksCache` has the cache of each layer."""
        without_layers()

    def backward(self, dy: Array, drouter_logits: Sequence[None] | None = None) -> tuple[Any, ...]:
        """Gradients of x, params, memory, bias, pos, memory_pos; there are no routers.

        Those of a layer's parameters are added when the last share has them, and not kept.
        """
        require_shape("blocks", "dy", dy, self.shape)
        require_no_routers(drouter_logits)
        order, n = self.caches[0].order, len(self.shares)
        turns = [n * order[i + 1 :].count(which) for i, which in enumerate(order)]
        totals = [_Total() for _ in range(max(order) + 1)]
        dx = np.empty(self.shape, dy.dtype)
        rest: list[Any] = [None] * len(self.shares)

        def backward(i: int) -> None:
            own = self.caches[i]
            places = zip(own.blocks, order, turns, strict=True)
            own_layers = (_Layer(cache, totals[which], turn + i) for cache, which, turn in places)
            cache = own._replace(blocks=tuple(own_layers))
            dx[self.shares[i]], _, *rest[i] = cache.backward(dy[self.shares[i]])

        on_threads([partial(backward, i) for i in range(len(self.shares))])
        dmemory, dbias, *dpositions = zip(*rest, strict=True)
        return (
            dx,
            tuple(total.value for total in totals),
            tree.map(_together, *dmemory),
            tree.map(_together if self.own_bias else _sum, *dbias),
            *(tree.map(_sum, *dpos) for dpos in dpositions),
        )


def without_layers() -> NoReturn:
    """AttributeError: there is no cache of each layer."""
    raise AttributeError(
        "blocks: each thread took its sequences through all layers; within reference_only() "
        "there is one cache a layer"
    )


def require_no_routers(drouter_logits: Sequence[None] | None) -> None:
    """ValueError for the gradient of a router, of which there is none."""
    if any(dlogits is not None for dlogits in drouter_logits or ()):
        raise ValueError("blocks: drouter_logits must be None, there are no experts")


class _Total:
    """The sum of a block's gradients, in turn, whichever is ready first.

    From the last layer that has its parameters to the first, and in each in the order of shares.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self._lock, self._next, self._early = threading.Lock(), 0, dict[int, Any]()

    def add(self, turn: int, dparams: Any) -> None:
        with self._lock:
            self._early[turn] = dparams
            while self._next in self._early:
                more = self._early.pop(self._next)
                self.value = more if self._next == 0 else add(self.value, more)
                self._next += 1


class _Layer(NamedTuple):
    """The cache of one layer and share, which hands on the gradients of the parameters."""

    cache: Any
    total: _Total
    turn: int  # in which it is added

    def backward(self, dy: Array) -> tuple[Any, ...]:
        """As `BlockCache.backward`, None in the place of dparams."""
        dx, dparams, *rest = self.cache.backward(dy)
        self.total.add(self.turn, dparams)
        return dx, None, *rest


def _shares(n: int) -> list[slice]:
    size = -(-n // n_threads())
    return [slice(start, start + size) for start in range(0, n, size)]


def _is_array(a: Any) -> bool:
    return isinstance(a, np.ndarray)


def _fits(a: Any, ndim: int, *leading: int) -> bool:
    """Whether it is an array of less than ndim dimensions, or of ndim and such a leading length."""
    return _is_array(a) and (a.ndim < ndim or (a.ndim == ndim and a.shape[0] in leading))


def _is_own(a: Array | None, ndim: int, n: int) -> bool:
    """Whether each of n sequences has its own, in an array of ndim dimensions."""
    return a is not None and a.ndim == ndim and a.shape[0] == n


def _own(share: slice, n: int, a: Array | None, ndim: int) -> Array | None:
    return a[share] if a is not None and _is_own(a, ndim, n) else a


def _together(*shares: Array) -> Array:
    return np.concatenate(shares)


def _sum(*shares: Array) -> Array:
    return sum(shares[1:], start=shares[0])
