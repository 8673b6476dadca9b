"""array_api_compat's NumPy, without what of NumPy nothing here uses: that takes half as long again.

Its import asks for every name of NumPy, and so for f2py and testing, and with them for unittest,
email and subprocess. They come when somebody else first looks into them.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType
from typing import Any

import numpy

LATE = (
    "char",
    "core",
    "ctypeslib",
    "f2py",
    "ma",
    "polynomial",
    "random",
    "rec",
    "strings",
    "testing",
    "typing",
)


class _Later(ModuleType):
    """In the place of a module of NumPy, which is imported by whoever looks into it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self.__name__))


def _imported() -> Any:
    """array_api_compat's NumPy; a late name of it is NumPy's own, as soon as it is asked for."""
    known = "array_api_compat.numpy" in sys.modules
    late = [] if known else [name for name in LATE if f"numpy.{name}" not in sys.modules]
    stand_ins = {name: _Later(f"numpy.{name}") for name in late}
    for name in late:
        vars(numpy).setdefault(name, stand_ins[name])
    try:
        xp: Any = importlib.import_module("array_api_compat.numpy")
    finally:
        for name in late:
            _take_back(numpy, name, stand_ins[name])
    for name in late:
        _take_back(xp, name, stand_ins[name])
    if late:
        before = vars(xp).get("__getattr__", partial(_missing, xp))
        xp.__getattr__ = lambda name: getattr(numpy, name) if name in late else before(name)
    return xp


def _missing(module: Any, name: str) -> Any:
    raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")


def _take_back(module: Any, name: str, stand_in: _Later) -> None:
    """What another thread has imported meanwhile is there instead."""
    if vars(module).get(name) is stand_in:
        delattr(module, name)
        if (own := sys.modules.get(stand_in.__name__)) is not None:
            vars(module).setdefault(name, own)


xp = _imported()

__all__ = ["xp"]
