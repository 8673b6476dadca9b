"""Backends: the array libraries that can be used, and how each creates and moves arrays.

    backend = xformer.backends.get("cupy")
    x = backend.asarray([[1.0, 2.0]], dtype="float32")

Code for one particular library is in a folder of this package: its `backend` function, and the
kernels that it registers for the ops.
"""

from __future__ import annotations

if __name__ == "backends":  # possible if the checkout is on sys.path
    raise ImportError("backends/ is imported as xformer.backends")

from xformer.dispatch.backend import Backend, Generator, Memory, Unusable
from xformer.dispatch.registry import (
    NAMES,
    ON_NUMPY,
    WITH_NUMPY,
    available,
    backend_of,
    beside,
    get,
    names,
    require_kernels,
    unavailable_reason,
)

__all__ = [
    "NAMES",
    "ON_NUMPY",
    "WITH_NUMPY",
    "Backend",
    "Generator",
    "Memory",
    "Unusable",
    "available",
    "backend_of",
    "beside",
    "get",
    "names",
    "require_kernels",
    "unavailable_reason",
]
