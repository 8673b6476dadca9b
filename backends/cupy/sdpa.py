"""`sdpa` in tiles in shared memory: only the top and total of each query's scores are stored.

If there are few queries, as in decoding, the keys are split over blocks, and a second launch
combines their sums. Otherwise one block would read all keys of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.backends.cupy.attention import (
    BLOCK,
    MIN_OWN,
    WIDTHS,
    Attention,
    attention,
    heads_first,
    shared,
    tile,
)
from xformer.backends.cupy.module import EVERY, Source, blocks, empty, launch, real_size, threads
from xformer.backends.cupy.random_bits import not_a_step
from xformer.backends.cupy.sdpa_backward import backward
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import STORED, working_dtype
from xformer.ops._attention import sdpa_options
from xformer.ops.sdpa import sdpa as reference

SOURCE = Source(__file__, dtypes=EVERY, WIDTH=WIDTHS, FEW=(0, 1))
OWN_BYTES = 32 << 10  # as in sdpa.cu
FEW = MIN_OWN  # most queries for which the keys are split
# Keys of a split, or a multiple of them: fixed, so that sums are the same on every device.
SPLIT, MAX_SPLITS = 128, 64  # MAX_SPLITS as in sdpa.cu


def unsupported(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
    *,
    mask: Array | None = None,
    **options: Any,
) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    width = max(q.shape[3], v.shape[3])
    if width > WIDTHS[-1]:
        return f"heads are {width} wide, more than {WIDTHS[-1]}"
    if bias is not None and q.dtype.name in STORED:
        return f"a bias is not added in {q.dtype.name}"
    return not_a_step(options.get("dropout_key"), q)


@kernel(reference, "cupy", unsupported=unsupported, storage_dtypes=STORED)
def sdpa(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
    *,
    mask: Array | None = None,
    **options: Any,
) -> tuple[Array, CupySdpaCache]:
    """Return (ctx, cache) by one launch, or by two if there are few queries and many keys.

    q: (B, H, T, K)   k: (B, G, S, K)   v: (B, G, S, M)   ctx: (B, H, T, M)
    """
    checked = sdpa_options(q, k, bias, mask=mask, **options)
    inputs = attention((q, k, v, bias, sinks, mask), checked)
    n_keys = k.shape[2]
    if q.shape[2] > FEW:
        by_token, top, total = _forward(inputs, 0, 1, n_keys)
    elif n_keys <= SPLIT:
        by_token, top, total = _forward(inputs, 1, 1, n_keys)
        by_token = array_namespace(q).astype(by_token, q.dtype, copy=False)
    else:
        by_token, top, total = _combined(inputs, split_of(n_keys))
    return heads_first(by_token), CupySdpaCache(inputs, by_token, top, total)


@short
class CupySdpaCache(NamedTuple):
    """Saved by `sdpa` for backward; probabilities are recomputed from top and total."""

    attention: Attention
    by_token: Array  # ctx, (B, T, H, M)
    top: Array  # (B, H, T), the highest score
    total: Array  # (B, H, T), sum of exp(scores - top)

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, Array | None, Array | None]:
        """Return dq, dk, dv, dbias and dsinks, from dctx (B, H, T, M).

        dscores = probs * (dprobs - inner), inner = sum(dprobs * probs) = dctx . ctx
        """
        n_batch, n_queries, n_heads, width = self.by_token.shape
        shape = n_batch, n_heads, n_queries, width
        require_gradient("sdpa", "dctx", dctx, self.by_token, shape)
        return backward(*self, dctx)


def split_of(n_keys: int) -> int:
    """Return the keys of each split, so that there are at most MAX_SPLITS splits."""
    return SPLIT * blocks(n_keys, SPLIT * MAX_SPLITS)


def _forward(a: Attention, few: int, n_splits: int, split: int) -> tuple[Array, Array, Array]:
    """Return ctx (B, T, H, M), and top and total (B, H, T).

    few: 1 if there are at most `FEW` queries, else 0; if 1, ctx is not rounded to the dtype of q
    n_splits: number of splits; if more than one, each result has a first axis of the splits
    split: keys of a split
    """
    n_batch, n_heads, n_queries, _ = a.q.shape
    size, lead = real_size(a.q), () if n_splits == 1 else (n_splits,)
    real = working_dtype(a.q)
    ctx = empty(a.q, (*lead, n_batch, n_queries, n_heads, a.v.shape[3]), real if few else None)
    top, total = (empty(a.q, (*lead, *a.q.shape[:3]), real) for _ in range(2))
    n_own, n_other = tile(a.width, size, 0 if few else OWN_BYTES)
    launch(
        SOURCE,
        "sdpa_forward",
        a.q,
        grid=(n_batch * n_heads * blocks(n_queries, n_own) * n_splits,),
        block=(BLOCK,),
        args=(*a.arguments(ctx), ctx, top, total, n_splits, split),
        shared=shared(a.width, size, n_own, n_other, 1),
        WIDTH=a.width,
        FEW=few,
    )
    return ctx, top, total


def _combined(a: Attention, split: int) -> tuple[Array, Array, Array]:
    """Return ctx (B, T, H, M), and top and total (B, H, T), from splits of `split` keys each."""
    n_splits = blocks(a.k.shape[2], split)
    parts = _forward(a, 1, n_splits, split)
    ctx = empty(a.q, parts[0].shape[1:])
    top, total = (empty(x, x.shape[1:]) for x in parts[1:])
    _, n_heads, n_queries, _ = a.q.shape
    width = a.v.shape[3]
    launch(
        SOURCE,
        "sdpa_combine",
        a.q,
        grid=(top.size,),
        block=(threads(width),),
        args=(*parts, ctx, top, total, n_heads, n_queries, width, a.keep, n_splits),
        WIDTH=a.width,
        FEW=1,
    )
    return ctx, top, total
