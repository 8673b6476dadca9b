"""Uniform checks of array arguments, and their messages.

    @shapes("x (..., I)  w (I, O)  b (O)")

Capitals are sizes that must agree between arguments, `...` is any number of leading axes, the same
for all. An argument that is None is absent and not checked. Arguments of floating type share one
dtype, float32 or float64, and one library; keyword-only arguments (ids, targets) are checked for
shape alone.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from array_api_compat import array_namespace, device, is_array_api_obj

FLOATING = ("float32", "float64")


def shapes(spec: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Attach `check(*args, **kwargs)` to an op, made from `spec`. Raises ValueError, TypeError."""
    wanted = {name: _dims(dims) for name, dims in re.findall(r"(\w+) \(([^)]*)\)", spec)}

    def decorate(op: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(op).parameters.values()
        arrays = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        also = tuple(name for name in wanted if name not in arrays)
        op_name = op.__name__

        def check(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(arrays, args, strict=False))
            for name in arrays[len(args) :]:
                if kwargs.get(name) is not None:
                    given[name] = kwargs[name]
            _check_arrays(op_name, given)
            for name in also:
                given[name] = kwargs.get(name)
            sizes: dict[str, tuple[Any, str]] = {}
            for name, array in given.items():
                if array is not None and name in wanted:
                    _check_shape(op_name, name, array, wanted[name], sizes)

        op.check = check  # type: ignore[attr-defined]
        return op

    return decorate


def _dims(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check_arrays(op: str, given: dict[str, Any]) -> None:
    """All arrays: one library, one floating dtype, one device."""
    first = None
    for name, array in given.items():
        if array is None:
            continue
        if not is_array_api_obj(array):
            raise TypeError(f"{op}: {name} must be an array, got {type(array).__name__}")
        dtype = _dtype_name(type(array.dtype), array.dtype)
        if first is None:
            first, first_array, first_dtype = name, array, dtype
            if dtype not in FLOATING:
                raise TypeError(f"{op}: {name} must be float32 or float64, got {dtype}")
            continue
        if dtype != first_dtype:
            raise TypeError(f"{op}: {name} must be {first_dtype} like {first}, got {dtype}")
        _check_same_place(op, first, first_array, name, array)


def _check_same_place(op: str, first: str, a: Any, name: str, b: Any) -> None:
    if type(a) is not type(b):
        try:
            array_namespace(a, b)
        except TypeError:
            raise TypeError(
                f"{op}: {name} must come from the same array library as {first} "
                f"({_library(a)}), got {_library(b)}"
            ) from None
    # NumPy has one device; JAX places arrays itself and reports a mixture in its own words.
    if _library(a) not in ("numpy", "jax", "jaxlib"):
        here, there = device(a), device(b)
        if here != there:
            raise ValueError(f"{op}: {name} must be on {here} like {first}, got {there}")


def _check_shape(
    op: str, name: str, array: Any, dims: tuple[str, ...], sizes: dict[str, tuple[Any, str]]
) -> None:
    shape = tuple(array.shape)
    n_fixed = len(dims) - (dims[:1] == ("...",))
    if len(shape) < n_fixed or (len(shape) > n_fixed and n_fixed == len(dims)):
        raise ValueError(_message(op, name, shape, dims, sizes))
    lead = len(shape) - n_fixed
    actual: list[Any] = list(shape[lead:])
    if n_fixed != len(dims):
        actual.insert(0, shape[:lead])
    for dim, size in zip(dims, actual, strict=True):
        if sizes.setdefault(dim, (size, name))[0] != size:
            raise ValueError(_message(op, name, shape, dims, sizes))


def _message(op: str, name: str, shape: Any, dims: Any, sizes: dict[str, tuple[Any, str]]) -> str:
    known = [f"{d} = {sizes[d][0]} (from {sizes[d][1]})" for d in dims if d in sizes]
    known = [k for k in known if not k.endswith(f"(from {name})")]
    wanted = f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"
    where = f" with {', '.join(known)}" if known else ""
    return f"{op}: {name} must be {wanted}{where}, got shape {shape}"


@functools.cache
def _dtype_name(kind: type, dtype: Any) -> str:
    # `kind` comes first in the cache's key: dtypes of two libraries must not be compared.
    return str(dtype).rpartition(".")[2]


def _library(array: Any) -> str:
    return type(array).__module__.partition(".")[0]
