"""`softcap`: see `activations`."""

from __future__ import annotations

from functools import partial

from xformer import ops
from xformer.backends.numba.kernels.activations import TANH, ActivationCache, activate
from xformer.backends.numba.kernels.layout import unrecordable
from xformer.checks import require_cap
from xformer.dispatch import kernel
from xformer.typing import Array


def not_float32(x: Array, *, cap: float) -> str | None:
    """Why the kernel cannot run."""
    return unrecordable(x)


@kernel(ops.softcap, "numba.kernels", unsupported=not_float32)
def softcap(x: Array, *, cap: float) -> tuple[Array, ActivationCache]:
    """y = cap * tanh(x / cap)."""
    cap = require_cap("softcap", cap, "cap")
    return activate("softcap", x, partial(ops.softcap.reference, cap=cap), (TANH, cap))
