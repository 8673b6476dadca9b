"""Soft capping of logits and scores."""

from __future__ import annotations

from typing import NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_cap, require_gradient
from xformer.dispatch.shapes import shapes


@overridable
@shapes("x (...)")
def softcap(x: Array, *, cap: float) -> tuple[Array, SoftcapCache]:
    """y = cap * tanh(x / cap), elementwise: |y| <= cap (Gemma 2, arXiv:2408.00118, section 2).

    x, y: any shape. ValueError unless cap is positive and finite.
    Derivation: docs/derivations/softcap.md
    """
    cap = require_cap("softcap", cap, "cap")
    y = cap * array_namespace(x).tanh(x / cap)
    return y, SoftcapCache(y, cap)


@short
class SoftcapCache(NamedTuple):
    """Saved by `softcap` for backward: y, which gives the derivative 1 - (y / cap)^2."""

    y: Array  # shape of x
    cap: float

    def backward(self, dy: Array) -> Array:
        """dx = dy * (1 - (y / cap)^2)."""
        require_gradient("softcap", "dy", dy, self.y)
        return dy * (1 - (self.y / self.cap) ** 2)
