"""`silu` by the kernel that all activations share (`activations`)."""

from __future__ import annotations

from xformer import ops
from xformer.backends.numba.kernels.activations import (
    FORMULAS,
    NumbaActivationCache,
    activate,
    unsupported,
)
from xformer.base.typing import Array
from xformer.dispatch import kernel


@kernel(ops.silu, "numba.kernels", unsupported=unsupported)
def silu(x: Array) -> tuple[Array, NumbaActivationCache]:
    """y = x * sigmoid(x)."""
    return activate("silu", x, ops.silu.reference, FORMULAS["silu"])
