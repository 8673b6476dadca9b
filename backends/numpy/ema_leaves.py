"""A moving average, all leaves in one job."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xformer.backends.numpy.leaves import apart, over, unlike
from xformer.backends.numpy.threads import scratch
from xformer.dispatch import kernel
from xformer.optim.ema import ema_leaves as reference
from xformer.typing import Array


def unsupported(
    average: Sequence[Array], params: Sequence[Array], *, share: float, donate: bool = False
) -> str | None:
    """All leaves must be as the first."""
    return unlike(average)


@kernel(reference, "numpy", unsupported=unsupported)
def ema_leaves(
    average: Sequence[Array], params: Sequence[Array], *, share: float, donate: bool = False
) -> Sequence[Array]:
    """As the reference."""

    def step(a: Array, p: Array, out: Array) -> None:
        t = scratch("ema", a.shape, a.dtype)
        np.add(a, np.multiply(np.subtract(p, a, out=t), share, out=t), out=out)

    donate = donate and apart([*average, *params])
    (new,) = over(step, average, params, replaced=(0,), donate=donate)
    return new
