"""`relu_squared`: see `activations`."""

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


@kernel(ops.relu_squared, "numba.kernels", unsupported=not_float32)
def relu_squared(x: Array) -> tuple[Array, ActivationCache]:
    """y = max(0, x)^2."""
    return activate("relu_squared", x, ops.relu_squared.reference, FORMULAS["relu_squared"])
