"""The inputs of each call of a contestant: the batches of a shape, repeated."""

from __future__ import annotations

from typing import Any

from benchmarks.shapes import Shape
from xformer import backends
from xformer.base.typing import Array
from xformer.ops import RandomKey


class Feed:
    """An endless sequence of batches and dropout keys, the same for every contestant."""

    def __init__(self, shape: Shape, backend: backends.Backend) -> None:
        self.batches = shape.batches(backend)
        self.dropout = shape.dropout
        self.calls = 0

    def next(self) -> tuple[tuple[Array, ...], dict[str, Any]]:
        """Return the arrays of the next batch, and the options of the loss: masks, dropout key.

        With dropout each call has a different key, as each training step has.
        """
        arrays, masks = self.batches[self.calls % len(self.batches)]
        options: dict[str, Any] = dict(masks)
        if self.dropout:
            options["dropout_key"] = RandomKey(0, self.calls)
        self.calls += 1
        return arrays, options
