"""Tokens that a library may choose and read by itself, without Python between them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from xformer.dispatch import overridable
from xformer.typing import Array


@overridable(backward=False)
def ahead(
    tokens: Array, params: Any, *, network: Any, state: Any, most: int, stop: Collection[int]
) -> tuple[list[list[int]], Array, Any]:
    """Read tokens (B, 1), as `network.extend`, and as many more as a kernel likes: the likeliest.

    At most `most` in all, and none with an id in `stop`. Of each text the ids of those that it
    chose and has read, which are as many of each; logits (B, V) after the last one; the state that
    has them all.
    """
    logits, state = network.extend(params, tokens, state)
    return [[] for _ in range(tokens.shape[0])], logits, state
