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
    _file_of: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._file_of:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        file = importlib.import_module(f"{self.__name__}.{self._file_of[name]}")
        vars(self)[name] = found = getattr(file, name, file)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Whoever imports a file binds its name here, which may be that of what is in it."""
        if isinstance(value, ModuleType) and name in self._file_of:
            value = getattr(value, name, value)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return list(self.__all__)
