"""What every layer between an op and a model takes and returns.

    y, cache = layer(x, params, side, config=config, context=context)
    dx, dparams, dside = cache.backward(dy)

`SideInputs` are the arrays beside x that have gradients. `Context` says how the layer is called and
has none. A layer refuses a field that it cannot follow; it never ignores one.

A layer has a configuration `SomeConfig` (`LayerConfig`) and parameters `SomeParams`. A layer that
reads no side inputs may leave out dside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from xformer import ops
from xformer.base import tree
from xformer.base.printing import short
from xformer.base.typing import Array

SITES = 6  # dropout streams of a block


@dataclass(frozen=True)
class LayerConfig:
    """The configuration of a layer in place of attention or of the feed-forward network.

    A subclass is a frozen dataclass with

    - `forward(x, params, side, norm, context)`, which returns y and the cache
    - `init(rng, norm, *, draw, out_scale)`, which returns initial parameters, and `d_model`; in
      place of the feed-forward network `init(rng, d_model, *, draw, out_scale)`

    norm: the block's `NormConfig`, for norms within the layer
    rng: a `Generator`, or `initializers.Shapes`, which has the same methods and knows shapes only
    draw: the distribution of the weights, draw(rng, shape)
    out_scale: multiplies the weights of the last linear map

    Models read the options below of attention. Here they are off; a layer that has one overrides
    it.
    """

    if TYPE_CHECKING:  # `init`, `forward`, and the fields, which differ from layer to layer

        def __getattr__(self, name: str) -> Any: ...

    window: ClassVar[Any] = None
    softcap: ClassVar[Any] = None
    shaw_max_distance: ClassVar[Any] = None
    xl: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False  # its state in decoding is a `RecurrentState`


@short
class SideInputs(NamedTuple):
    """Arrays that a layer reads beside x. Their gradients are `SideInputs` too; None is absent."""

    # (B, S, D) or (S, D); a KeyValue for all layers; or a tuple with a KeyValue for each
    memory: Any = None
    bias: Array | None = None  # broadcasts to (B, H, T, S), added to the scores of self-attention
    pos: Array | None = None  # (T, K), added to queries; in self-attention to keys and values too
    memory_pos: Array | None = None  # (S, K), added to keys and values of the memory

    def plus(self, other: SideInputs) -> SideInputs:
        """The sum of two gradients, in which None is 0."""
        return SideInputs(*map(plus, self, other))


@short
class Context(NamedTuple):
    """How a layer is called. Nothing here has a gradient.

    mask, memory_mask: boolean, broadcast to (B, H, T, S), of self-attention and of cross-attention;
        True = may attend; None: to all
    causal: of the self-attention
    rotary: RoPE tables of the self-attention; for several layers a sequence of tables or None for
        each, or tables for all
    kv_cache: keys and values of earlier tokens; for several layers one for each, and then nothing
        is saved for backward
    segment_memory: (B, N, D), what the layer read at the N positions before x (Transformer-XL); for
        several layers an array for each
    dropout_key: None: no dropout
    """

    mask: Array | None = None
    causal: bool = False
    memory_mask: Array | None = None
    rotary: Any = None
    kv_cache: Any = None
    segment_memory: Any = None
    dropout_key: ops.RandomKey | None = None

    def of_layer(self, i: int) -> Context:
        """The context of layer i. Each layer has its own dropout streams."""
        _, _, _, rotary, kv_cache, segment_memory, key = self
        return self._replace(
            rotary=rotary[i] if _is_of_layers(rotary) else rotary,
            kv_cache=None if kv_cache is None else kv_cache[i],
            segment_memory=None if segment_memory is None else segment_memory[i],
            dropout_key=None if key is None else key.at(SITES * i),
        )


def rate(dropout: float, context: Context) -> float:
    """The rate of dropout: 0 without a key."""
    return 0.0 if context.dropout_key is None else dropout


def require_no(op: str, given: Any, names: Iterable[str]) -> None:
    """ValueError for a field of `SideInputs` or `Context` that a layer cannot follow."""
    for name in names:
        if getattr(given, name) is not None:
            raise ValueError(f"{op}: {name} must be None, which this layer cannot follow")


def _is_of_layers(rotary: Any) -> bool:
    return isinstance(rotary, tuple | list) and not hasattr(rotary, "_fields")


def plus(a: Any, b: Any) -> Any:
    """The sum of two trees of gradients, leaf by leaf. None is 0."""
    if a is None or b is None:
        return b if a is None else a
    return tree.map(lambda x, y: x + y, a, b)
