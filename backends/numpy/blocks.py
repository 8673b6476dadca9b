"""`blocks` by data parallelism: each thread computes all layers for its share of the batch.

Threads wait for each other once in forward and once in backward, not in every op. While one thread
waits for memory, another computes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from xformer import layers
from xformer.backends.numpy.threads import n_threads
from xformer.backends.numpy.threads import run as on_threads
from xformer.base import tree
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import is_inference, kernel
from xformer.dispatch.checks import require_shape
from xformer.dispatch.grad_callback import Ready
from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.blocks import blocks as reference
from xformer.layers.blocks_cache import BlocksCache, add, report_block
from xformer.layers.protocol import Context, SideInputs
from xformer.layers.rope_by_layer import LayerTables

if TYPE_CHECKING:
    from xformer.layers.reversible import ReversibleCache

# Least tokens of a share, times the number of other shares: their gradients must be added up.
ROWS = 128
UNEVEN = 9 / 8  # most sequences of the largest share, over the mean of all shares


def unsupported(
    x: Array,
    params: tuple[BlockParams, ...],
    side: SideInputs = SideInputs(),
    *,
    configs: Sequence[BlockConfig],
    context: Context = Context(),
    activation_checkpointing: bool = False,
) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    mask, _, memory_mask, rotary, kv_cache, segment_memory, dropout_key = context
    if kv_cache is not None:
        return "there is a KV cache"
    is_batch, memories = _is_array(x) and x.ndim == 3, tree.flatten((side.memory,)).values()
    if not is_batch or not all(_is_array(a) and a.shape[:1] == x.shape[:1] for a in memories):
        return "x and memory are not batches of one size"
    n = len(x)
    fits = [_fits(a, 4, 1, n) for a in (side.bias, mask, memory_mask) if a is not None]
    fits += [_fits(a, 3, n) for tables in _distinct(rotary) for a in (tables.cos, tables.sin)]
    if not all(fits):
        return f"bias, masks or rotary tables are neither for all {n} sequences nor for each"
    if any(config.reversible for config in configs):
        return "reversible blocks"
    if any(config.experts is not None for config in configs):
        return "experts: their router needs the whole batch"
    if dropout_key is not None and any(
        config.dropout or config.attn.dropout or getattr(config.ffn, "dropout", 0.0)
        for config in configs
    ):
        return "dropout: its mask depends on the index in the whole batch"
    if segment_memory is not None:
        return "there is a segment memory"
    return unsupported_batch(n, x.shape[1])


def unsupported_batch(n: int, length: int) -> str | None:
    """Return why it does not pay to divide n sequences of `length` tokens among threads, or None.

    Reasons: there is one thread, the shares would be uneven, or a share has too few tokens.
    """
    threads = n_threads()
    size = -(-n // threads)
    if threads == 1:
        return "one thread"
    if size * threads > UNEVEN * n:
        return f"{n} sequences cannot be divided evenly among {threads} threads"
    if size * length < ROWS * (1 if is_inference() else threads - 1):
        return f"{size} sequences of {length} tokens are too few for a thread"
    return None


@kernel(reference, "numpy", unsupported=unsupported)
def blocks(
    x: Array,
    params: tuple[BlockParams, ...],
    side: SideInputs = SideInputs(),
    *,
    configs: Sequence[BlockConfig],
    context: Context = Context(),
    activation_checkpointing: bool = False,
) -> tuple[Array, SharesCache | BlocksCache | ReversibleCache]:
    """Compute the reference for shares of the batch, on several threads. Return y and the cache.

    A share is a slice of x, of memory, and of each array that has an entry for each sequence.
    """
    options: Any = {"configs": configs, "activation_checkpointing": activation_checkpointing}
    n, y = len(x), np.empty(x.shape, x.dtype)
    shares = _shares(n)
    caches: list[Any] = [None] * len(shares)

    def forward(i: int) -> None:
        share = partial(_share, shares[i], n)
        own = context._replace(
            mask=share(context.mask, 4),
            memory_mask=share(context.memory_mask, 4),
            rotary=_rotary_share(share, context.rotary),
        )
        memory = tree.map(lambda a: a[shares[i]], side.memory)
        inputs = side._replace(memory=memory, bias=share(side.bias, 4))
        run: Any = reference.reference
        y[shares[i]], caches[i] = run(x[shares[i]], params, inputs, context=own, **options)

    # An error would name the shapes of a share. The reference then raises it for the whole batch.
    with suppress(TypeError, ValueError):
        on_threads([partial(forward, i) for i in range(len(shares))])
        per_sequence = _is_per_sequence(side.bias, 4, n)
        return y, SharesCache(tuple(shares), tuple(caches), y.shape, per_sequence)
    return reference.reference(x, params, side, context=context, **options)


@short
class SharesCache(NamedTuple):
    """Saved by `blocks` for backward: the reference's cache of each share of the batch."""

    shares: tuple[slice, ...]  # sequences of each share
    caches: tuple[BlocksCache, ...]  # one for each share
    shape: tuple[int, ...]  # of y: (B, T, D)
    bias_per_sequence: bool  # whether bias has an entry for each sequence

    @property
    def blocks(self) -> NoReturn:
        """Raise AttributeError, always, with advice.

        Each thread ran all layers for its share of the batch. There is no cache for each layer, as
        in `BlocksCache.blocks`. Within `reference_only()` there is one.
        """
        without_layers()

    def backward(
        self,
        dy: Array,
        drouter_logits: Sequence[None] | None = None,
        *,
        ready: Ready | None = None,
    ) -> tuple[Array, tuple[BlockParams, ...], SideInputs]:
        """Return the gradients of x, params and side.

        drouter_logits: None, or None for each layer: there are no routers.
        ready: of `BlocksCache.backward`, but called at the end, for all blocks: each thread runs
            all layers

        The parameter gradients of a layer are added up while backward runs, so that the gradients
        of all shares and layers are never in memory together.
        """
        require_shape("blocks", "dy", dy, self.shape)
        require_no_routers(drouter_logits)
        order, n = self.caches[0].order, len(self.shares)
        # Layers with the same parameters add to the same total, the last layer first.
        positions = [n * order[i + 1 :].count(which) for i, which in enumerate(order)]
        totals = [_Total() for _ in range(max(order) + 1)]
        dx = np.empty(self.shape, dy.dtype)
        dsides: list[Any] = [None] * len(self.shares)

        def backward(i: int) -> None:
            cache = self.caches[i]
            layers_of_share = tuple(
                _Layer(layer, totals[which], position + i)
                for layer, which, position in zip(cache.blocks, order, positions, strict=True)
            )
            cache = cache._replace(blocks=layers_of_share)
            dx[self.shares[i]], _, dsides[i] = cache.backward(dy[self.shares[i]])

        on_threads([partial(backward, i) for i in range(len(self.shares))])
        dmemory, dbias, *dpositions = zip(*dsides, strict=True)
        dparams = tuple(total.value for total in totals)
        for i in reversed(range(len(order))):
            report_block(ready, order, i, dparams)
        dside = SideInputs(
            tree.map(_concatenated, *dmemory),
            tree.map(_concatenated if self.bias_per_sequence else _sum, *dbias),
            *(tree.map(_sum, *dpos) for dpos in dpositions),
        )
        return dx, dparams, dside


def without_layers() -> NoReturn:
    """Raise AttributeError: there is no cache of each layer."""
    raise AttributeError(
        "blocks: each thread computed all layers for its sequences, so there is no cache of each "
        "layer; there is within reference_only()"
    )


def require_no_routers(drouter_logits: Sequence[None] | None) -> None:
    """Raise ValueError if drouter_logits has a gradient: there is no router."""
    if any(dlogits is not None for dlogits in drouter_logits or ()):
        raise ValueError("blocks: drouter_logits must be None, there are no experts")


class _Total:
    """The sum of the gradients of one block's parameters, added in a fixed order.

    `add` may be called in any order: a gradient that is early is held until its position comes.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self._lock, self._next, self._early = threading.Lock(), 0, dict[int, Any]()

    def add(self, position: int, dparams: Any) -> None:
        """Add the gradients at `position`, 0 first, and all later ones that are waiting."""
        with self._lock:
            self._early[position] = dparams
            while self._next in self._early:
                grads = self._early.pop(self._next)
                self.value = grads if self._next == 0 else add(self.value, grads)
                self._next += 1


class _Layer(NamedTuple):
    """The cache of one layer and share. Its parameter gradients are added to `total`."""

    cache: Any
    total: _Total
    position: int  # in the order of additions to `total`

    def backward(self, dy: Array) -> tuple[Any, ...]:
        """Return the gradients of `BlockCache.backward`, with None for dparams."""
        dx, dparams, dside = self.cache.backward(dy)
        self.total.add(self.position, dparams)
        return dx, None, dside


def _shares(n: int) -> list[slice]:
    """Return the slice of n sequences for each thread."""
    size = -(-n // n_threads())
    return [slice(start, start + size) for start in range(0, n, size)]


def _is_array(a: Any) -> bool:
    return isinstance(a, np.ndarray)


def _fits(a: Any, ndim: int, *leading: int) -> bool:
    """Return whether array `a` has fewer than ndim axes, or ndim with len(a) in `leading`."""
    return _is_array(a) and (a.ndim < ndim or (a.ndim == ndim and a.shape[0] in leading))


def _is_per_sequence(a: Array | None, ndim: int, n: int) -> bool:
    """Return whether `a` has ndim axes, and an entry for each of n sequences."""
    return a is not None and a.ndim == ndim and a.shape[0] == n


def _share(share: slice, n: int, a: Array | None, ndim: int) -> Array | None:
    """Return a[share] if `a` has an entry for each of n sequences, else `a`."""
    return a[share] if a is not None and _is_per_sequence(a, ndim, n) else a


def _rotary_share(share: Any, rotary: LayerTables) -> LayerTables:
    """Return the RoPE tables of a share of the batch. share: `_share` of its slice."""
    if rotary is None:
        return None
    if not isinstance(rotary, layers.RopeTables):
        return tuple(_rotary_share(share, tables) for tables in rotary)  # type: ignore[misc]
    return layers.RopeTables(share(rotary.cos, 3), share(rotary.sin, 3), rotary.interleaved)


def _distinct(rotary: LayerTables) -> list[layers.RopeTables]:
    """Return the RoPE tables of all layers, without None."""
    if isinstance(rotary, layers.RopeTables):
        return [rotary]
    return [tables for tables in rotary or () if tables is not None]


def _concatenated(*shares: Array) -> Array:
    return np.concatenate(shares)


def _sum(*shares: Array) -> Array:
    return sum(shares[1:], start=shares[0])
