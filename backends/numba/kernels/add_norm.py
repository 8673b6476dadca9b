"""`add_norm`: a residual sum and its norm (LayerNorm or RMSNorm), a few rows at a time."""

from __future__ import annotations

from typing import NamedTuple

from xformer.backends.numba.kernels import layer_norm, rms_norm
from xformer.backends.numba.kernels.layout import unrecordable
from xformer.base.printing import short
from xformer.base.tree import Frozen, value
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_axis, require_gradient
from xformer.layers.norm import NormConfig, NormParams
from xformer.layers.norm import add_norm as reference


def unsupported(x: Array, r: Array | None, params: NormParams, *, config: NormConfig) -> str | None:
    """Return why the numba kernel of `add_norm` cannot run, or None if it can.

    It needs float32 arrays, not all constants of the program; eps inside the root; w and b with
    the shape of the last axis of x; and no b for RMSNorm.
    """
    if config.kind == "rms" and params.b is not None:
        return "RMSNorm has no bias"
    if not config.eps_inside:
        return "eps is outside the root"
    w_and_b = value(params.w), value(params.b)
    if any(param is not None and param.shape != x.shape[-1:] for param in w_and_b):
        return "shapes do not fit"
    return unrecordable(x, r, *w_and_b)


@kernel(reference, "numba.kernels", unsupported=unsupported)
def add_norm(
    x: Array, r: Array | None, params: NormParams, *, config: NormConfig
) -> tuple[tuple[Array, Array], NumbaAddNormCache]:
    """Return (s, y), computed by one instruction: s = x + r and y = norm(s). r None: s is x."""
    require_axis("add_norm", x, -1)
    if r is not None:
        require_gradient("add_norm", "r", r, x)
    w, b = value(params.w), value(params.b)
    cache: layer_norm.NumbaLayerNormCache | rms_norm.NumbaRmsNormCache
    if config.kind == "rms":
        s, y, cache = rms_norm.normalise(x, r, w, config.eps, config.offset)
    else:
        s, y, cache = layer_norm.normalise(x, r, w, b, config.eps)
    frozen = isinstance(params.w, Frozen), params.b is None or isinstance(params.b, Frozen)
    return (s, y), NumbaAddNormCache(cache, *frozen, r is not None)


@short
class NumbaAddNormCache(NamedTuple):
    """Saved by `add_norm` for backward: the cache of the norm of s."""

    norm: layer_norm.NumbaLayerNormCache | rms_norm.NumbaRmsNormCache
    frozen_w: bool
    frozen_b: bool
    has_r: bool

    def backward(self, ds: Array | None, dy: Array) -> tuple[Array, Array | None, NormParams]:
        """Return the gradients of x, r and params; x and r have the same gradient.

        ds: gradient of s, None if nothing but the norm reads s. dy: gradient of y.
        """
        if ds is not None:
            require_gradient("add_norm", "ds", ds, self.norm.x)
        dx, dw, *db = self.norm.backward_with(dy, ds)
        dparams = NormParams(None if self.frozen_w else dw, None if self.frozen_b else db[0])
        return dx, dx if self.has_r else None, dparams
