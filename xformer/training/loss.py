"""Losses of batches, for `train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from xformer import backends, ops
from xformer.backends import Backend
from xformer.base import tree
from xformer.base.typing import Array
from xformer.dispatch.checks import require_ids
from xformer.models import SegmentMemory
from xformer.training.batch import Batch


class Loss(Protocol):
    """A function loss(params, batch, backend, dropout_key) that returns a loss and its cache."""

    def __call__(
        self,
        params: Any,
        batch: Batch,
        backend: Backend,
        dropout_key: ops.RandomKey | None = None,
        /,
    ) -> tuple[Array, Any]:
        """The mean loss of a batch, an array () in nats, and its cache.

        `cache.backward(dloss)` returns the gradients of params. dloss: (), of the loss.

        params: of the model, on the device of `backend`
        batch: arrays and masks on the host
        backend: moves the batch to the device
        dropout_key: the random bits of dropout are drawn from it; None: no dropout
        """


def loss_of(model: Any, **options: Any) -> ModelLoss:
    """The loss of a model, for `train`. options: of the model's `loss`.

    It raises ValueError for ids outside the vocabulary. It checks them on the host, since ops on a
    device do not.
    """
    if not hasattr(model, "loss"):
        raise TypeError(f"loss_of: the model must have a loss, got {type(model).__name__}")
    return ModelLoss(model, options)


def segment_loss_of(model: Any, **options: Any) -> SegmentLoss:
    """The loss of a model with a segment memory, for `train` on batches of `Streams`.

    Each batch is read after the memory of the batches before. options: of `segment_loss`. It raises
    ValueError if the model has no memory_len, and for ids outside the vocabulary.
    """
    if getattr(model, "memory_len", None) is None:
        raise ValueError("segment_loss_of: the model must have a memory_len, got None")
    return SegmentLoss(model, options)


class ArrayLoss:
    """A `Loss` in two parts: `inputs` on the host, and `of`, a function of arrays."""

    def __call__(
        self,
        params: Any,
        batch: Batch,
        backend: str | Backend,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, Any]:
        """The mean loss () and its cache. dropout_key: None: no dropout."""
        inputs = tree.map(backends.get(backend).asarray, self.inputs(batch))
        return self.of(params, inputs, dropout_key)

    def inputs(self, batch: Batch) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
        """The arrays and masks of a batch."""
        return batch.arrays, batch.masks

    def of(self, params: Any, inputs: Any, dropout_key: ops.RandomKey | None) -> tuple[Array, Any]:
        """The mean loss () of `inputs` on the device, and its cache."""
        raise NotImplementedError


@dataclass(frozen=True)
class ModelLoss(ArrayLoss):
    """The loss of a model."""

    model: Any
    options: dict[str, Any] = field(hash=False)

    def inputs(self, batch: Batch) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
        """The arrays and masks of a batch. ValueError for ids outside the vocabulary."""
        sizes = getattr(self.model, "id_sizes", ())
        _require_batch_ids(batch, sizes, self.options.get("ignore_index"))
        return batch.arrays, batch.masks

    def of(self, params: Any, inputs: Any, dropout_key: ops.RandomKey | None) -> tuple[Array, Any]:
        """The mean loss () of `inputs` on the device, and its cache."""
        arrays, masks = inputs
        loss, cache = self.model.loss(
            params, *arrays, **masks, **self.options, dropout_key=dropout_key
        )
        return loss, cache


@dataclass(frozen=True)
class SegmentLoss:
    """The loss of a `LanguageModel` with a segment memory, for batches of `Streams`."""

    model: Any
    options: dict[str, Any] = field(hash=False)

    def __call__(
        self,
        params: Any,
        batch: Batch,
        backend: str | Backend,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, Any]:
        """The mean loss () of a batch after an empty memory, and its cache."""
        loss, cache, _ = self.after(None, params, batch, backend, dropout_key)
        return loss, cache

    def after(
        self,
        memory: SegmentMemory | None,
        params: Any,
        batch: Batch,
        backend: str | Backend,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, Any, SegmentMemory]:
        """The mean loss () of a batch, its cache, and the memory after it.

        memory: after the batch before. None: empty, as for a batch that `starts`.
        """
        _require_batch_ids(batch, self.model.id_sizes, self.options.get("ignore_index"))
        tokens, targets = map(backends.get(backend).asarray, batch.arrays)
        if memory is None or batch.starts:
            memory = self.model.init_memory(params, len(tokens))
        result: tuple[Array, Any, SegmentMemory] = self.model.segment_loss(
            params, tokens, targets, memory, **self.options, dropout_key=dropout_key
        )
        return result


def _require_batch_ids(batch: Batch, sizes: Sequence[int | None], ignored: int | None) -> None:
    """ValueError if an array of the batch has an id outside [0, size).

    sizes: one for each array of the batch, the number of its ids; None: the array holds no ids.
        The last size belongs to the array of targets.
    ignored: the target that is allowed outside [0, size); None: no such target
    """
    for n, (ids, size) in enumerate(zip(batch.arrays, sizes, strict=False), start=1):
        if size is not None:
            known = ids if n < len(sizes) else ids[ids != ignored]
            require_ids("loss", f"ids of array {n} of the batch", known, size, known)
