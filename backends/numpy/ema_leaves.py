"""Update an exponential moving average of all leaves in one job."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xformer.backends.numpy.leaves import map_leaves, share_no_memory, unsupported_leaves
from xformer.backends.numpy.threads import scratch
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.optim.ema import ema_leaves as reference


def unsupported(
    average: Sequence[Array], params: Sequence[Array], *, share: float, donate: bool = False
) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return unsupported_leaves(average)


@kernel(reference, "numpy", unsupported=unsupported)
def ema_leaves(
    average: Sequence[Array], params: Sequence[Array], *, share: float, donate: bool = False
) -> Sequence[Array]:
    """Return average + share * (params - average)."""

    def step(a: Array, p: Array, out: Array) -> None:
        t = scratch("ema", a.shape, a.dtype)
        np.add(a, np.multiply(np.subtract(p, a, out=t), share, out=t), out=out)

    donate = donate and share_no_memory([*average, *params])
    (new,) = map_leaves(step, average, params, replaced=(0,), donate=donate)
    return new
