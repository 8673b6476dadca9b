"""`relu` by the kernel that all activations share (`activations`)."""

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


@kernel(ops.relu, "numba.kernels", unsupported=unsupported)
def relu(x: Array) -> tuple[Array, NumbaActivationCache]:
    """y = max(0, x)."""
    return activate("relu", x, ops.relu.reference, FORMULAS["relu"])
