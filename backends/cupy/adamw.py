"""A step of Adam in few launches over all leaves."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from xformer.backends.cupy.leaves import LEAVES, launches
from xformer.backends.cupy.module import Source, contiguous, empty, launch, not_alike

from xformer.dispatch import kernel
from xformer.optim.adam import adam_update as reference
from xformer.typing import Array

SOURCE = Source(__file__, WIDE=(0, 1), LEAVES=(LEAVES,))
SHARE = 1 << 12  # elements of a block


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
    params, grads, m, v = ([contiguous(x) for x in leaves] for leaves in (params, grads, m, v))
    new_p, new_m, new_v = ([x if donate else empty(x) for x in old] for old in (params, m, v))
    for args, options in launches(SHARE, params, grads, m, v, new_p, new_m, new_v):
        launch(SOURCE, "adamw", params[0], args=(*args, *numbers), **options)
    return new_p, new_m, new_v
