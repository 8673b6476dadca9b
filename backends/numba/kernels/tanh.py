"""`tanh` by the kernel that all activations share (`activations`)."""

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


@kernel(ops.tanh, "numba.kernels", unsupported=unsupported)
def tanh(x: Array) -> tuple[Array, NumbaActivationCache]:
    """y = tanh(x)."""
    return activate("tanh", x, ops.tanh.reference, FORMULAS["tanh"])
