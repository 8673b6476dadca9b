"""`constant` in a captured step: copied from the host once, and kept as long as the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.layers.constant import constant as reference

Constants = dict[Any, Array]

_kept: ContextVar[Constants | None] = ContextVar("constants", default=None)


@contextmanager
def keeping(constants: Constants) -> Iterator[None]:
    """Return a context in which `constant` stores its arrays in `constants` and reuses them."""
    token = _kept.set(constants)
    try:
        yield
    finally:
        _kept.reset(token)


def unsupported(
    like: Array, *, of: Callable[..., Any], args: tuple[Any, ...], dtype: Any = None
) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return "no step is captured" if _kept.get() is None else None


@kernel(reference, "cupy", unsupported=unsupported)
def constant(
    like: Array, *, of: Callable[..., Any], args: tuple[Any, ...], dtype: Any = None
) -> Array:
    """Return the array that an earlier call of the step stored, or a new array, which is stored."""
    constants: Any = _kept.get()
    key = of, args, str(dtype)
    if key not in constants:
        constants[key] = reference.reference(like, of=of, args=args, dtype=dtype)
    return constants[key]
