"""Activations by name, for configurations; `register` adds one of your own.

def mish(x):
    xp = array_namespace(x)
    return x * xp.tanh(xp.log1p(xp.exp(x)))

def dmish(x): ...  # its derivative

xf.gradcheck(ops.activation.register("mish", mish, dmish), x)
gpt = xf.GPT(..., activation="mish")
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from xformer import ops
from xformer.base.choices import require_one_of
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import saved
from xformer.dispatch.checks import require_gradient

Activation = Callable[[Array], tuple[Array, Any]]
Formula = Callable[[Array], Array]
Gated = Callable[[Array, Array], tuple[Array, Any]]

BUILT_IN = ("relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "relu_squared", "quick_gelu")
GATED = "clamped_swiglu"  # a gated unit that is no activation and its product
HINT = "; ops.activation.register adds one of your own"
_own: dict[str, tuple[Activation, Formula]] = {}  # name -> op and derivative


class _Activations(Mapping[str, Activation]):
    """Name -> activation. An op is imported on first use, as most models need only one."""

    def __getitem__(self, name: str) -> Activation:
        if name in _own:
            return _own[name][0]
        if name not in BUILT_IN:
            raise KeyError(name)
        return _gelu_tanh() if name == "gelu_tanh" else getattr(ops, name)

    def __iter__(self) -> Iterator[str]:
        return iter((*BUILT_IN, *_own))

    def __len__(self) -> int:
        return len(BUILT_IN) + len(_own)


ACTIVATIONS = _Activations()


def register(name: str, formula: Formula, derivative: Formula) -> Activation:
    """Add an elementwise activation, y = formula(x), for configurations of this process.

    The result is its op: op(x) returns (y, cache), and cache.backward(dy) dy * derivative(x). It
    runs without a kernel. Files store the name alone: register it before they are loaded.

    name: a new name for configurations, such as `GPT(activation=...)`
    formula, derivative: functions of one array, by `array_namespace(x)`. The results have the shape
        and dtype of x.

    TypeError for a name that is no string, and for functions that cannot be called. ValueError if
    the name is in use.
    """
    if not isinstance(name, str):
        raise TypeError(f"register: name must be a string, got {type(name).__name__}")
    for what, fn in (("formula", formula), ("derivative", derivative)):
        if not callable(fn):
            raise TypeError(f"register: {what} must be a function, got {type(fn).__name__}")
    if name in (*ACTIVATIONS, GATED):
        raise ValueError(f"register: the name {name!r} is in use; choose another")

    def op(x: Array) -> tuple[Array, Any]:
        y = formula(x)
        require_gradient(name, "the formula's result", y, x)
        return y, saved(OwnActivationCache(x, name))

    op.__name__ = op.__qualname__ = name
    _own[name] = (op, derivative)
    return op


@short
class OwnActivationCache(NamedTuple):
    """Saved by a registered activation for backward: x."""

    x: Array
    name: str

    def backward(self, dy: Array) -> Array:
        """dx = dy * derivative(x)."""
        require_gradient(self.name, "dy", dy, self.x)
        slope = _own[self.name][1](self.x)
        require_gradient(self.name, "the derivative's result", slope, self.x)
        return dy * slope


@functools.cache
def _gelu_tanh() -> Activation:
    return functools.partial(ops.gelu, approximate="tanh")


def gated_unit(op: str, name: Any) -> Gated:
    """The gated unit (gate, up) -> y: `ops.clamped_swiglu`, or `ops.glu` with an activation.

    ValueError for an unknown name.
    """
    require_one_of(f"{op}: activation", name, (*ACTIVATIONS, GATED), HINT)
    if name == GATED:
        return ops.clamped_swiglu
    return functools.partial(ops.glu, activation=name)


def require_activation(op: str, name: Any) -> Activation:
    """The activation called `name`. ValueError for an unknown name."""
    require_one_of(f"{op}: activation", name, ACTIVATIONS, HINT)
    return ACTIVATIONS[name]
