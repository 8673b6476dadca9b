"""`softcap` by the kernel that all activations share (`activations`)."""

from __future__ import annotations

from functools import partial

from xformer import ops
from xformer.backends.numba.kernels.activations import TANH, NumbaActivationCache, activate
from xformer.backends.numba.kernels.layout import unrecordable
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_cap


def unsupported(x: Array, *, cap: float) -> str | None:
    """Return why the numba kernel of `softcap` cannot run, or None if it can.

    It needs x in float32 that is no constant of the program.
    """
    return unrecordable(x)


@kernel(ops.softcap, "numba.kernels", unsupported=unsupported)
def softcap(x: Array, *, cap: float) -> tuple[Array, NumbaActivationCache]:
    """y = cap * tanh(x / cap)."""
    cap = require_cap("softcap", cap, "cap")
    return activate("softcap", x, partial(ops.softcap.reference, cap=cap), (TANH, cap))
