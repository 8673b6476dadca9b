"""Checks that shapes alone cannot make, each with one wording for all ops."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, is_array_api_obj

from xformer.dispatch import library_of, overridable
from xformer.typing import Array


def require_axis(op: str, x: Array, axis: int) -> None:
    """ValueError unless `axis` exists in x and holds at least one element."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{op}: axis must be one of the {x.ndim} axes of x, got {axis}")
    if x.shape[axis] == 0:
        raise ValueError(f"{op}: axis {axis} of x must not be empty, got shape {tuple(x.shape)}")


def require_integers(op: str, name: str, ids: Any, like: Array) -> None:
    """TypeError unless `ids` is an integer array of the library of `like`."""
    if not is_array_api_obj(ids):
        raise TypeError(f"{op}: {name} must be an integer array, got {type(ids).__name__}")
    require_same_library(op, name, ids, like)
    if not array_namespace(ids).isdtype(ids.dtype, "integral"):
        raise TypeError(f"{op}: {name} must be an integer array, got dtype {ids.dtype}")


def require_mask(op: str, name: str, mask: Any, like: Array) -> None:
    """TypeError unless `mask` is a boolean array of the library of `like`."""
    if not is_array_api_obj(mask):
        raise TypeError(f"{op}: {name} must be a boolean array, got {type(mask).__name__}")
    require_same_library(op, name, mask, like)
    if not array_namespace(mask).isdtype(mask.dtype, "bool"):
        raise TypeError(
            f"{op}: {name} must be boolean (True = may attend), got dtype {mask.dtype}; "
            "an additive mask is a bias"
        )


def require_same_library(op: str, name: str, array: Array, like: Array) -> None:
    """TypeError unless both arrays come from one library."""
    have, wanted = library_of(type(array)), library_of(type(like))
    if have != wanted:
        raise TypeError(f"{op}: {name} must be an array of {wanted}, got one of {have}")


def require_ids(op: str, name: str, ids: Any, size: int, like: Array) -> None:
    """TypeError unless `ids` are integers of the library of `like`; ValueError out of [0, size)."""
    require_integers(op, name, ids, like)
    if not in_range(ids, size=size):
        raise ValueError(f"{op}: {name} must lie in [0, {size}), got {_span(ids)}")


@overridable
def in_range(ids: Array, *, size: int) -> bool:
    """Whether all ids lie in [0, size). A backend whose arrays have no values yet says True."""
    return bool(array_namespace(ids).all((ids >= 0) & (ids < size)))


def _span(ids: Array) -> str:
    xp = array_namespace(ids)
    return f"ids from {int(xp.min(ids))} to {int(xp.max(ids))}"
