"""Tables of the host: numbers that follow from sizes alone, beside the arrays they work with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from array_api_compat import array_namespace, device

from xformer.dispatch import overridable
from xformer.typing import Array


@overridable(backward=False)
def constant(
    like: Array, *, of: Callable[..., Any], args: tuple[Any, ...], dtype: Any = None
) -> Array:
    """of(*args), numbers of the host, as an array of library and device of `like`.

    dtype: the library's own for such numbers unless given. Nobody writes to it: where the same work
    is done many times, a backend may give the same array again. So `of` is a function of a module,
    and args are hashable.
    """
    return array_namespace(like).asarray(of(*args), dtype=dtype, device=device(like))
