"""Normalisation over the last axis: LayerNorm or RMSNorm, alone or after a residual sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from xformer import ops
from xformer.base.printing import short
from xformer.base.tree import Frozen, value
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import number, plain_numbers, require_gradient


@dataclass(frozen=True)
class NormConfig:
    """The configuration of a norm: "layer" (arXiv:1607.06450) or "rms" (arXiv:1910.07467).

    ValueError for another kind, and for options that do not fit together.
    """

    kind: str = "layer"
    eps: float = 1e-5
    offset: float = 0.0  # "rms": added to the weight (Gemma: 1)
    bias: bool = True  # of "layer"; "rms" has none
    eps_inside: bool = True  # of "layer"; False: eps is added to the standard deviation

    def __post_init__(self) -> None:
        plain_numbers(self)
        if self.kind not in ("layer", "rms"):
            raise ValueError(f'norm: kind must be "layer" or "rms", got {self.kind!r}')
        number("norm", "eps", self.eps, low=0)
        if not self.eps_inside and self.kind != "layer":
            raise ValueError('norm: eps_inside False needs kind "layer"')
        if number("norm", "offset", self.offset) and self.kind != "rms":
            raise ValueError('norm: offset needs kind "rms"')

    def init(self, rng: Generator, width: int) -> NormParams:
        """Initial parameters: w = 1 - offset, so that x is scaled by offset + w = 1; b = 0 or None.

        width: D. b is None for kind "rms" and if `bias` is False.
        """
        has_b = self.bias and self.kind == "layer"
        w = rng.full((width,), 1.0 - self.offset)
        return NormParams(w, rng.full((width,), 0.0) if has_b else None)


@short
class NormParams(NamedTuple):
    """Parameters of `norm`."""

    w: Array  # (D,)
    b: Array | None  # (D,)


def norm(x: Array, params: NormParams, *, config: NormConfig) -> tuple[Array, NormCache]:
    """y = `ops.layer_norm` or `ops.rms_norm` of x, by config.kind. x, y: (..., D).

    ValueError for shapes that do not fit, and for a bias of kind "rms".
    """
    cache: Any
    if config.kind == "rms":
        if params.b is not None:
            raise ValueError('norm: kind "rms" has no bias, got params.b')
        y, cache = ops.rms_norm(x, value(params.w), eps=config.eps, offset=config.offset)
    else:
        where: Any = {"eps": config.eps, "eps_inside": config.eps_inside}
        y, cache = ops.layer_norm(x, value(params.w), value(params.b), **where)
    frozen = isinstance(params.w, Frozen), params.b is None or isinstance(params.b, Frozen)
    return y, NormCache(cache, *frozen)


@short
class NormCache(NamedTuple):
    """Saved by `norm` for backward: the cache of the norm's op, and which parameters are frozen."""

    norm: Any  # of `ops.layer_norm` or `ops.rms_norm`
    frozen_w: bool
    frozen_b: bool

    def backward(self, dy: Array, ds: Array | None = None) -> tuple[Array, NormParams]:
        """Gradients of x and params; None for frozen ones.

        ds: (..., D), added to the gradient of x; None: 0
        """
        fused = None if ds is None else getattr(self.norm, "backward_with", None)
        if fused is not None:  # a kernel that adds ds in the same pass
            dx, dw, *db = fused(dy, ds)
        else:
            dx, dw, *db = self.norm.backward(dy)
            dx = dx if ds is None else ds + dx
        return dx, NormParams(None if self.frozen_w else dw, None if self.frozen_b else db[0])


@overridable(composite=True)
def add_norm(
    x: Array, r: Array | None, params: NormParams, *, config: NormConfig
) -> tuple[tuple[Array, Array], AddNormCache]:
    """s = x + r and y = norm(s): a residual sum and the norm after it.

    x, r, s, y: (..., D). r: None: s is x. ValueError for shapes that do not fit.
    """
    s = x
    if r is not None:
        require_gradient("add_norm", "r", r, x)
        s = x + r
    y, cache = norm(s, params, config=config)
    return (s, y), AddNormCache(cache, r is not None)


@short
class AddNormCache(NamedTuple):
    """Saved by `add_norm` for backward: the cache of the norm. The sum has the derivative 1."""

    norm: NormCache
    has_r: bool

    def backward(self, ds: Array | None, dy: Array) -> tuple[Array, Array | None, NormParams]:
        """Gradients of x and r, which are equal, and of params. ds: None: s is not used."""
        if ds is not None:
            require_gradient("add_norm", "ds", ds, dy)
        dx, dparams = self.norm.backward(dy, ds)
        return dx, dx if self.has_r else None, dparams
