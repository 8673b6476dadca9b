"""The backends by name: which there are, which can be used here, and why others cannot."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from xformer.base.choices import require_one_of
from xformer.base.typing import Array
from xformer.dispatch.backend import INSTALL_CUDA, Backend, Unusable
from xformer.dispatch.contexts import chosen_kernels
from xformer.dispatch.libraries import library_of, package_of, plugins

NAMES = ("numpy", "cupy", "torch", "jax", "array-api-strict", "numba", "mkl")
ON_NUMPY = ("numba", "mkl")  # further kernels for NumPy arrays, chosen by `xformer.kernels`
WITH_NUMPY = ("numpy", *ON_NUMPY)

INSTALL = {
    "cupy": INSTALL_CUDA,
    "torch": "pip install 'xformer-array[torch]'",
    "jax": "pip install 'xformer-array[jax]'",
    "array-api-strict": "pip install array-api-strict",
    "numba": "pip install 'xformer-array[numba]'",
    "mkl": "pip install 'xformer-array[mkl]'",
}


def get(name: str | Backend = "numpy", device: str | None = None) -> Backend:
    """Return the backend called `name`, on `device` (None: the library's default device).

    name: or a Backend, which is returned; it has a device.

    "numba" and "mkl" use NumPy arrays. Their kernels run only within `active()` of the backend, and
    in functions to which the backend is passed.

    Raises ValueError for an unknown name, and for a Backend beside a device. Raises Unusable (an
    ImportError) if the backend cannot be used here. The message says why, and how to install it.
    """
    if not isinstance(name, Backend):
        return _open(name, device)[1]
    if device is not None:
        raise ValueError(
            f"get: a Backend has a device: give the name {name.name!r} with {device!r}"
        )
    return name


def backend_of(array: Array) -> Backend:
    """Return the backend of an array, on the default device of the array's library.

    For a NumPy array it is the backend whose kernels run, such as "numba" within
    `xformer.kernels("numba")`.
    Raises ValueError if no backend uses the array's library.
    """
    library = library_of(type(array))  # this imports the backend's module
    if library == "numpy":
        library = chosen_kernels()
    module = sys.modules.get(package_of(library) or "")
    if module is None:
        raise ValueError(f"array must be of one of {', '.join(names())}, got one of {library}")
    backend: Backend = module.backend(None)
    return backend


def names() -> tuple[str, ...]:
    """Return `NAMES`, then the names of backends in other distributions (see CONTRIBUTING.md)."""
    return *NAMES, *plugins()


def available() -> tuple[str, ...]:
    """Return the names of the backends that can be used here, in the order of `names()`."""
    return tuple(name for name in names() if unavailable_reason(name) is None)


def unavailable_reason(name: str) -> str | None:
    """Return why backend `name` cannot be used here, or None if it can."""
    try:
        _open(name, None)
    except Unusable as error:
        return str(error)
    return None


def require_kernels(name: str) -> None:
    """Import the kernels `name`, one of `ON_NUMPY`. Raise Unusable if they cannot run here."""
    module, _ = _open(name, None)
    if name == "mkl":
        module.run_on_one_thread()


def beside(name: str) -> dict[str, str]:
    """Return the further libraries that kernels of backend `name` call: cuBLASLt, cuDNN for CuPy.

    The values are the version of each library, or why it cannot be called. No device is needed.
    The result is empty for other backends, and if CuPy is not installed.
    """
    if name != "cupy":
        return {}
    try:
        driver = importlib.import_module("xformer.backends.cupy.driver")
    except ImportError:
        return {}
    versions: dict[str, str] = driver.beside()
    return versions


def _open(name: str, device: str | None) -> tuple[ModuleType, Backend]:
    if name not in NAMES:  # plugins take long to look up
        require_one_of("backend", name, names())
    try:
        module = importlib.import_module(package_of(name.replace("-", "_")) or name)
        return module, module.backend(device)
    except Unusable:
        raise
    except ImportError as error:
        raise Unusable(
            f"backend {name} cannot be used: {error}. Install it with "
            f"{INSTALL.get(name, 'its own package')}"
        ) from error
