"""NVIDIA's packages beside CuPy: which are missing, by name, and which extra brings them.

A machine may have some of them, of `pip install --no-deps` for one. What an extra asks for in
pyproject.toml is what is named here.
"""

from __future__ import annotations

import importlib.util

# Modules that NVIDIA's import when they are imported, or in a call, and whose package has each.
PACKAGES = {
    "nvmath": {
        "nvmath": "nvmath-python",
        "cuda.core": "cuda-core",
        "cuda.bindings": "cuda-bindings",
        "cuda.pathfinder": "cuda-pathfinder",
    },
    "cudnn": {"cudnn": "nvidia-cudnn-frontend", "cuda.bindings": "cuda-bindings"},
}
# What brings the library itself, which the bindings open when they are first called.
LIBRARIES = {
    "cublasLt": "pip install 'xformer-array[cuda13]' (or [cuda12])",
    "cudnn": "pip install 'xformer-array[cudnn]' (CUDA 12: [cudnn-cu12])",
}


def missing(extra: str) -> str | None:
    """Which packages of an extra are missing, as a sentence; None where all are installed."""
    names = [name for module, name in PACKAGES[extra].items() if not is_installed(module)]
    if not names:
        return None
    said = f"package {names[0]} is" if len(names) == 1 else f"packages {', '.join(names)} are"
    return f"{said} not installed: pip install 'xformer-array[{extra}]'"


def no_library(name: str, error: Exception) -> str:
    """Why the bindings cannot call a library: it is not found, or they say something else."""
    said = str(error)
    if "driver" in said.lower():  # without one they look for no library
        return f"there is no NVIDIA driver ({said})"
    if f"lib{name.lower()}" in said.lower() or "unable to find symbol" in said.lower():
        return f"lib{name} was not found ({said}): {LIBRARIES[name]}"
    return f"{type(error).__name__}: {said}"


def is_installed(module: str) -> bool:
    """Whether a module can be found; packages around it are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of a package around it
        return False
    except ValueError:  # imported, by other means
        return True
