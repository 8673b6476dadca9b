"""`erf` by `torch.erf`."""

from __future__ import annotations

import torch

from xformer.dispatch import kernel
from xformer.ops.erf import ErfCache
from xformer.ops.erf import erf as reference
from xformer.typing import Array


@kernel(reference, "torch")
def erf(x: Array) -> tuple[Array, ErfCache]:
    """Return erf(x)."""
    return torch.erf(x), ErfCache(x)
