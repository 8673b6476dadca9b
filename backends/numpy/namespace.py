"""array_api_compat's NumPy, without what of NumPy nothing here uses: that takes half as long again.

Its import asks for every name of NumPy, so that f2py and testing would be loaded too, and with them
unittest, email and subprocess. They come when somebody else first looks into them.
"""

from __future__ import annotations

import importlib.util
import sys

import numpy


def _later(name: str) -> None:
    """Load a module of NumPy at its first use (the recipe of `importlib.util.LazyLoader`)."""
    full = f"numpy.{name}"
    spec = None if full in sys.modules else importlib.util.find_spec(full)
    if spec is None or spec.loader is None:
        return
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    setattr(numpy, name, module)


if "array_api_compat.numpy" not in sys.modules:
    _later("f2py")
    _later("testing")
    if sys.version_info >= (3, 12, 3):  # before, two threads could not look into one at once
        _later("ma")  # as numba does
        _later("polynomial")
        _later("random")

import array_api_compat.numpy as xp  # noqa: E402

__all__ = ["xp"]
