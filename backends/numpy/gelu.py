"""`gelu` in its tanh form, block by block: each block goes through all operations in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from xformer.checks import require_gradient
from xformer.dispatch import kernel
from xformer.ops.gelu import CUBIC, FAR, SCALE
from xformer.ops.gelu import gelu as reference
from xformer.typing import Array

BLOCK = 1 << 15  # elements; a few such blocks fit in a core's L2 cache


def not_tanh(x: Array, *, approximate: str = "none") -> str | None:
    """Why the kernel cannot run."""
    return None if approximate == "tanh" else "only the tanh form: NumPy has no erf"


@kernel(reference, "numpy", unsupported=not_tanh)
def gelu(x: Array, *, approximate: str = "none") -> tuple[Array, GeluCache]:
    """y = x * Phi(x), in place of the ten arrays of x's size that the reference makes."""
    y = np.empty(x.shape, x.dtype)
    for xs, ys in _blocks(x, y):
        x_far = np.clip(xs, -FAR, FAR)
        _phi(x_far, out=ys)
        ys *= np.maximum(xs, -FAR, out=x_far)
    return y, GeluCache(x)


class GeluCache(NamedTuple):
    """What `gelu` keeps for its backward."""

    x: Array

    def backward(self, dy: Array) -> Array:
        """dx = dy * (Phi + x * Phi'), Phi' = 2 Phi (1 - Phi) * SCALE * (1 + 3 CUBIC x^2)."""
        require_gradient("gelu", "dy", dy, self.x)
        dx = np.empty(dy.shape, dy.dtype)
        for xs, dys, dxs in _blocks(self.x, dy, dx):
            x = np.clip(xs, -FAR, FAR)
            phi = np.empty_like(x)
            _phi(x, out=phi)
            np.multiply(x, x, out=dxs)
            dxs *= 3 * CUBIC
            dxs += 1
            dxs *= x
            dxs *= phi
            dxs *= 2 * SCALE
            dxs *= np.subtract(1, phi, out=x)
            dxs += phi
            dxs *= dys
        return dx


def _phi(x: Array, out: Array) -> None:
    """(1 + tanh(SCALE * x * (1 + CUBIC x^2))) / 2."""
    np.multiply(x, x, out=out)
    out *= CUBIC
    out += 1
    out *= x
    out *= SCALE
    np.tanh(out, out=out)
    out += 1
    out *= 0.5


def _blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """The arrays in pieces of at most BLOCK elements, as flat views where they are contiguous."""
    flat = [np.ascontiguousarray(a).reshape(-1) for a in arrays]
    for start in range(0, flat[0].size, BLOCK):
        yield tuple(a[start : start + BLOCK] for a in flat)
