"""`random_bits`: a thread for four words."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace
from xformer.backends.cupy.module import Source, blocks, empty, launch

from xformer.checks import require_sizes
from xformer.dispatch import kernel
from xformer.ops.random_bits import MASK, Key, require_key
from xformer.ops.random_bits import random_bits as reference
from xformer.shapes import require_array
from xformer.typing import Array

SOURCE = Source(__file__)
BLOCK = 256  # threads, of four words each


def step_is_an_array(like: Array, *, key: Key, size: int) -> str | None:
    """Why the kernel cannot run."""
    return on_device(key)


@kernel(reference, "cupy", unsupported=step_is_an_array)
def random_bits(like: Array, *, key: Key, size: int) -> Array:
    """Philox4x32-10, int64."""
    require_key("random_bits", key)
    require_sizes("random_bits", 0, size=size)
    require_array("random_bits", "like", like)
    out = empty(like, (size,), array_namespace(like).int64)
    args = (out, size, *words(key))
    grid = (blocks(size, 4 * BLOCK),)
    launch(SOURCE, "random_bits", like, grid=grid, block=(BLOCK,), args=args)
    return out


def words(key: Key) -> tuple[int, int, int, int]:
    """The key as the kernels take it: key0, key1, site, step."""
    return key.seed & MASK, key.seed >> 32, key.site, key.step


def on_device(key: Any) -> str | None:
    """Why kernels, whose arguments come from the host, cannot run with this key."""
    plain = not isinstance(key, Key) or isinstance(key.step, int)
    return None if plain else "key.step is an array"
