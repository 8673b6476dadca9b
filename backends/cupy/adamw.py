"""One step of Adam: each launch updates many leaves."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from xformer.backends.cupy.leaves import LEAVES, apart, launches
from xformer.backends.cupy.module import Source, contiguous, empty, launch, not_alike
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.optim._checks import in_dtype
from xformer.optim.adam import adam_update as reference

SOURCE = Source(__file__, WIDE=(0, 1), LEAVES=(LEAVES,))
SHARE = 1 << 12  # elements that a block updates


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
    """Return why the kernel cannot run, or None if it can.

    All parameters must have the library and dtype of the first. `rate`, `root` and `keep` must be
    numbers, or arrays () of that library.
    """
    numbers: tuple[Any, ...] = (rate, root, keep)
    for x in numbers:
        if not isinstance(x, Real) and (type(x) is not type(params[0]) or x.shape != ()):
            return "rate, root and keep must be numbers, or arrays () of the library of the leaves"
    return not_alike(params)


@kernel(reference, "cupy", unsupported=unsupported)
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
    """Return the updated parameters, m and v.

    They are the arguments' arrays, updated in place, if those are donated, contiguous and share no
    memory; else new arrays.
    """
    beta1, beta2 = betas
    step, on_device = (keep, rate, root), None
    if not all(isinstance(x, Real) for x in step):
        step, on_device = (0, 0, 0), _together(step, params[0])
    numbers = [float(x) for x in (*step, beta1, 1 - beta1, beta2, 1 - beta2, eps)]
    params, grads, m, v = ([contiguous(x) for x in leaves] for leaves in (params, grads, m, v))
    donate = donate and apart([*params, *m, *v])
    new_p, new_m, new_v = ([x if donate else empty(x) for x in old] for old in (params, m, v))
    for args, options in launches(SHARE, params, grads, m, v, new_p, new_m, new_v):
        launch(SOURCE, "adamw", params[0], args=(*args, on_device, *numbers), **options)
    return new_p, new_m, new_v


def _together(numbers: Sequence[Any], p: Array) -> Array:
    """Return one array of numbers and arrays (), without a synchronization."""
    xp = array_namespace(p)
    values = [in_dtype(x, p) for x in numbers]
    return xp.stack([xp.full((), x, dtype=p.dtype) if isinstance(x, float) else x for x in values])
