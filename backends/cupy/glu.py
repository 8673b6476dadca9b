"""`glu`: activation and product in one launch forward, and one backward."""

from __future__ import annotations

from typing import NamedTuple

from xformer.backends.cupy.activation import elementwise
from xformer.backends.cupy.module import EVERY, Source, contiguous, empty
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import STORED
from xformer.ops.activation import BUILT_IN
from xformer.ops.glu import glu as reference

SOURCE = Source(__file__, dtypes=EVERY, WIDE=(0, 1), ACTIVATION=BUILT_IN)


def unsupported(gate: Array, up: Array, *, activation: str = "silu") -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return None if activation in BUILT_IN else f"no activation {activation!r}"


@kernel(reference, "cupy", unsupported=unsupported, storage_dtypes=STORED)
def glu(gate: Array, up: Array, *, activation: str = "silu") -> tuple[Array, CupyGluCache]:
    """Return (y = act(gate) * up, cache), elementwise; all arrays are (..., F)."""
    gate, up, y = contiguous(gate), contiguous(up), empty(gate)
    elementwise(SOURCE, "glu_forward", (gate, up, y), ACTIVATION=activation)
    return y, CupyGluCache(gate, up, activation)


@short
class CupyGluCache(NamedTuple):
    """Saved by `glu` for backward; the activation is recomputed."""

    gate: Array  # (..., F)
    up: Array  # (..., F)
    activation: str

    def backward(self, dy: Array) -> tuple[Array, Array]:
        """Return dgate = dy * up * act'(gate) and dup = dy * act(gate)."""
        require_gradient("glu", "dy", dy, self.gate)
        arrays = self.gate, self.up, contiguous(dy), empty(dy), empty(dy)
        elementwise(SOURCE, "glu_backward", arrays, ACTIVATION=self.activation)
        return arrays[3], arrays[4]
