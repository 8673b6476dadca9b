"""`gelu` by the kernel that all activations share (`activations`)."""

from __future__ import annotations

from functools import partial

from xformer import ops
from xformer.backends.numba.kernels.activations import (
    FORMULAS,
    NumbaActivationCache,
    activate,
)
from xformer.backends.numba.kernels.layout import unrecordable
from xformer.base.typing import Array
from xformer.dispatch import kernel

FORMULA_OF = {"none": "gelu", "tanh": "gelu_tanh"}  # by `approximate`: the key in `FORMULAS`


def unsupported(x: Array, *, approximate: str = "none") -> str | None:
    """Return why the numba kernel of `gelu` cannot run, or None if it can.

    It needs approximate "none" or "tanh", and x in float32 that is no constant of the program.
    """
    return unrecordable(x) if approximate in FORMULA_OF else "only approximate none and tanh"


@kernel(ops.gelu, "numba.kernels", unsupported=unsupported)
def gelu(x: Array, *, approximate: str = "none") -> tuple[Array, NumbaActivationCache]:
    """y = x * Phi(x), or its approximation by tanh."""
    reference = partial(ops.gelu.reference, approximate=approximate)
    return activate("gelu", x, reference, FORMULAS[FORMULA_OF[approximate]])
