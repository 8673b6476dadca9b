"""Packages that import a name at its first use, since most programs need few of their names."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def later(package: str, *files: str) -> None:
    """Make `package` import each of its names at the first use of the name.

    if TYPE_CHECKING:
        from xformer.ops.gelu import gelu as gelu

    later(__name__, "activation")

    The names are those of the block, which type checkers read too, and `__all__` lists them.

    package: the name of the package, whose source must be installed
    files: further files that are attributes of the package, but not in `__all__`

    The name of a file is the function or class of that name in the file, or the file if there is
    none.
    """
    module: Any = sys.modules[package]
    nodes = ast.parse(module.__loader__.get_source(package)).body
    (block,) = (node.body for node in nodes if isinstance(node, ast.If))
    imports = [node for node in block if isinstance(node, ast.ImportFrom)]
    places = {alias.name: str(node.module) for node in imports for alias in node.names}
    module.__all__ = sorted(places, key=lambda name: (not name.isupper(), name.islower(), name))
    start = f"{package}."
    below = [place.removeprefix(start) for place in places.values() if place.startswith(start)]
    own = {*files, *(path.partition(".")[0] for path in below)} - places.keys()
    own |= {name for name, place in places.items() if place == package}
    module._place_of = places | {file: start + file for file in own}
    module.__class__ = _Package


class _Package(ModuleType):
    _place_of: Mapping[str, str] = {}  # name -> the module that has it, or that it is

    def __getattr__(self, name: str) -> Any:
        if name not in self._place_of:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        file = importlib.import_module(self._place_of[name])
        value = _in(file, name) if self._is_file(name) else getattr(file, name)
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Bind a name. For the import of a file, bind what `_in` returns, not the file."""
        if isinstance(value, ModuleType) and self._is_file(name):
            if vars(self).get(name, value) is not value:
                return  # the user has bound another object to the name
            value = _in(value, name)
        super().__setattr__(name, value)

    def _is_file(self, name: str) -> bool:
        return self._place_of.get(name) == f"{self.__name__}.{name}"

    def __dir__(self) -> list[str]:
        return list(self.__all__)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the package by its name, as cloudpickle does with a plain module."""
        return importlib.import_module, (self.__name__,)


def _in(file: ModuleType, name: str) -> Any:
    """Return the object `name` in `file`, or the file if it has none of this name."""
    return getattr(file, name, file)
