"""`random_bits`: each thread writes four words."""

from __future__ import annotations

from typing import Any

from xformer.backends.cupy.module import Source, blocks, empty, launch
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_sizes
from xformer.dispatch.shapes import require_array
from xformer.ops.random_bits import MASK, RandomKey, require_key
from xformer.ops.random_bits import random_bits as reference

SOURCE = Source(__file__)
BLOCK = 256  # threads; each writes four words


def unsupported(like: Array, *, key: RandomKey, size: int) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return not_a_step(key, like)


@kernel(reference, "cupy", unsupported=unsupported)
def random_bits(like: Array, *, key: RandomKey, size: int) -> Array:
    """Return `size` random words of 32 bits as int64 (size,), by Philox4x32-10.

    like: an array of the library and device of the result
    """
    require_key("random_bits", key)
    require_sizes("random_bits", 0, size=size)
    require_array("random_bits", "like", like)
    out = empty(like, (size,), array_namespace(like).int64)
    args = (out, size, *words(key))
    grid = (blocks(size, 4 * BLOCK),)
    launch(SOURCE, "random_bits", like, grid=grid, block=(BLOCK,), args=args)
    return out


def words(key: RandomKey) -> tuple[int, int, int, int, Array | None]:
    """Return the kernels' arguments for a key: key0, key1, site, step, and step on the device.

    If key.step is an array, the fourth is 0 and the fifth the array; else the fifth is None.
    """
    seed = key.seed & MASK, key.seed >> 32, key.site
    return (*seed, key.step, None) if isinstance(key.step, int) else (*seed, 0, key.step)


def not_a_step(key: Any, like: Array) -> str | None:
    """Return why kernels cannot run with this key, or None if they can.

    key.step must be an int, or an int64 array () of the library of `like`.
    """
    if not isinstance(key, RandomKey) or isinstance(key.step, int):
        return None
    is_int64 = type(key.step) is type(like) and key.step.dtype.name == "int64"
    return (
        None
        if is_int64 and key.step.shape == ()
        else "key.step must be an int, or int64 of shape ()"
    )
