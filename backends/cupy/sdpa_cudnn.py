"""`sdpa` in float16 and bfloat16 by cuDNN."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, NamedTuple

from xformer.backends.cupy import cudnn_support
from xformer.backends.cupy.attention import heads_first
from xformer.backends.cupy.cudnn import plan_of, ran, runtime_of
from xformer.backends.cupy.cudnn_plan import (
    CTX,
    DCTX,
    DK,
    DQ,
    DV,
    LSE,
    TYPES,
    K,
    Kind,
    Layout,
    Q,
    V,
    by_rows,
)
from xformer.backends.cupy.index_add import deterministic, is_deterministic
from xformer.backends.cupy.module import contiguous, empty
from xformer.backends.cupy.side_by_side import heads_beside, joined
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import is_inference, kernel
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import STORED, dtype_name, working_dtype
from xformer.ops._attention import SdpaOptions, sdpa_options
from xformer.ops.sdpa import sdpa as reference

MULTIPLE = 64  # lengths are a multiple of it: each length needs plans, which take long to make
LAYOUTS = 4096  # layouts that are cached


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
    runtime = runtime_of(q)
    library = runtime.library()
    if isinstance(library, str):
        return library
    if dtype_name(q) not in TYPES:
        return f"it multiplies numbers of two bytes, not {q.dtype.name}"
    left_out = {
        "a bias": bias is not None,
        "sinks": sinks is not None,
        "a mask": mask is not None,
        "a cap of the scores": options.get("softcap") is not None,
        "dropout by the library's random bits": bool(options.get("dropout_rate")),
    }
    if names := [name for name, requested in left_out.items() if requested]:
        return f"{' and '.join(names)} is not in its graphs"
    lengths = q.shape[2], k.shape[2]
    if any(n % MULTIPLE for n in lengths) or 0 in (*q.shape, *v.shape):
        return f"there are {lengths[0]} queries and {lengths[1]} keys, no multiples of {MULTIPLE}"
    kind = _kind(q, k, v, sdpa_options(q, k, mask=mask, **options))
    if lengths[0] > lengths[1] and (kind.left, kind.right) != (None, None):
        return "there may be queries that see no key"
    capability, version = runtime.stream_of([q]).capability, library.backend_version()
    widths = q.shape[3], v.shape[3]
    for backward in (False,) if is_inference() else (False, True):
        wanted = {"backward": backward, "deterministic": kind.deterministic}
        if why := cudnn_support.unsupported(capability, version, widths, **wanted):
            return why
        plan = plan_of(q, kind._replace(backward=backward))
        if isinstance(plan, str):
            return plan
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
) -> tuple[Array, Any]:
    """Return (ctx, cache) by one call of cuDNN. If it fails, the next kernel returns both.

    q: (B, H, T, K)   k: (B, G, S, K)   v: (B, G, S, M)   ctx: (B, H, T, M)
    """
    kind = _kind(q, k, v, sdpa_options(q, k, **options))
    arrays = q, k, v
    n_batch, n_heads, n_queries, _ = q.shape
    q, k, v = readable(q), readable(k), readable(v)
    ctx = empty(q, (n_batch, n_queries, n_heads, v.shape[3]))
    lse = empty(q, (n_batch, n_heads, n_queries), working_dtype(q))
    if not ran(kind, {Q: q, K: k, V: v, CTX: ctx, LSE: lse}):
        result: tuple[Array, Any] = reference(*arrays, **options)
        return result
    return heads_first(ctx), CudnnCache(kind, q, k, v, ctx, lse)


@short
class CudnnCache(NamedTuple):
    """Saved by `sdpa` for backward; cuDNN recomputes the probabilities from lse."""

    kind: Kind
    q: Array  # (B, H, T, K)
    k: Array  # (B, G, S, K)
    v: Array  # (B, G, S, M)
    by_token: Array  # ctx, (B, T, H, M)
    lse: Array  # (B, H, T), log(sum(exp(scores)))

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, None, None]:
        """Return the gradients of q, k, v, bias and sinks; the last two are None.

        dctx: (B, H, T, M)
        dq = scale * dscores k, dk = scale * dscores^T q, dv = probs^T dctx, where
        dscores = probs * (dprobs - inner), probs = exp(scores - lse), dprobs = dctx v^T, and
        inner is the sum of dctx * ctx over the last axis.

        If cuDNN fails, the next kernel of `sdpa` computes the op again, forward and backward.
        """
        kind, q, k, v, ctx, lse = self
        n_batch, n_queries, n_heads, width = ctx.shape
        require_gradient("sdpa", "dctx", dctx, ctx, (n_batch, n_heads, n_queries, width))
        dq, dk, dv = heads_beside(q, (q.shape, k.shape, v.shape), beside=kind.joined)
        arrays = {Q: q, K: k, V: v, CTX: ctx, LSE: lse, DCTX: _tokens_first(dctx)}
        if not ran(kind._replace(backward=True), arrays | {DQ: dq, DK: dk, DV: dv}):
            return self._by_another(dctx)
        return heads_first(dq), heads_first(dk), heads_first(dv), None, None

    def _by_another(self, dctx: Array) -> tuple[Array, Array, Array, None, None]:
        """Return the gradients by the next kernel, deterministic if `self.kind` says so."""
        kind, band = self.kind, (self.kind.left, self.kind.right)
        with deterministic() if kind.deterministic else nullcontext():
            _, cache = reference(self.q, self.k, self.v, window=band, scale=kind.scale)
            grads: tuple[Array, Array, Array, None, None] = cache.backward(dctx)
        return grads


def _kind(q: Array, k: Array, v: Array, options: SdpaOptions) -> Kind:
    """Return the kind of attention, forward. A bound that excludes no key is None."""
    left, right = options.band
    n_queries, n_keys = q.shape[2], k.shape[2]
    return Kind(
        dtype_name(q),
        layout(q),
        layout(k),
        layout(v),
        None if left is None or left >= n_keys - 1 else left,
        None if right is None or right >= n_queries - 1 else right,
        options.scale,
        is_deterministic(),
        backward=False,
        joined=joined(q),
    )


# ---- Layouts of arrays ----


def is_readable(x: Array) -> bool:
    """Return whether cuDNN can read x without a copy.

    Its rows must be contiguous and aligned to 16 bytes, and no axis may be broadcast.
    """
    return x.data.ptr % 16 == 0 and _has_readable_rows(x.shape, x.strides, x.itemsize)


@functools.lru_cache(LAYOUTS)  # a model has few layouts; a look-up is faster than computing them
def _has_readable_rows(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    *starts, step = strides
    rows = (stride for n, stride in zip(shape, starts, strict=False) if n > 1)
    return step == size and all(stride > 0 and stride % 16 == 0 for stride in rows)


def layout(x: Array) -> Layout:
    """Return the layout of `readable(x)`."""
    return _cudnn_layout(x.shape, x.strides if is_readable(x) else None, x.itemsize)


@functools.lru_cache(LAYOUTS)
def _cudnn_layout(shape: tuple[int, ...], strides: tuple[int, ...] | None, size: int) -> Layout:
    """Return the shape and the strides in elements of an array (B, H, T, K), for cuDNN.

    strides: in bytes; None: the array is contiguous   size: bytes of an element
    """
    whole = by_rows(*shape)
    if strides is None:
        return whole
    # The stride of an axis of one element has no effect, but cuDNN refuses some values.
    triples = zip(shape, strides, whole.strides, strict=True)
    steps = (usual if n == 1 else stride // size for n, stride, usual in triples)
    return Layout(shape, tuple(steps))


def readable(x: Array) -> Array:
    """Return x, or a contiguous copy if cuDNN cannot read x."""
    if is_readable(x):
        return x
    return x.copy() if x.flags.c_contiguous else contiguous(x)


def _tokens_first(dctx: Array) -> Array:
    """Return dctx (B, H, T, M) as a contiguous array (B, T, H, M)."""
    return readable(contiguous(array_namespace(dctx).permute_dims(dctx, (0, 2, 1, 3))))
