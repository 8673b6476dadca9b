"""One step of Adam over all leaves. Each part of a leaf stays in the cache for the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends.numpy.leaves import map_leaves, share_no_memory, unsupported_leaves
from xformer.backends.numpy.threads import scratch
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.optim.adam import adam_update as reference


def unsupported(
    params: Sequence[Array],
    grads: Sequence[Array],
    m: Sequence[Array],
    v: Sequence[Array],
    *,
    rate: Any,
    root: float,
    keep: Any,
    betas: tuple[float, float],
    eps: float,
    donate: bool = False,
) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return unsupported_leaves(params)


@kernel(reference, "numpy", unsupported=unsupported)
def adam_update(
    params: Sequence[Array],
    grads: Sequence[Array],
    m: Sequence[Array],
    v: Sequence[Array],
    *,
    rate: Any,
    root: float,
    keep: Any,
    betas: tuple[float, float],
    eps: float,
    donate: bool = False,
) -> tuple[list[Array], list[Array], list[Array]]:
    """Return new params, m and v: p = keep p - (rate root) m / (sqrt(v) + eps root).

    It has one division less than the formula of the reference.
    """
    beta1, beta2 = betas
    keep, rate, eps = float(keep), float(rate) * float(root), eps * float(root)

    def step(*parts: Array) -> None:
        p, g, m, v, new_p, new_m, new_v = parts
        t = scratch("adam", g.shape, g.dtype)
        np.multiply(m, beta1, out=new_m)
        np.add(new_m, np.multiply(g, 1 - beta1, out=t), out=new_m)
        np.multiply(np.multiply(g, 1 - beta2, out=t), g, out=t)  # g^2 may overflow
        np.add(np.multiply(v, beta2, out=new_v), t, out=new_v)
        np.add(np.sqrt(new_v, out=t), eps, out=t)
        np.multiply(np.divide(new_m, t, out=t), rate, out=t)
        np.subtract(p if keep == 1 else np.multiply(p, keep, out=new_p), t, out=new_p)

    donate = donate and share_no_memory([*params, *m, *v])
    params, m, v = map_leaves(step, params, grads, m, v, replaced=(0, 2, 3), donate=donate)
    return params, m, v
