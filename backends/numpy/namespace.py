"""array_api_compat's NumPy, without what of NumPy nothing here uses: that takes half as long again.

Its import asks for every name of NumPy, and so for f2py and testing, and with them for unittest,
email and subprocess. They come when somebody else first looks into them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy

LATE = ("f2py", "ma", "polynomial", "random", "testing")


class _Later:
    """In the place of a module of NumPy, which is imported by whoever looks into it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def _imported() -> Any:
    """array_api_compat's NumPy; a late name of it is NumPy's own, as soon as it is asked for."""
    known = "array_api_compat.numpy" in sys.modules
    late = [] if known else [name for name in LATE if f"numpy.{name}" not in sys.modules]
    stand_ins = {name: _Later(f"numpy.{name}") for name in late}
    vars(numpy).update(stand_ins)
    try:
        xp: Any = importlib.import_module("array_api_compat.numpy")
    finally:
        for name in late:
            _take_back(numpy, name, stand_ins[name])
    for name in late:
        _take_back(xp, name, stand_ins[name])
    if late:

        def look(name: str) -> Any:
            if name in late:
                return getattr(numpy, name)  # which imports it
            raise AttributeError(f"module {xp.__name__!r} has no attribute {name!r}")

        xp.__getattr__ = look
    return xp


def _take_back(module: Any, name: str, stand_in: _Later) -> None:
    """Unless somebody has imported the module itself meanwhile."""
    if vars(module).get(name) is stand_in:
        delattr(module, name)


xp = _imported()

__all__ = ["xp"]
