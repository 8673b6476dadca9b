"""`quick_gelu` by the kernel that all activations share (`activations`)."""

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


@kernel(ops.quick_gelu, "numba.kernels", unsupported=unsupported)
def quick_gelu(x: Array) -> tuple[Array, NumbaActivationCache]:
    """y = x * sigmoid(1.702 x)."""
    return activate("quick_gelu", x, ops.quick_gelu.reference, FORMULAS["quick_gelu"])
