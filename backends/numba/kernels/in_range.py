"""`in_range`: a check of ids. A program repeats the check in each run."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.program.copies import contiguous
from xformer.backends.numba.program.native import NOTHING, Native, native, numbers, words
from xformer.backends.numba.program.program import program_of
from xformer.dispatch import kernel
from xformer.dispatch.checks import in_range


@kernel(in_range, "numba.kernels")
def _in_range(ids: Any, *, size: int, name: str = "ids") -> bool:
    """Return whether all ids are in [0, size).

    If the ids are known only in a run, return True and record a check; a run then raises ValueError
    if an id is out of range.
    """
    if ids.is_constant or not ids.size:
        return bool(((ids.layout >= 0) & (ids.layout < size)).all())

    def check(ids: Any) -> None:
        if ids.size and not (ids.min() >= 0 and ids.max() < size):
            got = f"got ids from {ids.min()} to {ids.max()}"
            raise ValueError(f"{name} must lie in [0, {size}), {got}")

    recorder, compiled, label = program_of(ids), None, f"in_range {size}"
    if any(x.name == label and _is_same(x.ins[0], ids) for x in recorder.code):
        return True
    if ids.dtype == np.int64:
        ids, compiled = contiguous(ids), Native(find_range, (*NOTHING, ids.size, size))
    recorder.emit(label, [], [ids], compiled, run=check, raises=check)
    return True


def _is_same(x: Any, y: Any) -> bool:
    """Return whether two arrays of a program are the same view of the same memory."""
    return (x.buffer, x.offset, x.strides, x.shape) == (y.buffer, y.offset, y.strides, y.shape)


@native
def find_range(args: int, piece: int, pieces: int, memory: int) -> None:
    """Find the least and the largest of all ids, and whether one is outside [0, size).

    inputs: ids (n,). integers: three results (failed, least, largest; at first `NOTHING`), n, size.
    A check has no outputs: it writes the results over the first three numbers.
    """
    a = numbers(args, 5)
    ids = words(words(args, 1)[0], a[3])
    for i in range(a[3]):
        a[1], a[2] = min(a[1], ids[i]), max(a[2], ids[i])
    a[0] = a[1] < 0 or a[2] >= a[4]
