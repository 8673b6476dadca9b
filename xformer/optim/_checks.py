"""Checks of what optimisers are given."""

from __future__ import annotations

from numbers import Real
from typing import Any

from array_api_compat import is_array_api_obj

from xformer import tree
from xformer.ops._checks import number
from xformer.shapes import require_like


def require_gradients(op: str, params: Any, grads: Any) -> None:
    """ValueError, TypeError unless each parameter has a gradient of its shape, dtype and place."""
    gradients = tree.flatten(grads)
    for name, p in tree.flatten(params).items():
        if name not in gradients:
            raise ValueError(f"{op}: the gradient of {name or 'params'} is missing")
        g = gradients[name]
        require_like(op, f"the gradient of {name or 'params'}", g, p)
        if tuple(g.shape) != tuple(p.shape):
            raise ValueError(
                f"{op}: the gradient of {name or 'params'} must have shape {tuple(p.shape)}, "
                f"got {tuple(g.shape)}"
            )


def learning_rate(op: str, lr: Any) -> Any:
    """lr as a float of at least 0; an array () stays: it may be traced (`jax.jit`)."""
    if not isinstance(lr, Real) and is_array_api_obj(lr) and lr.shape == ():
        return lr
    return number(op, "lr", lr, low=0)
