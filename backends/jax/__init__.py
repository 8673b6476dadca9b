"""JAX as an array library, eager or under `jax.jit`.

JAX computes in float64 only if the program has enabled it before it creates the first array.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xformer.base.tree import Constant, Frozen
from xformer.base.typing import Array
from xformer.dispatch.backend import Backend, Memory, Unusable, process_memory

# So that parameters with Frozen and Constant leaves can be arguments of compiled functions.
jax.tree_util.register_pytree_node(
    Frozen, lambda leaf: ((leaf.value,), None), lambda _, c: Frozen(*c)
)
jax.tree_util.register_pytree_node(Constant, lambda leaf: ((), leaf), lambda leaf, _: leaf)

__all__ = ["JaxBackend", "backend", "enable_float64"]

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"  # XLA reads it at its first use in a process


@dataclass(frozen=True)
class JaxBackend(Backend):
    """JAX on its default device or on another platform."""

    compiles = True
    hint = "; xformer.backends.jax.enable_float64() lets JAX compute in float64"

    def synchronize(self) -> None:
        """Wait until the device has finished all its work.

        It moves a number to the device, then waits for this number and for all live arrays.
        """
        jax.device_put(np.zeros(()), self.device).block_until_ready()
        for array in jax.live_arrays():
            array.block_until_ready()

    def memory(self) -> Memory:
        """Return the bytes of the accelerator's allocator, or of the process if there is none."""
        stats = self._device().memory_stats()
        if not stats:
            return process_memory()
        return Memory(stats.get("bytes_in_use"), stats.get("peak_bytes_in_use"))

    def deterministic(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: XLA's flag decides, before the program starts.

        Raises ValueError on a GPU if the flag is not in XLA_FLAGS.
        """
        if self._device().platform == "gpu" and DETERMINISTIC not in os.environ.get(
            "XLA_FLAGS", ""
        ):
            raise ValueError(
                f"backend jax is deterministic only with XLA_FLAGS={DETERMINISTIC}, set before the "
                f"program starts"
            )
        return nullcontext()

    def compiled(
        self, fn: Callable[..., Any], donated: Sequence[int], *, lends: bool = False
    ) -> Callable[..., Any]:
        """Return `fn` compiled by `jax.jit`. JAX never overwrites results, whatever `lends` is."""
        from xformer.backends.jax.compiled import Compiled

        return Compiled(fn, donated)

    def _from_host(self, host: np.ndarray) -> Array:
        return jax.device_put(jax.numpy.asarray(_narrow(host)), self.device)

    def _device(self) -> Any:
        return self.device or jax.devices()[0]

    def device_name(self) -> str:
        """Return JAX's name of the kind of device."""
        return str(self._device().device_kind)


def backend(device: str | None = None) -> Backend:
    """Return the JAX backend. device: a platform of JAX, "cpu", "gpu" or "tpu"; None: default."""
    try:
        chosen = None if device is None else jax.devices(device)[0]
    except RuntimeError as error:
        raise Unusable(f"backend jax cannot use {device}: {error}") from error
    has_float64 = bool(jax.config.jax_enable_x64)
    dtypes = ("float32", "float64") if has_float64 else ("float32",)
    return JaxBackend("jax", jax.numpy, chosen, dtypes, jax.__version__)


def enable_float64() -> None:
    """Make JAX compute in float64 and int64, from now on and in the whole process."""
    jax.config.update("jax_enable_x64", True)


def _narrow(host: np.ndarray) -> np.ndarray:
    """Return int64 as int32, and uint64 as uint32, if JAX has no 64-bit types.

    Raises ValueError if the values do not fit.
    """
    narrow = {"int64": "int32", "uint64": "uint32"}.get(host.dtype.name)
    if narrow is None or jax.config.jax_enable_x64:
        return host
    if (host.astype(narrow) != host).any():
        raise ValueError(f"backend jax: values do not fit in {narrow}{JaxBackend.hint}")
    return host.astype(narrow)
