"""Activations by name, for configurations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from xformer import ops
from xformer.checks import require_one_of
from xformer.typing import Array

Activation = Callable[[Array], tuple[Array, Any]]
Gated = Callable[[Array, Array], tuple[Array, Any]]

_NAMES = ("relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "relu_squared", "quick_gelu")


class _Activations(Mapping[str, Activation]):
    """Name -> activation. An op is imported on first use, as most models need only one."""

    def __getitem__(self, name: str) -> Activation:
        if name not in _NAMES:
            raise KeyError(name)
        return _gelu_tanh() if name == "gelu_tanh" else getattr(ops, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


ACTIVATIONS = _Activations()


@functools.cache
def _gelu_tanh() -> Activation:
    return functools.partial(ops.gelu, approximate="tanh")


def gated_unit(op: str, name: Any) -> Gated:
    """The gated unit (gate, up) -> y: `ops.clamped_swiglu`, or `ops.glu` with an activation.

    ValueError for an unknown name.
    """
    require_one_of(f"{op}: activation", name, (*_NAMES, "clamped_swiglu"))
    if name == "clamped_swiglu":
        return ops.clamped_swiglu
    return functools.partial(ops.glu, activation=name)


def require_activation(op: str, name: Any) -> Activation:
    """The activation called `name`. ValueError for an unknown name."""
    require_one_of(f"{op}: activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]
