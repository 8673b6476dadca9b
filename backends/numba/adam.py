"""A step of Adam over all leaves, each element once through all of its formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from xformer.backends.numba.compiled import elementwise, inlined
from xformer.backends.numpy.leaves import over, unlike

from xformer.typing import Array


def not_float32(
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
    """Why the kernel cannot run."""
    return unlike(params) if params[0].dtype == np.float32 else "only float32"


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
    """p <- keep p - rate m / (sqrt(v) / root + eps)."""
    beta1, beta2 = betas
    numbers = (beta1, 1 - beta1, beta2, 1 - beta2, float(rate), 1 / float(root), eps, float(keep))
    step = partial(_step, np.asarray(numbers, np.float32))
    params, m, v = over(step, params, grads, m, v, replaced=(0, 2, 3), donate=donate)
    return params, m, v


@elementwise
def _step(numbers: Any, p: Any, g: Any, m: Any, v: Any, new_p: Any, new_m: Any, new_v: Any) -> None:
    if _same(p, new_p) and _same(m, new_m) and _same(v, new_v):
        for i in range(p.size):  # read by another name, it might depend on what was written before
            new_p[i], new_m[i], new_v[i] = _moved(numbers, new_p[i], g[i], new_m[i], new_v[i])
    else:
        for i in range(p.size):
            new_p[i], new_m[i], new_v[i] = _moved(numbers, p[i], g[i], m[i], v[i])


@elementwise
def _same(x: Any, y: Any) -> Any:
    return x.ctypes.data == y.ctypes.data


@inlined
def _moved(numbers: Any, p: Any, g: Any, m: Any, v: Any) -> Any:
    """What becomes of a parameter and its moments."""
    old1, share1, old2, share2, rate, root, eps, keep = numbers
    mean = old1 * m + share1 * g
    square = old2 * v + share2 * (g * g)
    return keep * p - rate * mean / (math.sqrt(square) * root + eps), mean, square
