"""Tokens that a library may choose and read by itself, without Python between them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from xformer.dispatch import overridable
from xformer.typing import Array


@overridable(backward=False)
def ahead(
    tokens: Array, params: Any, *, network: Any, state: Any, most: int, stop: Collection[int]
) -> tuple[Array, Array, Any]:
    """Read tokens (B, 1), as `network.extend`, and as many more as a kernel likes: the likeliest.

    At most `most` in all, and none with an id in `stop`. ids (B, n): those it chose and has read;
    logits (B, V) after the last one; the state that has them.
    """
    logits, state = network.extend(params, tokens, state)
    return tokens[:, 1:], logits, state
