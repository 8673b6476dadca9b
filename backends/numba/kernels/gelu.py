"""`gelu`: see `activations`."""

from __future__ import annotations

from functools import partial

from xformer import ops
from xformer.backends.numba.kernels.activations import (
    FORMULAS,
    ActivationCache,
    activate,
)
from xformer.backends.numba.kernels.layout import unrecordable
from xformer.dispatch import kernel
from xformer.typing import Array

NAMES = {"none": "gelu", "tanh": "gelu_tanh"}  # of activations


def unsupported(x: Array, *, approximate: str = "none") -> str | None:
    """Why the kernel cannot run."""
    return unrecordable(x) if approximate in NAMES else "only the forms none and tanh"


@kernel(ops.gelu, "numba.kernels", unsupported=unsupported)
def gelu(x: Array, *, approximate: str = "none") -> tuple[Array, ActivationCache]:
    """y = x * Phi(x)."""
    reference = partial(ops.gelu.reference, approximate=approximate)
    return activate("gelu", x, reference, FORMULAS[NAMES[approximate]])
