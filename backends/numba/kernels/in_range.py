"""`in_range`, whose ids are looked at in each run."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.program import program
from xformer.backends.numba.program.namespace import contiguous
from xformer.backends.numba.program.native import NOTHING, Native, native, numbers, words
from xformer.checks import in_range
from xformer.dispatch import kernel


@kernel(in_range, "numba.kernels")
def _in_range(ids: Any, *, size: int) -> bool:
    """True; a run raises ValueError where it is not."""
    if ids.is_constant or not ids.size:
        return bool(((ids.layout >= 0) & (ids.layout < size)).all())

    def check(ids: Any) -> None:
        if ids.size and not (ids.min() >= 0 and ids.max() < size):
            got = f"got ids from {ids.min()} to {ids.max()}"
            raise ValueError(f"ids must lie in [0, {size}), {got}")

    recorder, own = program.of([ids]), None
    assert recorder is not None
    if ids.dtype == np.int64:
        ids, own = contiguous(ids), Native(look, (*NOTHING, ids.size, size))
    recorder.emit(f"in_range {size}", check, [], [ids], own, checks=True)
    return True


@native
def look(args: int, piece: int, pieces: int, memory: int) -> None:
    """ids (n,); `NOTHING`, n, size. What it finds is in the words of the run, as of all checks."""
    a = numbers(args, 5)
    ids = words(words(args, 1)[0], a[3])
    for i in range(a[3]):
        a[1], a[2] = min(a[1], ids[i]), max(a[2], ids[i])
    a[0] = a[1] < 0 or a[2] >= a[4]
