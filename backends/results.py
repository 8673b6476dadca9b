"""Which results a compiled function can return."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from array_api_compat import is_array_api_obj

from xformer.base import tree

PLAIN = bool, int, float, complex, str, bytes


def refusal(result: Any, passed: Collection[int]) -> str | None:
    """Return why a compiled call cannot return `result`; None if it can.

    It can return trees of arrays, of plain values and of leaves of the arguments. An object of
    another type may hold arrays that have no values yet. A cache computes its backward with the
    arrays and kernels that were there while compiling.

    passed: the `id`s of leaves of the arguments
    """
    result, name = tree.value(result), type(result).__name__
    if is_array_api_obj(result):
        return None
    if hasattr(result, "backward") and tree.parts(result)[0]:
        return (
            f"its result holds a cache ({name}), whose backward would not be compiled: compile a "
            "function that returns the gradients"
        )
    if type(result) in (tuple, list, dict) or hasattr(result, "_fields"):
        parts = result.values() if isinstance(result, dict) else result
        return next((why for part in parts if (why := refusal(part, passed))), None)
    if result is None or isinstance(result, tree.Constant) or type(result) in PLAIN:
        return None
    return None if id(result) in passed else f"its result holds a {name}, which is no tree"
