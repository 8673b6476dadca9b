"""`relu` block by block, on all threads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from xformer.backends.numpy.rows import BLOCK, flat, masked
from xformer.backends.numpy.threads import blocks

from xformer.checks import require_gradient
from xformer.dispatch import kernel
from xformer.ops.relu import relu as reference
from xformer.typing import Array


@kernel(reference, "numpy")
def relu(x: Array) -> tuple[Array, ReluCache]:
    """max(0, x) as `clip`, which is twice as fast as NumPy's maximum with a number."""
    y = np.empty(x.shape, x.dtype)
    xs, ys = flat(x), flat(y)
    blocks(
        lambda start, stop: np.clip(xs[start:stop], 0, np.inf, out=ys[start:stop]), xs.size, BLOCK
    )
    return y, ReluCache(y)


class ReluCache(NamedTuple):
    """What `relu` keeps for its backward: its output, which the next op keeps anyway."""

    y: Array  # shape of x

    def backward(self, dy: Array) -> Array:
        """dx = dy where y > 0, else 0."""
        require_gradient("relu", "dy", dy, self.y)
        dx = np.empty(dy.shape, dy.dtype)
        ys, dys, dxs = flat(self.y), flat(dy), flat(dx)

        def piece(start: int, stop: int) -> None:
            masked(dys[start:stop], ys[start:stop] > 0, out=dxs[start:stop])

        blocks(piece, dxs.size, BLOCK)
        return dx
