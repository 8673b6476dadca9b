"""Recorded functions for tests: run by their kernels and without, and judged in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xformer import reference_only
from xformer.backends.numba.program.binding import Code
from xformer.backends.numba.program.run import Recorded, gap_free, layout_of

TINY = 1e-6  # of the largest number: some roundings of float32
THREADS = 1, 3, 8  # 2 elsewhere


def record(fn: Callable[..., Any], arrays: Sequence[np.ndarray], threads: int = 2) -> Recorded:
    """fn(*arrays) -> a list of arrays."""
    return Recorded(fn, [layout_of(gap_free(x)) for x in arrays], threads)


def names(recorded: Recorded, *, native: bool = True) -> list[str]:
    """Of the instructions that run by a kernel, or of the others."""
    return [one.name for one in recorded.code if (one.native is not None) == native]


def without_native(recorded: Recorded) -> Recorded:
    """The same, each instruction on NumPy's arrays: for functions of the array API alone."""
    other = copy.copy(recorded)
    other.code = [one._replace(native=None) for one in recorded.code]
    other._run = Code(other.code, recorded.plan.offsets, 1)
    return other


def judged(
    fn: Callable[..., Any], arrays: Sequence[np.ndarray], threads: int = 2, *, others: Any = ()
) -> Recorded:
    """The recorded fn, no further from float64 than twice the references, and twice the same bits.

    others: names of the instructions that have no kernel.
    """
    run = record(fn, arrays, threads)
    assert set(names(run, native=False)) <= set(others)
    found, again = run(*arrays), run(*arrays)
    with reference_only():
        plain, exact = fn(*arrays), fn(*map(_widened, arrays))
    for got, same, own, wanted in zip(found, again, plain, exact, strict=True):
        np.testing.assert_array_equal(got, same)
        assert (got.shape, got.dtype) == (own.shape, own.dtype)
        largest = float(np.abs(wanted).max(initial=0))
        assert _error(got, wanted) <= 2 * _error(own, wanted) + TINY * largest
    return run


def _widened(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if x.dtype == np.float32 else x


def _error(x: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(x - wanted).max(initial=0))
