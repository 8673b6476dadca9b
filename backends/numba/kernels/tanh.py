"""`tanh`: see `activations`."""

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


@kernel(ops.tanh, "numba.kernels", unsupported=not_float32)
def tanh(x: Array) -> tuple[Array, ActivationCache]:
    """y = tanh(x)."""
    return activate("tanh", x, ops.tanh.reference, FORMULAS["tanh"])
