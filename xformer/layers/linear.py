"""Parameters of a linear map."""

from __future__ import annotations

from typing import NamedTuple

from xformer.backends.base import Generator
from xformer.initial import Draw
from xformer.typing import Array


class LinearParams(NamedTuple):
    """For `ops.linear(x, *params)`."""

    w: Array  # (I, O)
    b: Array | None  # (O,)

    @staticmethod
    def init(rng: Generator, shape: tuple[int, int], *, draw: Draw, bias: bool) -> LinearParams:
        """Weights by `draw`, bias zero."""
        return LinearParams(draw(rng, shape), rng.full(shape[1:], 0.0) if bias else None)
