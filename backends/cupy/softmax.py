"""`softmax` along any axis: one block a row."""

from __future__ import annotations

import math
from typing import NamedTuple

from xformer.backends.cupy.module import Source, contiguous, empty, launch, threads, wide
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_axis, require_gradient
from xformer.ops.softmax import softmax as reference

SOURCE = Source(__file__, WIDE=(0, 1))


@kernel(reference, "cupy")
def softmax(x: Array, *, axis: int = -1) -> tuple[Array, CupySoftmaxCache]:
    """Return (y, cache), y = exp(x - max(x)) / sum(exp(x - max(x))) along `axis`."""
    require_axis("softmax", x, axis)
    x, y = contiguous(x), empty(x)
    _launch("softmax_forward", (x, y), axis)
    return y, CupySoftmaxCache(y, axis)


@short
class CupySoftmaxCache(NamedTuple):
    """Saved by `softmax` for backward: y, which gives the derivative. x is not needed."""

    y: Array  # shape of x
    axis: int

    def backward(self, dy: Array) -> Array:
        """Return dx = y * (dy - sum(dy * y)), the sum along the axis."""
        require_gradient("softmax", "dy", dy, self.y)
        dy, dx = contiguous(dy), empty(dy)
        _launch("softmax_backward", (self.y, dy, dx), self.axis)
        return dx


def _launch(name: str, arrays: tuple[Array, ...], axis: int) -> None:
    like = arrays[0]
    shape, axis = like.shape, axis % like.ndim
    n, inner = shape[axis], math.prod(shape[axis + 1 :])
    launch(
        SOURCE,
        name,
        like,
        grid=(math.prod(shape[:axis]) * inner,),
        block=(threads(n),),
        args=(*arrays, n, inner),
        WIDE=wide(n, *arrays) if inner == 1 else 0,
    )
