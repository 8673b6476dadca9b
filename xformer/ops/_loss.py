"""Shared by the losses."""

from __future__ import annotations

from array_api_compat import array_namespace, device

from xformer.shapes import working_dtype
from xformer.typing import Array


def one(like: Array) -> Array:
    """An array () of 1, the gradient of a scalar loss with respect to itself."""
    return array_namespace(like).ones((), dtype=working_dtype(like), device=device(like))
