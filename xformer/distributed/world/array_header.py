"""The dtype and the shape of an array as integers, which are sent before its bytes."""

from __future__ import annotations

import numpy as np

from xformer.base.typing import Array

AXES = 8  # most axes of an array
HEAD = 2 + AXES  # int64: dtype, number of axes, sizes


def head(array: Array) -> np.ndarray:
    """The dtype and the shape of an array (HEAD,). TypeError if it cannot be sent."""
    if array.dtype.kind in "OV" or array.ndim > AXES:  # V: also bfloat16 of ml_dtypes
        raise TypeError(
            f"arrays that are sent must hold numbers and have at most {AXES} axes, got dtype "
            f"{array.dtype} and {array.ndim} axes"
        )
    name = array.dtype.str.encode().ljust(8, b"\0")
    sizes = [array.ndim, *array.shape, *[0] * (AXES - array.ndim)]
    return np.concatenate([np.frombuffer(name, np.int64), np.asarray(sizes, np.int64)])


def described(head: np.ndarray) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and the dtype of a `head`."""
    dtype = np.dtype(head[:1].tobytes().rstrip(b"\0").decode())
    return tuple(head[2 : 2 + head[1]].tolist()), dtype
