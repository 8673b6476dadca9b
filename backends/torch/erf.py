"""`erf` by `torch.erf`."""

from __future__ import annotations

import torch

from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.ops.erf import ErfCache
from xformer.ops.erf import erf as reference


@kernel(reference, "torch")
def erf(x: Array) -> tuple[Array, ErfCache]:
    """Return erf(x)."""
    return torch.erf(x), ErfCache(x)
