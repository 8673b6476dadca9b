"""Parameters of a layer normalisation."""

from __future__ import annotations

from typing import NamedTuple

from xformer.backends.base import Generator
from xformer.typing import Array


class LayerNormParams(NamedTuple):
    """For `ops.layer_norm(x, *params)`."""

    w: Array  # (D,)
    b: Array | None  # (D,)

    @staticmethod
    def init(rng: Generator, d_model: int, *, bias: bool) -> LayerNormParams:
        """Ones and zeros."""
        return LayerNormParams(
            rng.full((d_model,), 1.0), rng.full((d_model,), 0.0) if bias else None
        )
