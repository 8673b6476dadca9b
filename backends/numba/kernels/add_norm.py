"""`add_norm`: a residual sum and the norm of it, a few rows at a time."""

from __future__ import annotations

from typing import NamedTuple

from xformer.backends.numba.kernels import layer_norm, rms_norm
from xformer.backends.numba.kernels.layout import unrecordable
from xformer.checks import require_axis, require_gradient
from xformer.dispatch import kernel
from xformer.layers.norm import NormConfig, NormParams
from xformer.layers.norm import add_norm as reference
from xformer.showing import short
from xformer.tree import Frozen, value
from xformer.typing import Array


def unsupported(x: Array, r: Array | None, params: NormParams, *, config: NormConfig) -> str | None:
    """Why the kernel cannot run."""
    if config.kind == "rms" and params.b is not None:
        return "no RMSNorm has a bias"
    own = value(params.w), value(params.b)
    if any(given is not None and given.shape != x.shape[-1:] for given in own):
        return "shapes do not fit"
    return unrecordable(x, r, *own)


@kernel(reference, "numba.kernels", unsupported=unsupported)
def add_norm(
    x: Array, r: Array | None, params: NormParams, *, config: NormConfig
) -> tuple[tuple[Array, Array], AddNormCache]:
    """s = x + r, and y = `norm` of s, by one instruction."""
    require_axis("add_norm", x, -1)
    if r is not None:
        require_gradient("add_norm", "r", r, x)
    w, b = value(params.w), value(params.b)
    cache: layer_norm.LayerNormCache | rms_norm.RmsNormCache
    if config.kind == "rms":
        s, y, cache = rms_norm.normalise(x, r, w, config.eps, config.offset)
    else:
        s, y, cache = layer_norm.normalise(x, r, w, b, config.eps)
    frozen = isinstance(params.w, Frozen), params.b is None or isinstance(params.b, Frozen)
    return (s, y), AddNormCache(cache, *frozen, r is not None)


@short
class AddNormCache(NamedTuple):
    """Saved by `add_norm` for backward."""

    norm: layer_norm.LayerNormCache | rms_norm.RmsNormCache
    frozen_w: bool
    frozen_b: bool
    has_r: bool

    def backward(self, ds: Array | None, dy: Array) -> tuple[Array, Array | None, NormParams]:
        """Gradients of x and r, which are one, and of params. ds None: nothing else reads s."""
        if ds is not None:
            require_gradient("add_norm", "ds", ds, self.norm.x)
        dx, dw, *db = self.norm.added(dy, ds)
        dparams = NormParams(None if self.frozen_w else dw, None if self.frozen_b else db[0])
        return dx, dx if self.has_r else None, dparams
