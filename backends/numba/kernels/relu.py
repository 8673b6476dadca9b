"""`relu`: see `activations`."""

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


@kernel(ops.relu, "numba.kernels", unsupported=not_float32)
def relu(x: Array) -> tuple[Array, ActivationCache]:
    """y = max(0, x)."""
    return activate("relu", x, ops.relu.reference, FORMULAS["relu"])
