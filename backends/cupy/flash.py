"""`sdpa` in float16 and bfloat16 by tensor cores."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.backends.cupy.attention import BLOCK, Attention, attention, heads_first, strides
from xformer.backends.cupy.flash_backward import PACK, WIDTHS, backward, shared, width_of
from xformer.backends.cupy.module import Source, blocks, contiguous, empty, launch
from xformer.backends.cupy.sdpa import FEW
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import STORED, dtype_name, working_dtype
from xformer.ops._attention import sdpa_options
from xformer.ops.sdpa import sdpa as reference

SOURCE = Source(__file__, dtypes=STORED, WIDTH=WIDTHS)
# Head width -> (queries of a block, keys that it loads at a time), as in flash.cu.
TILES = {32: (128, 64), 64: (128, 64), 128: (128, 32)}


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
    if dtype_name(q) not in STORED:
        return f"it multiplies numbers of two bytes, not {q.dtype.name}"
    for width in (q.shape[3], v.shape[3]):
        if width % PACK or width > WIDTHS[-1]:
            return f"heads are {width} wide, no multiple of {PACK} up to {WIDTHS[-1]}"
    if bias is not None:
        return "a bias is not added"
    if q.shape[2] <= FEW:
        return f"there are {q.shape[2]} queries, so few that their keys are split over blocks"
    key = options.get("dropout_key")
    if options.get("dropout_rate") and key is not None and not isinstance(key.step, int):
        return "the step of dropout_key is an array"  # the kernel has no register left for it
    return None


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
) -> tuple[Array, FlashCache]:
    """Return (ctx, cache) by one launch.

    Probabilities are rounded to two bytes before the matmul with v.
    q: (B, H, T, K)   k: (B, G, S, K)   v: (B, G, S, M)   ctx: (B, H, T, M)
    """
    checked = sdpa_options(q, k, bias, mask=mask, **options)
    inputs = attention((in_packs(q), in_packs(k), in_packs(v), None, sinks, mask), checked)
    by_token, top, total = _forward(inputs)
    return heads_first(by_token), FlashCache(inputs, by_token, top, total)


@short
class FlashCache(NamedTuple):
    """Saved by `sdpa` for backward; probabilities are recomputed from top and total."""

    attention: Attention
    by_token: Array  # ctx, (B, T, H, M)
    top: Array  # (B, H, T), the highest score
    total: Array  # (B, H, T), sum of exp(scores - top)

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, None, Array | None]:
        """Return dq, dk, dv, None and dsinks, from dctx (B, H, T, M).

        dscores = probs * (dprobs - inner), inner = sum(dprobs * probs) = dctx . ctx
        """
        n_batch, n_queries, n_heads, width = self.by_token.shape
        shape = n_batch, n_heads, n_queries, width
        require_gradient("sdpa", "dctx", dctx, self.by_token, shape)
        return backward(*self, in_packs(dctx))


def in_packs(x: Array) -> Array:
    """Return x, or a copy if a row is not aligned to 16 bytes or not contiguous."""
    *starts, step = strides(x)
    aligned = x.data.ptr % 16 == 0 and not any(n % PACK for n in starts) and step == 1
    return x if aligned else contiguous(x)


def _forward(a: Attention) -> tuple[Array, Array, Array]:
    """Return ctx (B, T, H, M), and top and total (B, H, T)."""
    n_batch, n_heads, n_queries, _ = a.q.shape
    real, (n_own, n_other) = working_dtype(a.q), TILES[width_of(a)]
    ctx = empty(a.q, (n_batch, n_queries, n_heads, a.v.shape[3]))
    top, total = (empty(a.q, a.q.shape[:3], real) for _ in range(2))
    launch(
        SOURCE,
        "flash_forward",
        a.q,
        grid=(n_batch * n_heads * blocks(n_queries, n_own),),
        block=(BLOCK,),
        args=(*a.arguments(ctx), ctx, top, total),
        shared=shared(a, n_own + 4 * n_other),
        WIDTH=width_of(a),
    )
    return ctx, top, total
