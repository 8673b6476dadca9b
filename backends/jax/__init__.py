"""JAX, as an array library: eager, or under `jax.jit`.

JAX computes in float64 only where the program has enabled it, before the first array.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xformer.backends.base import Backend, Memory, Unusable, process_memory
from xformer.tree import Constant, Frozen
from xformer.typing import Array

# Parameters that hold such leaves can be arguments of compiled functions.
jax.tree_util.register_pytree_node(
    Frozen, lambda leaf: ((leaf.value,), None), lambda _, c: Frozen(*c)
)
jax.tree_util.register_pytree_node(Constant, lambda leaf: ((), leaf), lambda leaf, _: leaf)

__all__ = ["JaxBackend", "backend", "enable_float64"]

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"  # read by XLA when a process first uses it


@dataclass(frozen=True)
class JaxBackend(Backend):
    """Arrays on JAX's default device or a named one."""

    compiles = True
    hint = "; xformer.backends.jax.enable_float64() lets JAX compute in float64"

    def synchronize(self) -> None:
        """Wait until what was dispatched is done: a value is asked from the device."""
        jax.device_put(np.zeros(()), self.device).block_until_ready()
        for array in jax.live_arrays():
            array.block_until_ready()

    def memory(self) -> Memory:
        """Bytes of the process, or of the accelerator's allocator."""
        stats = self._device().memory_stats()
        if not stats:
            return process_memory()
        return Memory(stats.get("bytes_in_use"), stats.get("peak_bytes_in_use"))

    def deterministic(self) -> AbstractContextManager[None]:
        """As the process was started. ValueError on a GPU without XLA's flag for it."""
        if self._device().platform == "gpu" and DETERMINISTIC not in os.environ.get(
            "XLA_FLAGS", ""
        ):
            raise ValueError(
                f"backend jax gives the same bits each time only with XLA_FLAGS={DETERMINISTIC}, "
                f"set before the program starts"
            )
        return nullcontext()

    def compiled(
        self, fn: Callable[..., Any], donated: Sequence[int], *, lends: bool = False
    ) -> Callable[..., Any]:
        """`jax.jit`."""
        from xformer.backends.jax.compiled import Compiled

        return Compiled(fn, donated)

    def _from_host(self, host: np.ndarray) -> Array:
        return jax.device_put(jax.numpy.asarray(_narrow(host)), self.device)

    def _device(self) -> Any:
        return self.device or jax.devices()[0]

    def device_name(self) -> str:
        """What the device is called."""
        return str(self._device().device_kind)


def backend(device: str | None = None) -> Backend:
    """The JAX backend; device as a platform of JAX: "cpu", "gpu", "tpu"."""
    try:
        where = None if device is None else jax.devices(device)[0]
    except RuntimeError as error:
        raise Unusable(f"backend jax cannot use {device}: {error}") from error
    wide = bool(jax.config.jax_enable_x64)
    dtypes = ("float32", "float64") if wide else ("float32",)
    return JaxBackend("jax", jax.numpy, where, dtypes, jax.__version__)


def enable_float64() -> None:
    """Let JAX compute in float64 and int64 from now on: for the whole process."""
    jax.config.update("jax_enable_x64", True)


def _narrow(host: np.ndarray) -> np.ndarray:
    """int64 as int32 where JAX has no int64, instead of its warning. ValueError if it is not."""
    narrow = {"int64": "int32", "uint64": "uint32"}.get(host.dtype.name)
    if narrow is None or jax.config.jax_enable_x64:
        return host
    if (host.astype(narrow) != host).any():
        raise ValueError(f"backend jax: values do not fit in {narrow}{JaxBackend.hint}")
    return host.astype(narrow)
