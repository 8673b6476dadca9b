"""Who takes part: this library on each backend, and the peer.

A contestant is named "<backend> kernel", "<backend> reference" (where no kernel may run),
"jax jit" (the whole step under `jax.jit`) or "torch eager" (`benchmarks.eager`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from benchmarks.shapes import Shape
from xformer import backends, dispatch, optim, reference_only, tree

LR = 3e-4
PEER = "torch eager"


class Contestant(Protocol):
    """What is measured: forward, forward and backward, and a step of AdamW; float32."""

    backend: backends.Backend

    def forward(self) -> Any: ...

    def backward(self) -> Any: ...

    def step(self) -> Any: ...

    def gradients(self) -> tuple[float, dict[str, np.ndarray]]: ...


class Ours:
    """This library, called as a training loop calls it."""

    def __init__(
        self,
        shape: Shape,
        backend: backends.Backend,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
        dtype: str = "float32",
    ) -> None:
        self.model, self.backend, self.context = shape.model, backend, context
        self.params, self.data = shape.params(backend, dtype), shape.data(backend)
        self.state = optim.adamw_init(self.params)

    def forward(self) -> Any:
        """The loss, with the cache that backward needs."""
        with self.context():
            return self.model.loss(self.params, *self.data)

    def backward(self) -> tuple[Any, Any]:
        """The loss and its gradients."""
        with self.context():
            loss, cache = self.model.loss(self.params, *self.data)
            return loss, cache.backward()

    def step(self) -> Any:
        """The loss before a step of AdamW."""
        with self.context():
            loss, grads = self.backward()
            self.params, self.state = optim.adamw(self.params, grads, self.state, lr=LR)
            return loss

    def gradients(self) -> tuple[float, dict[str, np.ndarray]]:
        """The loss and its gradients by dotted name, on the host."""
        loss, grads = self.backward()
        return float(loss), tree.flatten(tree.map(self.backend.to_numpy, grads))


class Jitted(Ours):
    """The same under `jax.jit`: each of the three one compiled function."""

    def __init__(self, shape: Shape, backend: backends.Backend) -> None:
        super().__init__(shape, backend)
        import jax

        def backward(params: Any, *data: Any) -> tuple[Any, Any]:
            loss, cache = shape.model.loss(params, *data)
            return loss, cache.backward()

        def step(params: Any, state: Any, *data: Any) -> tuple[Any, Any, Any]:
            loss, grads = backward(params, *data)
            return loss, *optim.adamw(params, grads, state, lr=LR)

        self._forward = jax.jit(lambda params, *data: shape.model.loss(params, *data)[0])
        self._backward, self._step = jax.jit(backward), jax.jit(step)

    def forward(self) -> Any:
        """The loss alone: what backward would need is not computed."""
        return self._forward(self.params, *self.data)

    def backward(self) -> tuple[Any, Any]:
        """The loss and its gradients."""
        loss, grads = self._backward(self.params, *self.data)
        return loss, grads

    def step(self) -> Any:
        """The loss before a step of AdamW."""
        loss, self.params, self.state = self._step(self.params, self.state, *self.data)
        return loss


def names(backend_names: Sequence[str]) -> list[str]:
    """Names of the contestants on these backends; the peer comes first, where installed."""
    found = [PEER] if importlib.util.find_spec("torch") else []
    for name in backend_names:
        backends.get(name)  # registers its kernels
        has_kernels = any(name in op.kernels for op in dispatch.ops())
        found += [f"{name} kernel"] if has_kernels else []
        found += [f"{name} jit"] if name == "jax" else []
        found.append(f"{name} reference")
    return found


def make(name: str, shape: Shape) -> Contestant:
    """The contestant of that name, at the start of its training."""
    if name == PEER:
        from benchmarks.eager import Eager

        return Eager(shape)
    backend_name, _, how = name.rpartition(" ")
    backend = backends.get(backend_name)
    if how == "jit":
        return Jitted(shape, backend)
    return Ours(shape, backend, reference_only if how == "reference" else nullcontext)


def judge(shape: Shape) -> Contestant:
    """What every contestant must agree with: NumPy in float64, without kernels."""
    return Ours(shape, backends.get("numpy"), reference_only, "float64")
