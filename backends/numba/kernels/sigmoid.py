"""`sigmoid` by the kernel that all activations share (`activations`)."""

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


@kernel(ops.sigmoid, "numba.kernels", unsupported=unsupported)
def sigmoid(x: Array) -> tuple[Array, NumbaActivationCache]:
    """y = 1 / (1 + exp(-x))."""
    return activate("sigmoid", x, ops.sigmoid.reference, FORMULAS["sigmoid"])
