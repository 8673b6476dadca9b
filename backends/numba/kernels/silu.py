"""`silu`: see `activations`."""

from __future__ import annotations

from xformer import ops
from xformer.backends.numba.kernels.activations import (
    FORMULAS,
    ActivationCache,
    activate,
    not_float32,
)
from xformer.dispatch import kernel
from xformer.typing import Array


@kernel(ops.silu, "numba.kernels", unsupported=not_float32)
def silu(x: Array) -> tuple[Array, ActivationCache]:
    """y = x * sigmoid(x)."""
    return activate("silu", x, ops.silu.reference, FORMULAS["silu"])
