"""Clips gradients by their global norm on the device; each launch takes many leaves."""

from __future__ import annotations

from collections.abc import Sequence

from xformer.backends.cupy.leaves import BLOCK, LEAVES, launches
from xformer.backends.cupy.module import Source, blocks, contiguous, empty, launch, not_alike
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.optim.clip import clip_leaves as reference

SOURCE = Source(__file__, WIDE=(0, 1), LEAVES=(LEAVES,))
SHARE = 1 << 14  # elements that a block sums: fixed, so that sums are the same on every device
SCALED = 1 << 12  # elements that a block multiplies by the factor


def unsupported(grads: Sequence[Array], *, max_norm: float, donate: bool = False) -> str | None:
    """Return why the kernel cannot run, or None if it can.

    All of `grads` must be CuPy arrays of one dtype. max_norm and donate do not matter.
    """
    return not_alike(grads)


@kernel(reference, "cupy", unsupported=unsupported)
def clip_leaves(
    grads: Sequence[Array], *, max_norm: float, donate: bool = False
) -> tuple[Sequence[Array], Array]:
    """Return the clipped gradients, and their global norm () before clipping.

    The gradients are new arrays, even if `donate`: to work in place, the host would have to wait
    until it knows whether the norm is finite.
    """
    leaves = [contiguous(g) for g in grads]
    norm, scale = norm_and_scale(leaves, max_norm)
    clipped = [empty(g) for g in leaves]
    for args, options in launches(SCALED, leaves, clipped):
        launch(SOURCE, "scaled", scale, args=(*args, scale), **options)
    return clipped, norm


def norm_and_scale(leaves: Sequence[Array], max_norm: float) -> tuple[Array, Array]:
    """Return (norm, scale), both (): the global norm of the leaves, and the factor that clips them.

    leaves: at least one, contiguous, of one dtype
    """
    parts = empty(leaves[0], (sum(blocks(x.size, SHARE) for x in leaves),))
    start = 0
    for args, options in launches(SHARE, leaves):
        launch(SOURCE, "squares", parts, args=(*args, parts, start), **options)
        (grid,) = options["grid"]
        start += grid
    norm, scale = empty(parts, ()), empty(parts, ())
    launch(
        SOURCE,
        "norm_of_parts",
        parts,
        grid=(1,),
        block=(BLOCK,),
        args=(parts, norm, scale, start, float(max_norm)),
        WIDE=0,
        LEAVES=LEAVES,
    )
    return norm, scale
