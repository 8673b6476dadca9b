"""The contestant "numba program": each call replays a program that the first call recorded."""

from __future__ import annotations

from typing import Any

from benchmarks.contestants import LR, Ours
from xformer import inference, optim
from xformer.base import tree
from xformer.ops import RandomKey


class Programs(Ours):
    """`Ours` with compiled forward, backward and step.

    A step overwrites the parameters and the optimiser's state.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        from xformer.backends.numba.program.compiled import Compiled

        self._pooled_by, self._backward_by = Compiled(self._pool), Compiled(self._differentiate)
        self._step_by = Compiled(self._advance, donated=(0, 1))

    def forward(self) -> Any:
        if self.shape.training:
            return self.backward()
        with self.context():
            return self._pooled_by(self.params, *self._next()[:2])

    def backward(self) -> tuple[Any, Any]:
        with self.context():
            loss, grads = self._backward_by(self.params, *self._next())
            return loss, grads

    def step(self) -> Any:
        with self.context():
            arguments = self.params, self.state, *self._next()
            trained, self.state, loss = self._step_by(*arguments)
            self.params = tree.join(self.params, trained)
            return loss

    def _next(self) -> tuple[Any, Any, int]:
        """Return the next arrays and masks, and the number of this call, for the dropout key."""
        number = self.feed.calls
        arrays, options = self.feed.next()
        options.pop("dropout_key", None)
        return arrays, options, number

    @inference()
    def _pool(self, params: Any, arrays: Any, masks: Any) -> Any:
        y, _ = self.shape.model.pooled(params, *arrays, **masks)
        return y

    def _differentiate(self, params: Any, arrays: Any, masks: Any, number: Any) -> Any:
        key = {"dropout_key": RandomKey(0, number)} if self.shape.dropout else {}
        loss, cache = self.shape.model.loss(params, *arrays, **masks, **key)
        return loss, cache.backward()

    def _advance(self, params: Any, state: Any, *data: Any) -> Any:
        loss, grads = self._differentiate(params, *data)
        trained, state = optim.adamw(tree.trained(params), grads, state, lr=LR)
        return trained, state, loss
