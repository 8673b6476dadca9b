"""The linear map, y = x w + b."""

from __future__ import annotations

import math
from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import shapes


@overridable
@shapes("x (..., I)  w (I, O)  b (O)")
def linear(
    x: Array, w: Array, b: Array | None = None, *, trainable: bool = True
) -> tuple[Array, LinearCache]:
    """y = x w + b over the last axis.

    x: (..., I)   w: (I, O)   b: (O,) or None   y: (..., O)
    trainable: False: w is not trained; x is not saved, and dw is None.

    ValueError if shapes do not fit, TypeError if dtypes or libraries differ.
    Derivation: docs/derivations/linear.md
    """
    xp = array_namespace(x)
    y = xp.reshape(_rows(x) @ w, (*x.shape[:-1], w.shape[1]))
    if b is not None:
        y = y + b
    return y, LinearCache(x if trainable else None, w, b is not None, x.shape)


@short
class LinearCache(NamedTuple):
    """Saved by `linear` for backward: x for dw (not if w is not trained), and w for dx."""

    x: Array | None  # (..., I); None: w is not trained
    w: Array  # (I, O)
    has_b: bool
    x_shape: tuple[int, ...]

    def backward(self, dy: Array) -> tuple[Array, Array | None, Array | None]:
        """dx = dy w^T, dw = x^T dy, db = sum of dy over all axes but the last.

        dw is None unless w is trainable; db is None without b.
        """
        require_gradient("linear", "dy", dy, self.w, (*self.x_shape[:-1], self.w.shape[1]))
        xp = array_namespace(dy)
        dy_rows = _rows(dy)  # (N, O)
        dx = xp.reshape(dy_rows @ self.w.T, self.x_shape)
        dw = None if self.x is None else _rows(self.x).T @ dy_rows
        db = xp.sum(dy_rows, axis=0) if self.has_b else None
        return dx, dw, db


def _rows(x: Array) -> Array:
    # Every library has fast two-dimensional products. -1 as a size fails on empty arrays.
    return array_namespace(x).reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
