"""Checks of arguments beyond shapes, with one wording for all ops, layers and models."""

from __future__ import annotations

import math
import operator
import os
from numbers import Real
from typing import Any

from xformer.base.namespace import array_namespace
from xformer.base.printing import size
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.shapes import (
    dtype_name,
    require_array,
    require_like,
    require_same_device,
    require_same_library,
)

MAX_LAYERS = 10_000


def require_axis(op: str, x: Array, axis: int, name: str = "x") -> None:
    """ValueError unless x has the axis `axis` and it is not empty. TypeError for a wrong type."""
    if whole(axis) is None:
        raise TypeError(f"{op}: axis must be an integer, got {axis!r}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{op}: axis must be one of the {x.ndim} axes of {name}, got {axis}")
    if x.shape[axis] == 0:
        raise ValueError(
            f"{op}: axis {axis} of {name} must not be empty, got shape {tuple(x.shape)}"
        )


def require_integers(op: str, name: str, ids: Any, like: Array) -> Array:
    """`ids` in the dtype of indices.

    TypeError unless ids are integers of the library of `like`, ValueError for another device.
    """
    require_array(op, name, ids, "an integer array")
    require_same_library(op, name, ids, like)
    require_same_device(op, name, ids, like)
    if dtype_name(ids) == "int64":  # faster than asking the namespace
        return ids
    if not array_namespace(ids).isdtype(ids.dtype, "integral"):
        raise TypeError(f"{op}: {name} must be an integer array, got dtype {ids.dtype}")
    return as_indices(ids)


def as_indices(ids: Array) -> Array:
    """Integers in the library's dtype of indices; some libraries accept no other."""
    if dtype_name(ids) == "int64":
        return ids
    xp = array_namespace(ids)
    return xp.astype(ids, xp.__array_namespace_info__().default_dtypes()["indexing"])


def require_mask(op: str, name: str, mask: Any, like: Array) -> None:
    """TypeError unless `mask` is a boolean array of the library of `like`.

    ValueError for another device.
    """
    require_array(op, name, mask, "a boolean array")
    require_same_library(op, name, mask, like)
    require_same_device(op, name, mask, like)
    if not array_namespace(mask).isdtype(mask.dtype, "bool"):
        raise TypeError(
            f"{op}: {name} must be boolean (True = may attend), got dtype {mask.dtype}; "
            "an additive mask is a bias"
        )


def require_tokens(op: str, name: str, ids: Any) -> None:
    """TypeError unless `ids` is an array, ValueError unless its shape is (B, T)."""
    require_array(op, name, ids, "an integer array")
    if ids.ndim != 2:
        raise ValueError(f"{op}: {name} must be (B, T), got shape {tuple(ids.shape)}")


def require_vectors(op: str, name: str, x: Any) -> None:
    """TypeError unless `x` is an array, ValueError unless its shape is (B, T, D)."""
    require_array(op, name, x)
    if x.ndim != 3:
        raise ValueError(f"{op}: {name} must be (B, T, D), got shape {tuple(x.shape)}")


def require_ids(op: str, name: str, ids: Any, size: int, like: Array) -> Array:
    """`ids` in the dtype of indices.

    Raises as `require_integers` does, and ValueError if `in_range` is False.
    """
    indices = require_integers(op, name, ids, like)
    require_in_range(op, name, indices, size, ids=ids)
    return indices


def require_in_range(op: str, name: str, indices: Array, size: int, *, ids: Array) -> None:
    """ValueError for ids outside [0, size), as far as `in_range` checks it.

    ids: the ids before the conversion to indices, for the message.
    """
    if not in_range(indices, size=size, name=f"{op}: {name}"):
        low, high = _span(indices, ids)
        raise ValueError(f"{op}: {name} must lie in [0, {size}), got ids from {low} to {high}")


@overridable(backward=False)
def in_range(ids: Array, *, size: int, name: str = "ids") -> bool:
    """Whether all ids are in [0, size), as far as is known without waiting for a device.

    True for ids on a device, and for traced ids without values. For an id out of range, the result
    of an op then depends on the library. CuPy's kernels return NaN, and never access memory outside
    an array.

    name: of the op and the ids, for the message if a program finds a wrong id in a run
    """
    return bool(array_namespace(ids).all((ids >= 0) & (ids < size)))


def _span(indices: Array, ids: Array) -> tuple[int, int]:
    """The smallest and the largest of `ids`, for a message.

    indices: the ids in the dtype of indices, which is signed
    ids: before the conversion; large unsigned ids are negative as indices
    """
    xp = array_namespace(indices)
    low, high = int(xp.min(indices)), int(xp.max(indices))
    if low >= 0 or not xp.isdtype(ids.dtype, "unsigned integer"):
        return low, high
    modulus = 2 ** xp.iinfo(indices.dtype).bits
    smallest = int(xp.min(xp.where(indices < 0, high, indices))) if high >= 0 else low + modulus
    return smallest, int(xp.max(xp.where(indices < 0, indices, low))) + modulus


def require_gradient(op: str, name: str, dy: Any, like: Array, shape: Any = None) -> None:
    """Raise unless the gradient `dy` matches `like`.

    shape: the shape that dy must have; None: the shape of `like`.

    TypeError for another library or dtype, ValueError for another device or shape.
    """
    require_like(op, name, dy, like)
    shape = like.shape if shape is None else shape
    if dy.shape != shape:
        require_shape(op, name, dy, shape)


def require_shape(op: str, name: str, array: Any, shape: Any) -> None:
    """TypeError unless `array` is an array, ValueError unless its shape is `shape`."""
    require_array(op, name, array)
    if tuple(array.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)}, got {tuple(array.shape)}")


def whole(value: Any) -> int | None:
    """An integer as an int, which never overflows, unlike NumPy's. None for a bool and all else.

    An int of a subclass, such as a size that a graph computes, is returned as it is.
    """
    if type(value) is int:
        return value
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    try:
        return operator.index(value)
    except TypeError:
        return None


def require_sizes(op: str, low: int, **sizes: Any) -> tuple[int, ...]:
    """The sizes as ints. ValueError unless each is an integer of at least `low`."""
    checked = []
    for name, value in sizes.items():
        plain = whole(value)
        if plain is None or plain < low:
            raise ValueError(f"{op}: {name} must be an int of at least {low}, got {value!r}")
        checked.append(plain)
    return tuple(checked)


def plain_numbers(config: Any) -> None:
    """Convert NumPy numbers in a frozen dataclass to int and float, as JSON needs them."""
    for name, value in vars(config).items():
        if not isinstance(value, int | float):
            plain: float | None = whole(value)
            if plain is None and isinstance(value, Real):
                plain = float(value)
            if plain is not None:
                object.__setattr__(config, name, plain)


def require_layers(op: str, **counts: Any) -> None:
    """ValueError unless each count is an int in [1, MAX_LAYERS], as each layer is an object."""
    require_sizes(op, 1, **counts)
    for name, count in counts.items():
        if count > MAX_LAYERS:
            raise ValueError(f"{op}: {name} must be at most {MAX_LAYERS}, got {count}")


def require_id(op: str, size: int, **ids: Any) -> tuple[int, ...]:
    """The ids as ints. ValueError unless each is an integer in [0, size)."""
    checked = []
    for name, value in ids.items():
        plain = whole(value)
        if plain is None or not 0 <= plain < size:
            raise ValueError(f"{op}: {name} must lie in [0, {size}), got {value!r}")
        checked.append(plain)
    return tuple(checked)


def require_memory(what: str, nbytes: int) -> None:
    """MemoryError if `nbytes` are more than twice the memory of this machine.

    what: names what needs them in the message
    nbytes: a lower bound

    Less may fit, by swap or compression. It is not checked on systems that do not say how large
    their memory is.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return
    if nbytes > 2 * total:
        raise MemoryError(
            f"{what} need at least {size(nbytes)}, and this machine has {size(total)}"
        )


def number(op: str, name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a Python float, because a float64 scalar of NumPy would widen float32 arrays.

    TypeError unless it is a number, ValueError unless it is in [low, high].
    """
    if not isinstance(value, Real):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    plain = float(value)
    if not low <= plain <= high:
        raise ValueError(f"{op}: {name} must lie in [{low:g}, {high:g}], got {value}")
    return plain


def finite(op: str, name: str, value: Any, low: float = -math.inf) -> float:
    """`value` as a float. Raises as `number` does, and ValueError for infinity and NaN."""
    if isinstance(value, Real) and not math.isfinite(float(value)):
        raise ValueError(f"{op}: {name} must be finite, got {value}")
    return number(op, name, value, low=low)


def require_text(op: str, text: Any) -> None:
    """TypeError unless `text` is a string."""
    if not isinstance(text, str):
        got = "None" if text is None else type(text).__name__
        raise TypeError(f"{op}: the text must be a string, got {got}")


def require_utf8(what: str, text: str) -> None:
    """ValueError for a text that has no UTF-8, such as an argument of a command in Latin-1."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(error.start - 10, 0) : error.end + 10]
        raise ValueError(
            f"{what} must be UTF-8, got {around!a} at character {error.start + 1}"
        ) from error


def require_cap(op: str, cap: float, name: str = "softcap") -> float:
    """`cap` as a float. TypeError unless it is a number, ValueError unless positive and finite."""
    plain = number(op, name, cap)
    if not 0 < plain < math.inf:
        raise ValueError(f"{op}: {name} must be positive and finite, got {cap}")
    return plain
