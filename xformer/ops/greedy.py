"""The choice of greedy decoding, on the device: one array for ids and for what is wrong."""

from __future__ import annotations

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import overridable


@overridable(backward=False)
def greedy(logits: Array) -> Array:
    """(B,): the id of the largest logit of each row of `logits` (B, V); -1 if it is not finite.

    One array holds both, so that a device is synchronised once.
    """
    xp = array_namespace(logits)
    return xp.where(xp.isfinite(xp.max(logits, axis=-1)), xp.argmax(logits, axis=-1), -1)
