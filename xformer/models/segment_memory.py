"""The segment memory of Transformer-XL: inputs of earlier segments, to which a segment attends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array


@short
class SegmentMemory(NamedTuple):
    """The inputs of each layer's attention at the last positions (arXiv:1901.02860, section 3.2).

    They are data: no gradient flows into them. Keys and values are computed from them again, with
    the parameters of the next segment. The arrays never change their shape.
    """

    inputs: tuple[Array, ...]  # of each layer, (B, M, D); only the last `length` positions are set
    length: int  # at most M

    @property
    def written(self) -> tuple[Array, ...]:
        """The inputs of each layer, (B, length, D)."""
        return tuple(a[:, a.shape[1] - self.length :, :] for a in self.inputs)

    @property
    def emptied(self) -> SegmentMemory:
        """The memory before the first segment of a text."""
        return self._replace(length=0)

    def advanced(self, extended: Sequence[Array]) -> SegmentMemory:
        """The memory after a segment.

        extended: of each layer (B, length + T, D), `written` and the inputs of the segment
        """
        capacity, n = self.inputs[0].shape[1], extended[0].shape[1]
        length = min(n, capacity)
        xp = array_namespace(*extended)

        def last(x: Array) -> Array:
            shape = (x.shape[0], capacity - length, x.shape[2])
            zeros = xp.zeros(shape, dtype=x.dtype, device=device(x))
            # A copy, also if there are no zeros: a slice would keep the whole of x in memory.
            return xp.concat([zeros, x[:, n - length :, :]], axis=1)

        return SegmentMemory(tuple(map(last, extended)), length)
