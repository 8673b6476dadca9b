"""PyTorch as an array library, without autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import array_api_compat.torch as xp
import numpy as np
import torch

from xformer.base.typing import Array
from xformer.dispatch.backend import Backend, Memory, Unusable, process_memory

__all__ = ["TorchBackend", "backend", "refusal"]


def refusal(array_type: type) -> str | None:
    """Return why tensors of `array_type` are refused: masked and nested ones. None: accepted."""
    if array_type.__module__.startswith(("torch.masked.", "torch.nested.")):
        return f"{array_type.__name__}, whose operators differ from torch.Tensor's"
    return None


@dataclass(frozen=True)
class TorchBackend(Backend):
    """Tensors on the CPU or on a CUDA device."""

    @property
    def defers(self) -> bool:  # type: ignore[override]
        """Whether a call returns before its work is done: on CUDA."""
        return self._on_cuda()

    def to_numpy(self, array: Array) -> np.ndarray:
        """Return a tensor as a NumPy array on the host. On the CPU both share memory."""
        host: np.ndarray = array.detach().cpu().numpy()
        return host

    def synchronize(self) -> None:
        """Wait until the CUDA device has finished all its work. On the CPU it returns at once."""
        if self._on_cuda():
            torch.cuda.synchronize(self.device)

    def memory(self) -> Memory:
        """Return bytes of CUDA tensors and the peak of torch's pool; on the CPU, of the process."""
        if not self._on_cuda():
            return process_memory()
        return Memory(
            torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        )

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """Return a context with torch's deterministic algorithms, in the whole process.

        torch raises RuntimeError for an operation that has no deterministic algorithm.
        """
        before = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)

    def _on_cuda(self) -> bool:
        return self.device is not None and torch.device(self.device).type == "cuda"

    def _from_host(self, host: np.ndarray) -> Array:
        # torch.tensor copies, since `host` may be read-only. torch supports no negative strides.
        return torch.tensor(np.asarray(host, order="C"), device=self.device)

    def device_name(self) -> str:
        """Return the name of the CUDA device, or "cpu"."""
        return torch.cuda.get_device_name(self.device) if self._on_cuda() else "cpu"


def backend(device: str | None = None) -> Backend:
    """Return the torch backend. device: torch's name, "cpu" (the default), "cuda", "cuda:1"."""
    try:
        device_type = "cpu" if device is None else torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"backend torch has no device {device!r}: {error}") from None
    if device_type == "cuda" and not torch.cuda.is_available():
        raise Unusable(f"backend torch cannot use {device}: no CUDA device is visible")
    return TorchBackend("torch", xp, device, ("float32", "float64"), torch.__version__)
