"""`rms_norm`: one block a row. The gradient of w is a sum in a fixed order."""

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
from xformer.ops.rms_norm import rms_norm as reference

SOURCE = Source(__file__, dtypes=EVERY, WIDE=(0, 1))


def unsupported(
    x: Array, w: Array | None = None, *, eps: float = 1e-5, offset: float = 0.0
) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return "there is no w to add the offset to" if w is None and offset != 0 else None


@kernel(reference, "cupy", unsupported=unsupported, storage_dtypes=STORED)
def rms_norm(
    x: Array, w: Array | None = None, *, eps: float = 1e-5, offset: float = 0.0
) -> tuple[Array, CupyRmsNormCache]:
    """Return (y = (offset + w) * x * rstd, cache).

    x: (..., D)   w: (D,); None: y = x * rstd
    """
    eps = number("rms_norm", "eps", eps, low=0)
    offset = number("rms_norm", "offset", offset)
    require_axis("rms_norm", x, -1)
    return forward(x, None, w, eps, offset)


def forward(
    x: Array, addend: Array | None, w: Array | None, eps: float, offset: float
) -> tuple[Array, CupyRmsNormCache]:
    """Return (y, cache) of `rms_norm` for x + addend; the cache's x is the sum."""
    x, w = contiguous(x), None if w is None else contiguous(w)
    addend = None if addend is None else contiguous(addend)
    s = None if addend is None else empty(x)
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    y, rstd = empty(x), empty(x, (rows,), working_dtype(x))
    is_wide = wide(width, x, addend, s, w, y)
    launch(
        SOURCE,
        "rms_norm_forward",
        x,
        grid=(rows,),
        block=(row_threads(width, is_wide, x),),
        args=(x, addend, s, w, y, rstd, width, eps, offset),
        WIDE=is_wide,
    )
    x = x if s is None else s
    return y, CupyRmsNormCache(x, w, rstd, offset)


@short
class CupyRmsNormCache(NamedTuple):
    """Saved by `rms_norm` for backward: x, w and 1 / RMS of each row, which give xhat again."""

    x: Array  # (..., D)
    w: Array | None  # (D,)
    rstd: Array  # (N,), 1 / sqrt(mean(x^2) + eps) of each row
    offset: float

    def backward(self, dy: Array) -> tuple[Array, Array | None]:
        """Return dx (..., D) and dw (D,), or None for dw without w; dy: (..., D)."""
        require_gradient("rms_norm", "dy", dy, self.x)
        return self.backward_with(dy, None)

    def backward_with(self, dy: Array, ds: Array | None) -> tuple[Array, Array | None]:
        """Return dx and dw (None without w).

        ds: (..., D), added to dx; None: 0
        dy: (..., D)
        """
        x, w, rstd, offset = self
        ds, dy = None if ds is None else contiguous(ds), contiguous(dy)
        rows, width = rstd.shape[0], x.shape[-1]
        n_parts = parts_of(rows)
        dx = empty(x)
        parts = None if w is None else empty(x, (1, n_parts, width), working_dtype(x))
        shared = 0 if w is None else fits_shared(width * real_size(x))
        is_wide = wide(width, x, w, dy, ds, dx, parts)
        launch(
            SOURCE,
            "rms_norm_backward",
            x,
            grid=(n_parts if w is not None else rows,),
            block=(row_threads(width, is_wide, x),),
            args=(x, w, rstd, dy, ds, dx, parts, rows, width, offset, int(shared > 0)),
            shared=shared,
            WIDE=is_wide,
        )
        return dx, None if parts is None else column_sums(parts)[0, :]
