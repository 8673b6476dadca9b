"""`gelu`, each element once through all of its formula."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba.gelu import (
    exact_form,
    exact_slope,
    not_float32,
    tanh_form,
    tanh_slope,
)
from xformer.backends.numba.program.namespace import contiguous
from xformer.backends.numba.program.native import Native, float32s, native, part, words

from xformer import ops
from xformer.checks import require_gradient
from xformer.dispatch import kernel
from xformer.typing import Array

LINE = 16  # elements of a line of memory, of which no two threads have a part


@kernel(ops.gelu, "numba.kernels", unsupported=not_float32)
def gelu(x: Array, *, approximate: str = "none") -> tuple[Array, GeluCache]:
    """y = x * Phi(x)."""
    x = contiguous(x)
    y = x.program.fresh(x.shape, x.dtype)

    def run(y: Any, x: Any) -> None:
        np.copyto(y, ops.gelu.reference(x, approximate=approximate)[0])

    numbers = x.size, int(approximate == "tanh")
    x.program.emit("gelu", run, [y], [x], Native(forward, numbers, x.program.pieces(x.size)))
    return y, GeluCache(x, approximate)


class GeluCache(NamedTuple):
    """What `gelu` keeps for its backward."""

    x: Array
    approximate: str

    def backward(self, dy: Array) -> Array:
        """dx = dy * (Phi + x * Phi')."""
        x, approximate = self
        require_gradient("gelu", "dy", dy, x)
        dy = contiguous(dy)
        dx = x.program.fresh(x.shape, x.dtype)

        def run(dx: Any, x: Any, dy: Any) -> None:
            cache = ops.gelu.reference(x, approximate=approximate)[1]
            np.copyto(dx, cache.backward(dy))

        own = Native(backward, (x.size, int(approximate == "tanh")), x.program.pieces(x.size))
        x.program.emit("gelu backward", run, [dx], [x, dy], own)
        return dx


@native
def forward(args: int, piece: int, pieces: int, memory: int) -> None:
    """y; x, how many, whether tanh's form."""
    a = words(args, 4)
    start, stop = part(a[2], piece, pieces, LINE)
    y, x = float32s(a[0] + 4 * start, (stop - start,)), float32s(a[1] + 4 * start, (stop - start,))
    if a[3]:
        tanh_form(x, y)
    else:
        exact_form(x, y)


@native
def backward(args: int, piece: int, pieces: int, memory: int) -> None:
    """dx; x, dy, how many, whether tanh's form."""
    a = words(args, 5)
    start, stop = part(a[3], piece, pieces, LINE)
    n = (stop - start,)
    dx, x, dy = (
        float32s(a[0] + 4 * start, n),
        float32s(a[1] + 4 * start, n),
        float32s(a[2] + 4 * start, n),
    )
    if a[4]:
        tanh_slope(x, dy, dx)
    else:
        exact_slope(x, dy, dx)
