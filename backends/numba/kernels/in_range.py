"""`in_range`, whose ids are looked at in each run."""

from __future__ import annotations

from typing import Any

from xformer.backends.numba.program import program

from xformer.checks import in_range
from xformer.dispatch import kernel


@kernel(in_range, "numba.kernels")
def _in_range(ids: Any, *, size: int) -> bool:
    """True; a run raises ValueError where it is not."""
    if ids.is_constant:
        return bool(((ids.layout >= 0) & (ids.layout < size)).all())

    def check(ids: Any) -> None:
        if ids.size and not (ids.min() >= 0 and ids.max() < size):
            got = f"got ids from {ids.min()} to {ids.max()}"
            raise ValueError(f"ids must lie in [0, {size}), {got}")

    recorder = program.of([ids])
    assert recorder is not None
    recorder.emit(f"in_range {size}", check, [], [ids], checks=True)
    return True
