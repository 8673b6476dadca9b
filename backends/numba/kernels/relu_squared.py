"""`relu_squared` by the kernel that all activations share (`activations`)."""

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


@kernel(ops.relu_squared, "numba.kernels", unsupported=unsupported)
def relu_squared(x: Array) -> tuple[Array, NumbaActivationCache]:
    """y = max(0, x)^2."""
    return activate("relu_squared", x, ops.relu_squared.reference, FORMULAS["relu_squared"])
