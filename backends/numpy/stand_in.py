"""Parameters of no memory, whose products are counted in place of being computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.typing import Array

_ZERO = {dtype: np.zeros((), dtype) for dtype in ("float32", "float64")}


class Tally:
    """FLOPs of the products of stand-ins, 2 for a multiplication and an addition."""

    def __init__(self) -> None:
        self.flops = 0


class StandIn(np.ndarray):
    """Zeros that all lie in one place. Its views are stand-ins too, all else that it gives is not.

    A product with it gives zeros, at once, and is written in its tally. What is written to one goes
    nowhere. `np.empty_like` of it stands in for memory that would be new: see `is_unmade`.
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
        if function is np.take:  # which would make a copy of the whole, to take from
            return _take(*args, **options)
        if function is np.zeros_like:  # of an optimiser's state
            return stand_in(args[0].shape, args[0].dtype.name, args[0].tally)
        if function is np.empty_like:
            return np.broadcast_to(np.zeros((), args[0].dtype), args[0].shape).view(StandIn)
        y = super().__array_function__(function, types, args, options)
        return y if is_stand_in(y) else _plain(y)


def stand_in(shape: Sequence[int], dtype: str, tally: Tally) -> StandIn:
    """A parameter of that shape."""
    found = np.broadcast_to(_ZERO[dtype], tuple(shape)).view(StandIn)
    found.tally = tally
    return found


def is_unmade(array: Array) -> bool:
    """Whether an array stands in for one that is made of a parameter, as its gradient is."""
    return isinstance(array, StandIn) and not is_stand_in(array)


def is_stand_in(array: Array) -> bool:
    """Whether an array is a parameter's stand-in, or a view of one."""
    return any(np.may_share_memory(array, zero) for zero in _ZERO.values())


def _plain(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, StandIn) else x


def _take(x: np.ndarray, ids: np.ndarray, *, axis: int) -> np.ndarray:
    return np.zeros((*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :]), x.dtype)
