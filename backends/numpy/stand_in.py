"""Stand-ins for parameters: they take no memory, and their products are counted, not computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.base.typing import Array

_ZERO = {dtype: np.zeros((), dtype) for dtype in ("float32", "float64")}


class Tally:
    """The FLOPs of products with stand-ins. A multiplication and an addition count as 2."""

    def __init__(self) -> None:
        self.flops = 0


class StandIn(np.ndarray):
    """An array of zeros whose elements are all the same number in memory.

    - A view of a stand-in is a stand-in. Other operations return plain arrays.
    - A matmul returns zeros at once, and adds its FLOPs to `tally`.
    - A ufunc whose `out` is a stand-in computes nothing.
    - `np.empty_like` returns a stand-in for a new array (`is_unmade`).
    """

    tally: Tally

    def __array_finalize__(self, parent: Any) -> None:
        self.tally = getattr(parent, "tally", Tally())

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [_plain(x) for x in inputs]
        out = options.get("out", (None,))[0]
        if isinstance(out, StandIn):
            return out
        if ufunc is not np.matmul:
            return getattr(ufunc, method)(*plain, **options)
        x, w = plain
        lead = np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
        y = np.zeros((*lead, x.shape[-2], w.shape[-1]), np.result_type(x, w))
        self.tally.flops += 2 * y.size * x.shape[-1]
        if out is not None:
            out[...] = y
        return y

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if function is np.take:  # NumPy would copy the whole array first
            return _take(*args, **options)
        if function is np.zeros_like:  # the state of an optimiser
            return stand_in(args[0].shape, args[0].dtype.name, args[0].tally)
        if function is np.empty_like:
            return np.broadcast_to(np.zeros((), args[0].dtype), args[0].shape).view(StandIn)
        y = super().__array_function__(function, types, args, options)
        return y if is_stand_in(y) else _plain(y)


def stand_in(shape: Sequence[int], dtype: str, tally: Tally) -> StandIn:
    """Return a stand-in for a parameter. Its products are added to `tally`."""
    array = np.broadcast_to(_ZERO[dtype], tuple(shape)).view(StandIn)
    array.tally = tally
    return array


def is_unmade(array: Array) -> bool:
    """Return whether `array` stands in for a new array of a parameter's shape, as its gradient."""
    return isinstance(array, StandIn) and not is_stand_in(array)


def is_stand_in(array: Array) -> bool:
    """Return whether `array` is a stand-in for a parameter, or a view of a stand-in."""
    return any(np.may_share_memory(array, zero) for zero in _ZERO.values())


def _plain(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, StandIn) else x


def _take(x: np.ndarray, ids: np.ndarray, *, axis: int) -> np.ndarray:
    return np.zeros((*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :]), x.dtype)
