"""Packages that import a name at its first use, since most programs need few of their names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def later(package: str, **files: str) -> None:
    """Make `package` import each of its names at the first use of the name.

    later(__name__, gelu="gelu", norm="NormConfig NormParams norm")

    package: the name of the package
    files: file -> the names in this file, separated by spaces

    The name of a file is the function or class of that name in the file, or the file if there is
    none.
    """
    module = sys.modules[package]
    vars(module)["_file_of"] = {file: file for file in files} | {
        name: file for file, names in files.items() for name in names.split()
    }
    module.__class__ = _Package


class _Package(ModuleType):
    _file_of: Mapping[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in self._file_of:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        file = importlib.import_module(f"{self.__name__}.{self._file_of[name]}")
        value = _in(file, name) if name == self._file_of[name] else getattr(file, name)
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Bind a name. For the import of a file, bind what `_in` returns, not the file."""
        if isinstance(value, ModuleType) and self._file_of.get(name) == name:
            if vars(self).get(name, value) is not value:
                return  # the user has bound another object to the name
            value = _in(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return list(self.__all__)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the package by its name, as cloudpickle does with a plain module."""
        return importlib.import_module, (self.__name__,)


def _in(file: ModuleType, name: str) -> Any:
    """Return the object `name` in `file`, or the file if it has none of this name."""
    return getattr(file, name, file)
