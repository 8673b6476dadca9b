"""`layers.add_norm` by the kernels of the norms, which also compute the sum and its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer import ops
from xformer.backends.cupy import layer_norm, rms_norm
from xformer.base.printing import short
from xformer.base.tree import Frozen, value
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_axis, require_gradient
from xformer.dispatch.shapes import STORED
from xformer.layers.norm import NormConfig, NormParams
from xformer.layers.norm import add_norm as reference


def unsupported(x: Array, r: Array | None, params: NormParams, *, config: NormConfig) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    has_b = config.kind == "rms" and params.b is not None
    return 'kind "rms" has no bias, got params.b' if has_b else None


@kernel(reference, "cupy", unsupported=unsupported, storage_dtypes=STORED)
def add_norm(
    x: Array, r: Array | None, params: NormParams, *, config: NormConfig
) -> tuple[tuple[Array, Array], CupyAddNormCache]:
    """Return ((s = x + r, y = norm(s)), cache); one launch reads x and r and writes s and y.

    x, r: (..., D); r None: s = x
    """
    if r is not None:
        require_gradient("add_norm", "r", r, x)
    w, b = value(params.w), value(params.b)
    cache: Any
    if config.kind == "rms":
        ops.rms_norm.reference.check((x, w), {}, ops.rms_norm)  # type: ignore[attr-defined]
        require_axis("rms_norm", x, -1)
        y, cache = rms_norm.forward(x, r, w, config.eps, config.offset)
    else:
        ops.layer_norm.reference.check((x, w, b), {}, ops.layer_norm)  # type: ignore[attr-defined]
        require_axis("layer_norm", x, -1)
        y, cache = layer_norm.forward(x, r, w, b, config.eps, config.eps_inside)
    frozen = isinstance(params.w, Frozen), params.b is None or isinstance(params.b, Frozen)
    return (cache.x, y), CupyAddNormCache(cache, r is not None, *frozen)


@short
class CupyAddNormCache(NamedTuple):
    """Saved by `add_norm` for backward: the cache of the norm. The sum has the derivative 1."""

    norm: Any  # the cache of the norm's kernel, whose x is the sum s
    has_r: bool
    frozen_w: bool
    frozen_b: bool

    def backward(self, ds: Array | None, dy: Array) -> tuple[Array, Array | None, NormParams]:
        """Return dx, dr (the same array; None without r) and the gradients of the parameters.

        ds: (..., D), the gradient of the sum; None: 0
        dy: (..., D)
        A frozen parameter has the gradient None.
        """
        for name, grad in (("ds", ds), ("dy", dy)):
            if grad is not None:
                require_gradient("add_norm", name, grad, self.norm.x)
        dx, dw, *db = self.norm.backward_with(dy, ds)
        dparams = NormParams(None if self.frozen_w else dw, None if self.frozen_b else db[0])
        return dx, dx if self.has_r else None, dparams
