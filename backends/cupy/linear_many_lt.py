"""`linear_many` by cuBLASLt: several linear maps of one x in one matmul, forward and for dx.

- Forward is one strided batched matmul if the weights are stored as `packed` stores them.
- dx is one matmul if the gradients dy are slices of one array, as attention's backward makes them.
  Its second factor is a copy of all weights side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xformer import ops
from xformer.backends.cupy.cublaslt import distances, multiply_each, why_not
from xformer.backends.cupy.linear_lt import PRODUCTS, linear
from xformer.backends.cupy.module import empty
from xformer.backends.cupy.side_by_side import beside, whole
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import is_inference, kernel
from xformer.dispatch.checks import require_gradient
from xformer.layers.linear import LinearParams
from xformer.layers.linear import linear_many as reference


def unsupported(x: Array, params: tuple[Any, ...], *, all_kept: bool = False) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    for linear_map in params:
        leaves = linear_map if isinstance(linear_map, LinearParams) else (linear_map,)
        if not all(leaf is None or isinstance(leaf, type(x)) for leaf in leaves):
            return "adapters or frozen parameters"
        if why := why_not(x, linear_map.w):
            return why
    return None


@kernel(reference, "cupy", unsupported=unsupported)  # the reference takes bfloat16 and float16 too
def linear_many(
    x: Array, params: tuple[LinearParams, ...], *, all_kept: bool = False
) -> tuple[tuple[Array, ...], CupyLinearsCache]:
    """Return (y = x w + b for each map, cache).

    all_kept: all results stay in use, so that they may share one array.
    """
    for w, b in params:
        ops.linear.reference.check((x, w, b), {}, ops.linear)  # type: ignore[attr-defined]
    ys = _at_once(x, params) if all_kept or is_inference() else None
    ys = tuple(linear(x, w, b)[0] for w, b in params) if ys is None else ys
    maps = tuple(Map(PRODUCTS.matrix(w), b is not None) for w, b in params)
    return ys, CupyLinearsCache(x, maps)


def _at_once(x: Array, params: tuple[LinearParams, ...]) -> tuple[Array, ...] | None:
    """Return the results of all maps, or None if they cannot share one matmul.

    The maps from the first whose w has the shape of the last w share the matmul; each earlier map
    has a matmul of its own. The shared results are views of one array: each keeps all in memory.
    """
    start = next(
        i for i, linear_map in enumerate(params) if linear_map.w.shape == params[-1].w.shape
    )
    separate, several = params[:start], params[start:]
    ws, bs = zip(*several, strict=True)
    if len(several) == 1 or distances(ws, bs) is None:
        return None
    rows = PRODUCTS.rows(x)
    out = empty(x, (len(several), rows.shape[0], ws[0].shape[1]))
    if not multiply_each(rows, ws, out, bs):
        return None
    shape = (*x.shape[:-1], out.shape[2])
    ys = (array_namespace(x).reshape(out[i], shape) for i in range(len(several)))
    return *(linear(x, w, b)[0] for w, b in separate), *ys


class Map(NamedTuple):
    """The weights of one map, saved for backward."""

    w: Array  # (I, O)
    has_b: bool


@short
class CupyLinearsCache(NamedTuple):
    """Saved by `linear_many` for backward: x for each dw, and each w for dx."""

    x: Array  # (..., I)
    maps: tuple[Map, ...]

    def backward(self, *dys: Array) -> tuple[Array, tuple[LinearParams, ...]]:
        """Return dx = sum of dy w^T over the maps, and for each map dw = x^T dy and db = sum of dy.

        Each map has a separate matmul for dw. One joined matmul is not expected to fill the device
        better: cuBLASLt is expected to split both over the rows.
        """
        for linear_map, dy in zip(self.maps, dys, strict=True):
            require_gradient(
                "linear", "dy", dy, linear_map.w, (*self.x.shape[:-1], linear_map.w.shape[1])
            )
        rows, x = [PRODUCTS.rows(dy) for dy in dys], PRODUCTS.rows(self.x)
        dx = _dx(rows, [linear_map.w for linear_map in self.maps])
        dparams = (
            LinearParams(*PRODUCTS.parameters(x, dy, linear_map.w, linear_map.has_b))
            for linear_map, dy in zip(self.maps, rows, strict=True)
        )
        return array_namespace(x).reshape(dx, self.x.shape), tuple(dparams)


def _dx(dys: Sequence[Array], ws: Sequence[Array]) -> Array:
    """Return dx (N, I), the sum of dy (N, O_i) times w^T over the maps.

    It is one matmul if that is faster and the layouts allow it; else each map's matmul adds to dx.
    """
    if gains(dys, ws) and (dy := whole(dys)) is not None and (w := beside(ws)) is not None:
        return PRODUCTS.back(dy, w)
    dx = PRODUCTS.back(dys[0], ws[0])
    for dy, w in zip(dys[1:], ws[1:], strict=True):
        PRODUCTS.back(dy, w, dx, add=True)
    return dx


def gains(dys: Sequence[Array], ws: Sequence[Array]) -> bool:
    """Return whether one matmul moves fewer elements than separate ones.

    One matmul saves reading and writing dx (N, I) for each further map, but copies the weights.
    """
    return len(ws) > 1 and dys[0].shape[0] * (len(ws) - 1) > sum(w.shape[1] for w in ws)
