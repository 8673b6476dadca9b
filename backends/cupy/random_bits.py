"""`random_bits`: a thread for four words."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from xformer.backends.cupy.module import Source, blocks, empty, launch
from xformer.checks import require_sizes
from xformer.dispatch import kernel
from xformer.ops.random_bits import MASK, RandomKey, require_key
from xformer.ops.random_bits import random_bits as reference
from xformer.shapes import require_array
from xformer.typing import Array

SOURCE = Source(__file__)
BLOCK = 256  # threads, of four words each


def unsupported(like: Array, *, key: RandomKey, size: int) -> str | None:
    """Why the kernel cannot run."""
    return not_a_step(key, like)


@kernel(reference, "cupy", unsupported=unsupported)
def random_bits(like: Array, *, key: RandomKey, size: int) -> Array:
    """Philox4x32-10, int64."""
    require_key("random_bits", key)
    require_sizes("random_bits", 0, size=size)
    require_array("random_bits", "like", like)
    out = empty(like, (size,), array_namespace(like).int64)
    args = (out, size, *words(key))
    grid = (blocks(size, 4 * BLOCK),)
    launch(SOURCE, "random_bits", like, grid=grid, block=(BLOCK,), args=args)
    return out


def words(key: RandomKey) -> tuple[int, int, int, int, Array | None]:
    """The key as the kernels take it: key0, key1, site, step, and where on the device step lies."""
    seed = key.seed & MASK, key.seed >> 32, key.site
    return (*seed, key.step, None) if isinstance(key.step, int) else (*seed, 0, key.step)


def not_a_step(key: Any, like: Array) -> str | None:
    """Why kernels cannot run with this key: its step is an int, or lies where `like` does."""
    if not isinstance(key, RandomKey) or isinstance(key.step, int):
        return None
    there = type(key.step) is type(like) and key.step.dtype.name == "int64"
    return (
        None if there and key.step.shape == () else "key.step must be an int, or int64 of shape ()"
    )
