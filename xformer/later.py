"""Packages whose names are imported when they are first asked for: a program needs few of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def later(package: str, **files: str) -> None:
    """Have `package` import names, those of `files` after each file, when they are asked for.

    later(__name__, gelu="gelu", norm="NormConfig NormParams norm")

    A file is itself such a name, unless something in it is called as it is.
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
            from xformer.renamed import new_name

            return getattr(self, new_name(self.__name__, name))
        file = importlib.import_module(f"{self.__name__}.{self._file_of[name]}")
        found = _in(file, name) if name == self._file_of[name] else getattr(file, name)
        vars(self)[name] = found
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Whoever imports a file binds its name here, which may be that of what is in it."""
        if isinstance(value, ModuleType) and self._file_of.get(name) == name:
            if vars(self).get(name, value) is not value:
                return  # the user has put something else there
            value = _in(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return list(self.__all__)

    def __reduce__(self) -> tuple[Any, ...]:
        """By its name, as cloudpickle does with a plain module."""
        return importlib.import_module, (self.__name__,)


def _in(file: ModuleType, name: str) -> Any:
    """What is called as its file is, or the file, if nothing is."""
    return getattr(file, name, file)
