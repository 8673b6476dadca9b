"""Mixture of experts: a router chooses a few of many feed-forward networks for each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from xformer import ops
from xformer.backends import Generator
from xformer.checks import plain_numbers, require_gradient, require_sizes
from xformer.initializers import Draw, normal
from xformer.layers.linear import LinearParams, linear
from xformer.ops.activation import require_activation
from xformer.shapes import require_array
from xformer.showing import short
from xformer.tree import Frozen, value
from xformer.typing import Array


@dataclass(frozen=True)
class ExpertsConfig:
    """The configuration of a mixture of experts. ValueError for options that do not fit together.

    normalise: whether the weights of a token's experts sum to 1. True: Mixtral (softmax over the
        chosen logits) and Qwen with norm_topk_prob (softmax over all logits, then the chosen ones
        normalised), which are the same function. False: Qwen without norm_topk_prob.
    """

    n_experts: int
    top_k: int
    d_ff: int  # of one expert
    normalise: bool = True
    activation: str = "silu"

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_sizes("mixture", 1, n_experts=self.n_experts, top_k=self.top_k, d_ff=self.d_ff)
        if self.top_k > self.n_experts:
            raise ValueError(
                f"mixture: top_k must be at most n_experts = {self.n_experts}, got {self.top_k}"
            )
        if not isinstance(self.normalise, bool):
            raise TypeError(f"mixture: normalise must be True or False, got {self.normalise!r}")
        require_activation("mixture", self.activation)

    def init(self, rng: Generator, d_model: int, *, draw: Draw = normal) -> ExpertsParams:
        """Initial parameters. draw: the distribution of the weights, one expert after another."""

        def each(shape: tuple[int, int]) -> Array:
            return rng.stack(lambda: draw(rng, shape), self.n_experts)

        return ExpertsParams(
            router=draw(rng, (d_model, self.n_experts)),
            gate=each((d_model, self.d_ff)),
            up=each((d_model, self.d_ff)),
            down=each((self.d_ff, d_model)),
        )


@short
class ExpertsParams(NamedTuple):
    """Parameters of the router and the experts, without biases."""

    router: Array  # (D, E)
    gate: Array  # (E, D, F)
    up: Array  # (E, D, F)
    down: Array  # (E, F, D)


def mixture(
    x: Array, params: ExpertsParams, *, config: ExpertsConfig
) -> tuple[Array, MixtureCache]:
    """y = sum of weight * expert(x) over the top_k experts by logits = x w_router.

    Mixtral (arXiv:2401.04088, eq. 1 to 3) and Qwen-MoE: see `ExpertsConfig.normalise`. Among equal
    logits, the expert of lower index is first. The cache has `router_logits` (N, E) and `ids`
    (N, C) for auxiliary losses; N = B * T, C = top_k.

    x, y: (B, T, D), or one sequence (T, D) with B = 1
    ValueError for shapes that do not fit. Derivation: docs/derivations/experts.md
    """
    _require_fit(x, params, config)
    xp = array_namespace(x)
    rows = xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))  # (N, D)
    logits, router = linear(rows, LinearParams(params.router, None))  # (N, E)
    ids = xp.argsort(logits, axis=-1, descending=True, stable=True)[:, : config.top_k]
    if config.normalise:
        weights, softmax = ops.softmax(xp.take_along_axis(logits, ids, axis=-1))  # (N, C)
    else:
        probs, softmax = ops.softmax(logits)
        weights = xp.take_along_axis(probs, ids, axis=-1)
    gate, up, down = map(value, params[1:])
    frozen = tuple(isinstance(w, Frozen) for w in params[1:])
    y, experts = ops.experts(
        rows,
        gate,
        up,
        down,
        weights,
        ids=ids,
        activation=config.activation,
        trainable=not all(frozen),
    )
    return xp.reshape(y, x.shape), MixtureCache(
        logits, ids, router, softmax, experts, x.shape, config.normalise, frozen
    )


@short
class MixtureCache(NamedTuple):
    """Saved by `mixture` for backward: the caches of the router, the softmax and the experts.

    `ids` tells which logits have a gradient from the experts. Auxiliary losses read
    `router_logits` and `ids`.
    """

    router_logits: Array  # (N, E)
    ids: Array  # (N, C), by falling logits
    router: Any  # of `layers.linear`
    softmax: Any  # of the softmax that gives the weights of the experts
    experts: Any  # of `ops.experts`
    shape: tuple[int, ...]  # of x
    normalise: bool  # `ExpertsConfig.normalise`
    frozen: tuple[bool, ...]  # which of gate, up and down are frozen

    def backward(
        self, dy: Array, drouter_logits: Array | None = None
    ) -> tuple[Array, ExpertsParams]:
        """Gradients of x and params.

        drouter_logits: (N, E), the gradient of auxiliary losses on the router's logits, if any.
        """
        require_gradient("mixture", "dy", dy, self.router_logits, self.shape)
        xp = array_namespace(dy)
        dx, *dexperts, dweights = self.experts.backward(
            xp.reshape(dy, (self.ids.shape[0], self.shape[-1]))
        )
        if self.normalise:
            dlogits = self._spread(self.softmax.backward(dweights))
        else:
            dlogits = self.softmax.backward(self._spread(dweights))
        if drouter_logits is not None:
            require_gradient("mixture", "drouter_logits", drouter_logits, self.router_logits)
            dlogits = dlogits + drouter_logits
        trained = [None if f else dw for f, dw in zip(self.frozen, dexperts, strict=True)]
        dx_router, (drouter, _) = self.router.backward(dlogits)
        return xp.reshape(dx + dx_router, self.shape), ExpertsParams(drouter, *trained)

    def _spread(self, dchosen: Array) -> Array:
        """(N, C) -> (N, E): the values of the chosen experts, 0 for the others."""
        xp = array_namespace(dchosen)
        n_experts = self.router_logits.shape[1]
        every = xp.arange(n_experts, dtype=self.ids.dtype, device=device(self.ids))
        hit = self.ids[:, :, None] == every  # (N, C, E)
        return xp.sum(xp.where(hit, dchosen[:, :, None], 0.0), axis=1)


def _require_fit(x: Array, params: ExpertsParams, config: ExpertsConfig) -> None:
    require_array("mixture", "x", x)
    if x.ndim not in (2, 3):
        raise ValueError(f"mixture: x must be (B, T, D) or (T, D), got shape {tuple(x.shape)}")
    d, e, f = x.shape[-1], config.n_experts, config.d_ff
    shapes = {"(D, E)": (d, e), "(E, D, F)": (e, d, f), "(E, F, D)": (e, f, d)}
    letters = ("(D, E)", "(E, D, F)", "(E, D, F)", "(E, F, D)")
    for name, array, letter in zip(params._fields, map(value, params), letters, strict=True):
        require_array("mixture", name, array)
        if tuple(array.shape) != shapes[letter]:
            raise ValueError(
                f"mixture: {name} must be {letter} = {shapes[letter]}, "
                f"got shape {tuple(array.shape)}"
            )
