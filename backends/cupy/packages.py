"""Names the NVIDIA packages that are missing, and the extra that installs them.

A machine may have only some of them, for example after `pip install --no-deps`. The packages here
are those of the extras in pyproject.toml.
"""

from __future__ import annotations

import importlib.util

from xformer.dispatch.backend import INSTALL_CUDA

# Extra -> the modules that it needs, at import or in a call, and the package of each.
PACKAGES = {
    "nvmath": {
        "nvmath": "nvmath-python",
        "cuda.core": "cuda-core",
        "cuda.bindings": "cuda-bindings",
        "cuda.pathfinder": "cuda-pathfinder",
    },
    "cudnn": {"cudnn": "nvidia-cudnn-frontend", "cuda.bindings": "cuda-bindings"},
}
# Library -> the command that installs it. The bindings open the library at their first call.
LIBRARIES = {
    "cublasLt": INSTALL_CUDA,
    "cudnn": "pip install 'xformer-array[cudnn]', or for CUDA 12: pip install "
    "'xformer-array[cudnn-cu12]'",
}


def missing(extra: str) -> str | None:
    """Return a sentence that names the missing packages of an extra, or None if none is missing."""
    names = [name for module, name in PACKAGES[extra].items() if not is_installed(module)]
    if not names:
        return None
    subject = f"package {names[0]} is" if len(names) == 1 else f"packages {', '.join(names)} are"
    return f"{subject} not installed: pip install 'xformer-array[{extra}]'"


def no_library(name: str, error: Exception) -> str:
    """Return why the bindings cannot call a library, from the error that they raised."""
    text = str(error)
    if "driver" in text.lower():  # without a driver they do not look for the library
        return f"there is no NVIDIA driver ({text})"
    if f"lib{name.lower()}" in text.lower() or "unable to find symbol" in text.lower():
        return f"lib{name} was not found ({text}): {LIBRARIES[name]}"
    return f"{type(error).__name__}: {text}"


def is_installed(module: str) -> bool:
    """Return whether a module can be found. It imports the packages that contain the module."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of a package that contains it
        return False
    except ValueError:  # it is already imported, and has no spec
        return True
