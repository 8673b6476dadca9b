"""What each call of a contestant gets: the batches of a shape, over and over."""

from __future__ import annotations

from typing import Any

from benchmarks.shapes import Shape
from xformer import backends
from xformer.ops import RandomKey
from xformer.typing import Array


class Feed:
    """The same for every contestant, if it is asked equally often: batches and dropout keys."""

    def __init__(self, shape: Shape, backend: backends.Backend) -> None:
        self.batches = shape.batches(backend)
        self.dropout = shape.dropout
        self.calls = 0

    def next(self) -> tuple[tuple[Array, ...], dict[str, Any]]:
        """Arrays of the next batch, and options of the loss: masks, and a dropout key if any.

        Each call has a key of its own, as each step of a training has.
        """
        arrays, masks = self.batches[self.calls % len(self.batches)]
        options: dict[str, Any] = dict(masks)
        if self.dropout:
            options["dropout_key"] = RandomKey(0, self.calls)
        self.calls += 1
        return arrays, options
