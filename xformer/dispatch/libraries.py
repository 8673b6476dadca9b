"""The library of an array: the backend that serves it, and types that a backend refuses."""

from __future__ import annotations

import functools
import importlib
import importlib.util

# Module that defines an array type -> folder under backends/, if the two names differ.
_FOLDERS = {"jaxlib": "jax"}
LIBRARIES: dict[type, str] = {}


class Refused(TypeError):
    """Raised by `library_of` for an array type that a backend rejects, such as some subclasses.

    got: the type and the reason, for messages that end with "got ..."
    """

    def __init__(self, got: str) -> None:
        super().__init__(f"an array must be of a library's own type, got {got}")
        self.got = got


def library_of(array_type: type) -> str:
    """The name of the library that defines `array_type`. The first call imports its backend.

    A library without a folder under `backends/` runs the references. ImportError if a backend
    cannot be imported: otherwise it would be slow without a message. Refused if the backend's
    `refusal` rejects the type: a subclass may compute differently from its library's arrays.
    """
    library = LIBRARIES.get(array_type)
    if library is None:
        library = LIBRARIES[array_type] = _find_library(array_type)
    return library


def refusal(array_type: type) -> str | None:
    """The reason why an array type is not supported; None if it is."""
    try:
        library_of(array_type)
    except Refused as error:
        return error.got
    return None


def _find_library(array_type: type) -> str:
    named: str | None = getattr(array_type, "__xformer_library__", None)
    if named is not None:
        return named
    roots = [base.__module__.partition(".")[0] for base in array_type.__mro__]
    names = [_FOLDERS.get(root, root) for root in roots]
    for name in names:  # a user's subclass belongs to the library of its base class
        if (package := package_of(name)) is not None:
            backend = importlib.import_module(package)
            if hasattr(backend, "refusal") and (why := backend.refusal(array_type)):
                raise Refused(why)
            return name
    return names[0]


@functools.cache
def package_of(library: str) -> str | None:
    """The package with the backend of a library; None if there is none.

    It is a folder of `xformer.backends`, or the value of an entry point in the group
    `xformer.backends` whose name is that of the library's module.
    """
    package = f"xformer.backends.{library}"
    if importlib.util.find_spec(package) is not None:
        return package
    return plugins().get(library)


@functools.cache
def plugins() -> dict[str, str]:
    """Backends of other distributions: their packages by the name of the library's module."""
    from importlib.metadata import entry_points  # takes long to import

    return {point.name: point.value for point in entry_points(group="xformer.backends")}
