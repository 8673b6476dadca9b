"""Compile all kernels ahead of their first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np

from xformer import dispatch, ops
from xformer.backends.numba import kernels, tile
from xformer.backends.numba.program import native
from xformer.backends.numba.registers import USABLE


def compilations() -> list[Callable[[], Any]]:
    """Return functions that compile one kernel each, or load it if its machine code is stored."""
    for file in iter_modules(kernels.__path__, f"{kernels.__name__}."):
        import_module(file.name)
    addresses = [lambda kernel=kernel: kernel.address for kernel in native.KERNELS]
    return [_run_one, *([tile.compiled] if USABLE else []), *addresses]


def _run_one() -> None:
    """Run a program, which compiles the engine."""
    with dispatch.kernels("numba"):
        ops.gelu(np.ones((512, 512), np.float32))
