"""The head of a discriminator: which tokens of a text were replaced (ELECTRA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import plain_numbers
from xformer.initializers import Draw, normal
from xformer.layers.embed import EmbedConfig
from xformer.layers.linear import LinearParams, linear
from xformer.models.loss import cross_entropy_of
from xformer.ops.activation import ACTIVATIONS, require_activation


@dataclass(frozen=True)
class Discriminator:
    """A logit of each token: act(x w_dense + b_dense) w + b (arXiv:2003.10555, section 2).

    Its logistic function is the probability that the token was replaced.
    """

    activation: str = "gelu"
    n_labels: ClassVar[int] = 2  # of a target: 0, an original token; 1, a replaced one
    of_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_activation("Discriminator", self.activation)

    def init(
        self, rng: Generator, width: int, embed: EmbedConfig | None, *, draw: Draw = normal
    ) -> DiscriminatorParams:
        """Initial parameters."""
        dense = LinearParams.init(rng, (width, width), draw=draw, bias=True)
        return DiscriminatorParams(dense, LinearParams.init(rng, (width, 1), draw=draw, bias=True))

    def forward(
        self, x: Array, params: DiscriminatorParams, table: Array, **_: Any
    ) -> tuple[Array, DiscriminatorCache]:
        """Logits (B, T). x: (B, T, D)."""
        x, dense = linear(x, params.dense)
        x, act = ACTIVATIONS[self.activation](x)
        logits, out = linear(x, params.out)  # (B, T, 1)
        return logits[..., 0], DiscriminatorCache(dense, act, out)

    def loss(
        self,
        x: Array,
        params: DiscriminatorParams,
        table: Array,
        *,
        targets: Array,
        mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
        **options: Any,
    ) -> tuple[Array, Any]:
        """The binary cross-entropy of targets (B, T), which are 0 or 1.

        It is the cross-entropy of the logits (0, z), because softmax of them is the logistic
        function of z.

        mask: not used. Padding needs the targets `ignore_index`.
        options: of `ops.cross_entropy`
        """
        z, cache = self.forward(x, params, table)
        xp = array_namespace(z)
        pairs = xp.stack([xp.zeros_like(z), z], axis=-1)  # (B, T, 2)
        return cross_entropy_of(pairs, cache._replace(of_pairs=True), targets, options)


@short
class DiscriminatorParams(NamedTuple):
    """Parameters of a Discriminator."""

    dense: LinearParams  # (D, D)
    out: LinearParams  # (D, 1)


@short
class DiscriminatorCache(NamedTuple):
    """Saved by `Discriminator.forward` and `loss` for backward: the cache of each step."""

    dense: Any  # of `layers.linear`
    act: Any  # of the activation
    out: Any  # of `layers.linear`, to the logits
    of_pairs: bool = False  # whether backward takes the gradient of the pairs (0, z)

    def backward(self, dlogits: Array) -> tuple[Array, DiscriminatorParams, None]:
        """Gradients of x and params, and None: the table is not used."""
        dlogits = dlogits[..., 1:] if self.of_pairs else dlogits[..., None]
        dx, dout = self.out.backward(dlogits)
        dx, ddense = self.dense.backward(self.act.backward(dx))
        return dx, DiscriminatorParams(ddense, dout), None
