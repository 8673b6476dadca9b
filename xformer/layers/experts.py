"""Mixture of experts: a router chooses a few of many feed-forward networks for each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from array_api_compat import device

from xformer import ops
from xformer.base.choices import require_one_of
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.tree import Frozen, value
from xformer.base.typing import Array
from xformer.dispatch import saved
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import number, plain_numbers, require_gradient, require_sizes
from xformer.dispatch.shapes import require_array
from xformer.initializers import Draw, normal
from xformer.layers.feed_forward import FeedForwardConfig, FeedForwardParams, feed_forward
from xformer.layers.linear import LinearParams, linear
from xformer.layers.norm import NormConfig
from xformer.layers.protocol import Context, LayerConfig, SideInputs
from xformer.layers.router import route
from xformer.ops.activation import gated_unit, require_activation


@dataclass(frozen=True)
class ExpertsConfig(LayerConfig):
    """The configuration of a mixture of experts. ValueError for options that do not fit together.

    normalise: whether the weights of a token's experts sum to 1. True: Mixtral (softmax over the
        chosen logits) and Qwen with norm_topk_prob (softmax over all logits, then the chosen ones
        normalised), which are the same function. False: Qwen without norm_topk_prob.
    activation: a name in `ops.activation.ACTIVATIONS`, or "clamped_swiglu" for
        `ops.clamped_swiglu`
    bias: whether the router and the experts' linear maps have biases, as in gpt-oss
    score: "softmax", or "sigmoid" of each logit (DeepSeek-V3)
    weight_scale: multiplies the weights
    n_groups, top_groups, group_top: the experts are n_groups groups of neighbours. A token chooses
        among the top_groups groups with the largest sums of their group_top best scores
        (DeepSeek-V2: 1, V3: 2).
    correction: whether params have a number for each expert that is added to the scores for the
        choice alone; only with "sigmoid"
    d_shared: the hidden width of an expert that every token runs through, beside the chosen ones.
        None: there is no shared expert.
    shared_gate: whether its output is multiplied by sigmoid(x w_shared_gate), as in Qwen2-MoE
    """

    n_experts: int
    top_k: int
    d_ff: int  # of one expert
    normalise: bool = True
    activation: str = "silu"
    bias: bool = False
    d_shared: int | None = None
    shared_gate: bool = False
    score: str = "softmax"
    weight_scale: float = 1.0
    n_groups: int = 1
    top_groups: int = 1
    group_top: int = 1
    correction: bool = False

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_sizes("mixture", 1, n_experts=self.n_experts, top_k=self.top_k, d_ff=self.d_ff)
        if self.d_shared is not None:
            require_sizes("mixture", 1, d_shared=self.d_shared)
        if self.top_k > self.n_experts:
            raise ValueError(
                f"mixture: top_k must be at most n_experts = {self.n_experts}, got {self.top_k}"
            )
        for name in ("normalise", "bias", "shared_gate", "correction"):
            if not isinstance(got := getattr(self, name), bool):
                raise TypeError(f"mixture: {name} must be True or False, got {got!r}")
        if self.shared_gate and self.d_shared is None:
            raise ValueError("mixture: shared_gate needs d_shared")
        gated_unit("mixture", self.activation)
        if self.d_shared is not None:
            require_activation("mixture: a shared expert", self.activation)
        require_one_of("mixture: score", self.score, ("softmax", "sigmoid"))
        number("mixture", "weight_scale", self.weight_scale)
        if self.correction and self.score != "sigmoid":
            raise ValueError(f'mixture: correction needs score "sigmoid", got {self.score!r}')
        self._require_groups()

    def _require_groups(self) -> None:
        """ValueError unless the groups divide the experts, and their best have top_k of them."""
        names = ("n_groups", "top_groups", "group_top")
        require_sizes("mixture", 1, **{name: getattr(self, name) for name in names})
        if self.n_experts % self.n_groups:
            raise ValueError(
                f"mixture: n_groups must divide n_experts = {self.n_experts}, got {self.n_groups}"
            )
        each = self.n_experts // self.n_groups
        for name, most in (("top_groups", self.n_groups), ("group_top", each)):
            if getattr(self, name) > most:
                raise ValueError(
                    f"mixture: {name} must be at most {most} with n_groups = {self.n_groups}, "
                    f"got {getattr(self, name)}"
                )
        if self.top_k > self.top_groups * each:
            raise ValueError(
                f"mixture: top_k must be at most the {self.top_groups * each} experts of "
                f"{self.top_groups} groups, got {self.top_k}"
            )
        if self.group_top > 1 and self.score != "sigmoid":
            raise ValueError(
                f'mixture: group_top above 1 needs score "sigmoid", got {self.score!r}'
            )

    def forward(
        self,
        x: Array,
        params: ExpertsParams,
        _side: SideInputs,
        _norm: NormConfig,
        _context: Context,
    ) -> tuple[Array, MixtureCache]:
        """`mixture`, as a block calls each of its layers."""
        return mixture(x, params, config=self)

    def init(self, rng: Generator, d_model: int, *, draw: Draw = normal) -> ExpertsParams:
        """Initial parameters. draw: the distribution of the weights, one expert after another."""

        def each(shape: tuple[int, int]) -> Array:
            return rng.stack(lambda: draw(rng, shape), self.n_experts)

        params = ExpertsParams(
            router=draw(rng, (d_model, self.n_experts)),
            gate=each((d_model, self.d_ff)),
            up=each((d_model, self.d_ff)),
            down=each((self.d_ff, d_model)),
        )
        if self.correction:
            params = params._replace(correction=rng.full((self.n_experts,), 0.0))
        if self.bias:
            params = params._replace(
                router_bias=rng.full((self.n_experts,), 0.0),
                gate_bias=rng.full((self.n_experts, self.d_ff), 0.0),
                up_bias=rng.full((self.n_experts, self.d_ff), 0.0),
                down_bias=rng.full((self.n_experts, d_model), 0.0),
            )
        if self.d_shared is None:
            return params
        shared = FeedForwardConfig(self.d_shared, self.activation, gated=True, bias=False)
        return params._replace(
            shared=shared.init(rng, d_model, draw=draw),
            shared_gate=draw(rng, (d_model, 1)) if self.shared_gate else None,
        )


@short
class ExpertsParams(NamedTuple):
    """Parameters of the router and the experts. A bias that is None is left out."""

    router: Array  # (D, E)
    gate: Array  # (E, D, F)
    up: Array  # (E, D, F)
    down: Array  # (E, F, D)
    router_bias: Array | None = None  # (E,)
    gate_bias: Array | None = None  # (E, F)
    up_bias: Array | None = None  # (E, F)
    down_bias: Array | None = None  # (E, D)
    shared: FeedForwardParams | None = None  # the shared expert, gated
    shared_gate: Array | None = None  # (D, 1); None: the shared expert's output as it is
    correction: Array | None = None  # (E,), of the scores, for the choice of experts alone


def mixture(
    x: Array, params: ExpertsParams, *, config: ExpertsConfig
) -> tuple[Array, MixtureCache]:
    """y = sum of weight * expert(x) over the top_k experts by logits = x w_router + b_router.

    With params.shared, y + shared(x), or y + sigmoid(x w_shared_gate) * shared(x) if there is a
    shared_gate.

    Mixtral (arXiv:2401.04088, eq. 1 to 3), Qwen-MoE and DeepSeek-V2 and V3: see `ExpertsConfig`.
    Among equal scores, the expert of lower index is first. The cache has `router_logits` (N, E) and
    `ids` (N, C) for auxiliary losses; N = B * T, C = top_k.

    x, y: (B, T, D), or one sequence (T, D) with B = 1
    ValueError for shapes that do not fit. Derivation: docs/derivations/experts.md
    """
    _require_fit(x, params, config)
    xp = array_namespace(x)
    rows = xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))  # (N, D)
    logits, router = linear(rows, LinearParams(params.router, params.router_bias))  # (N, E)
    (weights, ids), chosen = route(logits, value(params.correction), config=config)
    experts = (
        *(params.gate, params.up, params.down),
        *(params.gate_bias, params.up_bias, params.down_bias),
    )
    gate, up, down, *biases = map(value, experts)
    frozen = tuple(w is None or isinstance(w, Frozen) for w in experts)
    y, cache = ops.experts(
        rows,
        gate,
        up,
        down,
        weights,
        *biases,
        ids=ids,
        activation=config.activation,
        trainable=not all(frozen),
    )
    shared = None
    if params.shared is not None:
        y_shared, shared = _shared_expert(rows, params.shared, params.shared_gate, config)
        y = y + y_shared
    is_corrected = params.correction is not None and not isinstance(params.correction, Frozen)
    return xp.reshape(y, x.shape), MixtureCache(
        logits, ids, router, chosen, cache, x.shape, frozen, shared, is_corrected
    )


@short
class MixtureCache(NamedTuple):
    """Saved by `mixture` for backward: the caches of the router, the choice and the experts.

    `ids` tells which logits have a gradient from the experts. Auxiliary losses read
    `router_logits` and `ids`.
    """

    router_logits: Array  # (N, E)
    ids: Array  # (N, C), by falling scores
    router: Any  # of `layers.linear`
    chosen: Any  # of `layers.router.route`
    experts: Any  # of `ops.experts`
    shape: tuple[int, ...]  # of x
    frozen: tuple[bool, ...]  # which of gate, up, down and their biases are frozen or None
    shared: Any = None  # of the shared expert
    is_corrected: bool = False  # whether params have a correction that is not frozen

    def backward(
        self, dy: Array, drouter_logits: Array | None = None
    ) -> tuple[Array, ExpertsParams]:
        """Gradients of x and params.

        drouter_logits: (N, E), the gradient of auxiliary losses on the router's logits, if any.
        """
        require_gradient("mixture", "dy", dy, self.router_logits, self.shape)
        xp = array_namespace(dy)
        dy = xp.reshape(dy, (self.ids.shape[0], self.shape[-1]))  # (N, D)
        dx, dgate, dup, ddown, dweights, *dbiases = self.experts.backward(dy)
        dlogits = self.chosen.backward(dweights)
        if drouter_logits is not None:
            require_gradient("mixture", "drouter_logits", drouter_logits, self.router_logits)
            dlogits = dlogits + drouter_logits
        dexperts = dgate, dup, ddown, *dbiases
        trained = (None if f else dw for f, dw in zip(self.frozen, dexperts, strict=True))
        dgate, dup, ddown, *dbiases = trained
        dx_router, (drouter, drouter_bias) = self.router.backward(dlogits)
        dx = dx + dx_router
        dparams = ExpertsParams(drouter, dgate, dup, ddown, drouter_bias, *dbiases)
        if self.shared is not None:
            dx_shared, dshared, dshared_gate = self.shared.backward(dy)
            dx = dx + dx_shared
            dparams = dparams._replace(shared=dshared, shared_gate=dshared_gate)
        if self.is_corrected:  # it only chooses: a small change of it changes nothing
            options: Any = {"dtype": dx.dtype, "device": device(dx)}
            zeros = xp.zeros(self.router_logits.shape[1:], **options)
            dparams = dparams._replace(correction=zeros)
        return xp.reshape(dx, self.shape), dparams


def _shared_expert(
    x: Array, params: FeedForwardParams, w_gate: Array | None, config: ExpertsConfig
) -> tuple[Array, SharedCache]:
    """y = sigmoid(x w_gate) * ffn(x), or ffn(x) without w_gate. x, y: (N, D), w_gate: (D, 1)."""
    y, ffn = feed_forward(x, params, activation=config.activation)
    if w_gate is None:
        return y, saved(SharedCache(ffn))
    logits, gate = linear(x, LinearParams(w_gate, None))
    share, sigmoid = ops.sigmoid(logits)  # (N, 1)
    return share * y, saved(SharedCache(ffn, y, share, sigmoid, gate))


@short
class SharedCache(NamedTuple):
    """Saved by the shared expert for backward. Without a gate, only the cache of its network."""

    ffn: Any  # of `layers.feed_forward`
    y: Array | None = None  # (N, D): the output of the network
    share: Array | None = None  # (N, 1)
    sigmoid: Any = None
    gate: Any = None  # of `layers.linear`

    def backward(self, dy: Array) -> tuple[Array, FeedForwardParams, Array | None]:
        """Gradients of x, params and w_gate."""
        if self.share is None:
            return *self.ffn.backward(dy), None
        dx, dparams = self.ffn.backward(self.share * dy)
        dshare = array_namespace(dy).sum(dy * self.y, axis=-1, keepdims=True)
        dx_gate, (dw_gate, _) = self.gate.backward(self.sigmoid.backward(dshare))
        return dx + dx_gate, dparams, dw_gate


def _require_fit(x: Array, params: ExpertsParams, config: ExpertsConfig) -> None:
    require_array("mixture", "x", x)
    if x.ndim not in (2, 3):
        raise ValueError(f"mixture: x must be (B, T, D) or (T, D), got shape {tuple(x.shape)}")
    d, e, f = x.shape[-1], config.n_experts, config.d_ff
    letters = {
        "router": ("(D, E)", (d, e)),
        "gate": ("(E, D, F)", (e, d, f)),
        "up": ("(E, D, F)", (e, d, f)),
        "down": ("(E, F, D)", (e, f, d)),
        "router_bias": ("(E,)", (e,)),
        "gate_bias": ("(E, F)", (e, f)),
        "up_bias": ("(E, F)", (e, f)),
        "down_bias": ("(E, D)", (e, d)),
        "shared_gate": ("(D, 1)", (d, 1)),
        "correction": ("(E,)", (e,)),
    }
    for name, (letter, shape) in letters.items():
        array = value(getattr(params, name))
        if array is None and name in ExpertsParams._field_defaults:
            continue
        require_array("mixture", name, array)
        if tuple(array.shape) != shape:
            raise ValueError(
                f"mixture: {name} must be {letter} = {shape}, got shape {tuple(array.shape)}"
            )
