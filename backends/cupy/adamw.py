"""A step of Adam in one launch a leaf."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from xformer.backends.cupy.module import (
    Source,
    blocks,
    contiguous,
    empty,
    launch,
    not_alike,
    wide,
)

from xformer.dispatch import kernel
from xformer.optim.adam import adam_update as reference
from xformer.typing import Array

SOURCE = Source(__file__, WIDE=(0, 1))
BLOCK = 256  # threads, each with a pack of elements


def rate_is_an_array(
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
    """A rate on the device would have to be waited for."""
    if not all(isinstance(x, Real) for x in (rate, root, keep)):
        return "rate, root and keep must be numbers of the host"
    return not_alike(params)


@kernel(reference, "cupy", unsupported=rate_is_an_array)
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
    """New arrays, or the old ones where they are donated and contiguous."""
    beta1, beta2 = betas
    numbers = [float(x) for x in (keep, rate, root, beta1, 1 - beta1, beta2, 1 - beta2, eps)]
    rows = [_step(leaf, numbers, donate) for leaf in zip(params, grads, m, v, strict=True)]
    p, m, v = (list(column) for column in zip(*rows, strict=True))
    return p, m, v


def _step(leaf: tuple[Array, ...], numbers: list[float], donate: bool) -> tuple[Array, ...]:
    """p, m and v of a leaf."""
    p, g, m, v = (contiguous(x) for x in leaf)
    new = tuple(x if donate else empty(x) for x in (p, m, v))
    vec = wide(p.size, p, g, m, v, *new)
    launch(
        SOURCE,
        "adamw",
        p,
        grid=(blocks(p.size, BLOCK * (16 // p.dtype.itemsize if vec else 1)),),
        block=(BLOCK,),
        args=(p, g, m, v, *new, p.size, *numbers),
        WIDE=vec,
    )
    return new
