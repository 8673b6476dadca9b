"""`layer_norm`: one block a row. The parameters' gradients are sums in a fixed order."""

from __future__ import annotations

import math
from typing import NamedTuple

from xformer.backends.cupy.column_sums import column_sums, fits_shared, parts_of
from xformer.backends.cupy.module import (
    EVERY,
    Source,
    contiguous,
    empty,
    launch,
    real_size,
    row_threads,
    wide,
)
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import number, require_axis, require_gradient
from xformer.dispatch.shapes import STORED, working_dtype
from xformer.ops.layer_norm import layer_norm as reference

SOURCE = Source(__file__, dtypes=EVERY, WIDE=(0, 1))


@kernel(reference, "cupy", storage_dtypes=STORED)
def layer_norm(
    x: Array, w: Array, b: Array | None = None, *, eps: float = 1e-5, eps_inside: bool = True
) -> tuple[Array, CupyLayerNormCache]:
    """Return (y = (x - mean) * rstd * w + b, cache).

    x: (..., D)   w, b: (D,)
    eps_inside: whether eps is added under the root, else to the root
    """
    eps = number("layer_norm", "eps", eps, low=0)
    require_axis("layer_norm", x, -1)
    return forward(x, None, w, b, eps, eps_inside)


def forward(
    x: Array, addend: Array | None, w: Array, b: Array | None, eps: float, eps_inside: bool = True
) -> tuple[Array, CupyLayerNormCache]:
    """Return (y, cache) of `layer_norm` for x + addend; the cache's x is the sum."""
    x, w, b = contiguous(x), contiguous(w), None if b is None else contiguous(b)
    addend = None if addend is None else contiguous(addend)
    s = None if addend is None else empty(x)
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    y, (mean, rstd) = empty(x), (empty(x, (rows,), working_dtype(x)) for _ in range(2))
    is_wide = wide(width, x, addend, s, w, b, y)
    launch(
        SOURCE,
        "layer_norm_forward",
        x,
        grid=(rows,),
        block=(row_threads(width, is_wide, x),),
        args=(x, addend, s, w, b, y, mean, rstd, width, eps, int(eps_inside)),
        WIDE=is_wide,
    )
    x = x if s is None else s
    return y, CupyLayerNormCache(x, w, mean, rstd, 0.0 if eps_inside else eps, b is not None)


@short
class CupyLayerNormCache(NamedTuple):
    """Saved by `layer_norm` for backward: x, w and each row's mean and 1 / standard deviation.

    They give xhat = (x - mean) * rstd again.
    """

    x: Array  # (..., D)
    w: Array  # (D,)
    mean: Array  # (N,)
    rstd: Array  # (N,)
    eps_outside: float  # eps if it is added to the root, else 0
    has_b: bool

    def backward(self, dy: Array) -> tuple[Array, Array, Array | None]:
        """Return dx (..., D), dw (D,) and db (D,), or None for db without b; dy: (..., D)."""
        require_gradient("layer_norm", "dy", dy, self.x)
        return self.backward_with(dy, None)

    def backward_with(self, dy: Array, ds: Array | None) -> tuple[Array, Array, Array | None]:
        """Return dx, dw and db (None without b).

        ds: (..., D), added to dx; None: 0
        dy: (..., D)
        """
        x, w, mean, rstd, eps_outside, has_b = self
        ds, dy = None if ds is None else contiguous(ds), contiguous(dy)
        rows, width = mean.shape[0], w.shape[0]
        n_parts = parts_of(rows)
        dx, parts = empty(x), empty(x, (1 + has_b, n_parts, width), working_dtype(x))
        arrays = x, w, mean, rstd, dy, ds, dx, parts
        shared = fits_shared((1 + has_b) * width * real_size(x))
        is_wide = wide(width, x, w, dy, ds, dx, parts)
        launch(
            SOURCE,
            "layer_norm_backward",
            x,
            grid=(n_parts,),
            block=(row_threads(width, is_wide, x),),
            args=(*arrays, rows, width, eps_outside, int(has_b), int(shared > 0)),
            shared=shared,
            WIDE=is_wide,
        )
        sums = column_sums(parts)
        return dx, sums[0, :], sums[1, :] if has_b else None
