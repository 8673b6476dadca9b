"""Constant arrays: tables that depend only on sizes, on the library and device of other arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import overridable


@overridable(backward=False)
def constant(
    like: Array, *, of: Callable[..., Any], args: tuple[Any, ...], dtype: Any = None
) -> Array:
    """The numbers of(*args) as an array of the library and on the device of `like`.

    of: a function of a module that returns numbers on the host
    args: hashable arguments
    dtype: None: the library's default for such numbers

    The array must not be written to: a backend may return the same array again.
    """
    return array_namespace(like).asarray(of(*args), dtype=dtype, device=device(like))
