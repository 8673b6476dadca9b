"""Activations by name, as configurations choose them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from xformer.ops.gelu import gelu
from xformer.ops.quick_gelu import quick_gelu
from xformer.ops.relu import relu
from xformer.ops.relu_squared import relu_squared
from xformer.ops.sigmoid import sigmoid
from xformer.ops.silu import silu
from xformer.ops.tanh import tanh
from xformer.typing import Array

ACTIVATIONS: dict[str, Callable[[Array], tuple[Array, Any]]] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "silu": silu,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "relu_squared": relu_squared,
    "quick_gelu": quick_gelu,
}


def require_activation(op: str, name: Any) -> Callable[[Array], tuple[Array, Any]]:
    """The activation of that name; ValueError where there is none."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
