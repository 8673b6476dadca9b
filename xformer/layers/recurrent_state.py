"""The state of a recurrent layer in decoding, where attention has a KV cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer import layers
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.layers.kv_cache import KVCache


@short
class RecurrentState(NamedTuple):
    """The state of a recurrent layer after the tokens so far. Empty at first.

    The shapes are those of `gated_delta_net`. Another layer may use `state` alone, whose first axis
    must be the batch. The size does not depend on the number of tokens: there are no slots, and a
    window or padding changes nothing. It has the methods of `KVCache`.
    """

    conv: Array | None = None  # (B, L-1, C), the last inputs of the convolution
    state: Array | None = None  # (B, H, K, M), of `ops.gated_delta_rule`
    write_index: Array | None = None  # integer (), of the next token in a static DecodeState

    @property
    def k(self) -> Array | None:
        """The state, whose first axis is the batch; None if there are no tokens yet."""
        return self.state

    @property
    def length(self) -> int:
        """0, the number of slots."""
        return 0

    def last(self, n: int) -> RecurrentState:
        """The state itself."""
        return self

    def padded(self, n: int) -> RecurrentState:
        """The state itself: padding before the first token leaves it 0."""
        return self

    def preallocate(self, n: int, length: int) -> RecurrentState:
        """The state itself."""
        return self

    def truncated(self, n: int, *, needs: int) -> RecurrentState:
        """The state itself for n = 0. ValueError for more: it cannot be computed backwards."""
        if n == 0:
            return self
        raise ValueError(
            f"truncate: a recurrent layer (gated DeltaNet) cannot drop its last {n} tokens; "
            "decode them again from an earlier state"
        )

    def rows(self, ids: Array) -> RecurrentState:
        """A copy of the sequences `ids` (B',) of the batch, in this order."""
        conv, state = (
            None if a is None else array_namespace(a).take(a, ids, axis=0)
            for a in (self.conv, self.state)
        )
        return RecurrentState(conv, state)


def is_recurrent(config: layers.BlockConfig) -> bool:
    """Whether a block has a recurrent layer, such as `gated_delta_net`, instead of attention."""
    return config.attn.recurrent


def empty_cache(config: layers.BlockConfig) -> Any:
    """What decoding stores of a layer before the first token: a KVCache or RecurrentState."""
    return RecurrentState() if is_recurrent(config) else KVCache()
