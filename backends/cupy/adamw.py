"""A step of AdamW in one launch, over arrays of any shape: flat buffers of all parameters too."""

from __future__ import annotations

from xformer.backends.cupy.module import Source, blocks, contiguous, empty, launch, wide

from xformer.typing import Array

SOURCE = Source(__file__, WIDE=(0, 1))
BLOCK = 256  # threads, each with a pack of elements


def adamw(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    in_place: bool = False,
) -> tuple[Array, Array, Array]:
    """p, m and v after step `step`, the first being 1; as `xformer.optim.adamw` makes them.

    in_place: p, m and v, contiguous, are overwritten.
    """
    p, g, m, v = (contiguous(a) for a in (p, g, m, v))
    new = (p, m, v) if in_place else (empty(p), empty(p), empty(p))
    beta1, beta2 = betas
    keep, rate, root = 1 - lr * weight_decay, lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    numbers = (keep, rate, root, beta1, 1 - beta1, beta2, 1 - beta2, eps)
    vec = wide(p.size, p, g, m, v, *new)
    grid = blocks(p.size, BLOCK * (16 // p.dtype.itemsize if vec else 1))
    launch(
        SOURCE,
        "adamw",
        p,
        grid=(grid,),
        block=(BLOCK,),
        args=(p, g, m, v, *new, p.size, *map(float, numbers)),
        WIDE=vec,
    )
    return new
