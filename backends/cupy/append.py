"""`append` in place: behind what is there, or in a column whose number lies on the device."""

from __future__ import annotations

from typing import Any

from xformer.backends.append import append as in_place
from xformer.backends.append import columns_are_fixed
from xformer.backends.cupy.module import EVERY, Source, blocks, contiguous, launch

from xformer.dispatch import kernel
from xformer.layers.past import Past
from xformer.layers.past import append as reference
from xformer.shapes import STORED
from xformer.typing import Array

SOURCE = Source(__file__, dtypes=EVERY)
BLOCK = 256  # threads, each with an element

append = kernel(reference, "cupy", unsupported=columns_are_fixed)(in_place)


def no_column(k: Array, v: Array, *, past: Past) -> str | None:
    """Why `append_at` cannot run."""
    keys, values, _, at = past
    if at is None or keys is None or values is None:
        return "columns are not fixed"
    if any(type(x) is not type(k) for x in (v, keys, values, at)) or at.dtype.name != "int64":
        return "past.at must be int64, and all arrays of one library"
    if not all(x.dtype == k.dtype for x in (v, keys, values)):
        return "keys and values must be of one dtype, that of the past"
    if not (keys.flags.c_contiguous and values.flags.c_contiguous):
        return "the past is not contiguous"
    return None


@kernel(reference, "cupy", unsupported=no_column, stores=STORED)
def append_at(k: Array, v: Array, *, past: Past) -> Past:
    """In the past's own arrays, which are written over."""
    if k.shape[2] != 1:
        raise ValueError(f"append: in fixed columns one token comes at a time, got {k.shape[2]}")
    k, v = contiguous(k), contiguous(v)
    keys: Any = past.k
    n_batch, n_groups, columns, width = keys.shape
    rows, value_width = n_batch * n_groups, v.shape[3]
    launch(
        SOURCE,
        "append",
        k,
        grid=(blocks(rows * (width + value_width), BLOCK),),
        block=(BLOCK,),
        args=(k, v, keys, past.v, past.at, rows, columns, width, value_width),
    )
    return past
