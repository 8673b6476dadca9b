"""The activations: one kernel launch forward, and one backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer import ops
from xformer.backends.cupy.module import EVERY, Source, blocks, contiguous, empty, launch, wide
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import Overridable, kernel
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import STORED
from xformer.ops.activation import BUILT_IN

SOURCE = Source(__file__, dtypes=EVERY, WIDE=(0, 1), ACTIVATION=(*BUILT_IN, "erf"))
BLOCK = 256  # threads; each computes one pack of elements


def unsupported(x: Array, *, approximate: str = "none") -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    return None if approximate in ("none", "tanh") else f"there is no form {approximate!r}"


@kernel(ops.gelu, "cupy", unsupported=unsupported, storage_dtypes=STORED)
def gelu(x: Array, *, approximate: str = "none") -> tuple[Array, CupyActivationCache]:
    """Return (y = x * Phi(x), cache)."""
    return activation(x, "gelu" if approximate == "none" else "gelu_tanh")


def _register(op: Overridable[..., Any]) -> None:
    name = op.__name__

    def run(x: Array) -> tuple[Array, CupyActivationCache]:
        return activation(x, name)

    run.__name__ = name
    kernel(op, "cupy", storage_dtypes=STORED)(run)


for _op in (ops.erf, ops.quick_gelu, ops.relu, ops.relu_squared, ops.sigmoid, ops.silu, ops.tanh):
    _register(_op)


def activation(x: Array, name: str) -> tuple[Array, CupyActivationCache]:
    """Return (y = act(x), cache).

    x: any shape
    name: a value of the macro ACTIVATION
    """
    x = contiguous(x)
    y = empty(x)
    elementwise(SOURCE, "activation_forward", (x, y), ACTIVATION=name)
    return y, CupyActivationCache(x, name)


@short
class CupyActivationCache(NamedTuple):
    """Saved by an activation for backward: x, from which the derivative is computed."""

    x: Array
    name: str

    def backward(self, dy: Array) -> Array:
        """Return dx = dy * act'(x)."""
        require_gradient(self.name, "dy", dy, self.x)
        dy = contiguous(dy)
        dx = empty(dy)
        elementwise(SOURCE, "activation_backward", (self.x, dy, dx), ACTIVATION=self.name)
        return dx


def elementwise(source: Source, name: str, arrays: tuple[Array, ...], **macros: Any) -> None:
    """Launch an elementwise kernel in which each thread computes one pack of elements.

    arrays: contiguous and of one shape, first arguments of the kernel
    """
    like = arrays[0]
    vec = wide(like.size, *arrays)
    grid = blocks(like.size, BLOCK * (16 // like.dtype.itemsize if vec else 1))
    args = (*arrays, like.size)
    launch(source, name, like, grid=(grid,), block=(BLOCK,), args=args, WIDE=vec, **macros)
