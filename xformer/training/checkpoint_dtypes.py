"""The arrays that a checkpoint can store, so that the backend can read them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from xformer.backends import Backend
from xformer.base.files import file_layout

WHOLE = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
RESERVED = "__metadata__"  # a key of safetensors


def require_storable(what: str, leaves: Mapping[str, Any], backend: Backend) -> None:
    """Raise TypeError or ValueError for the first leaf that a checkpoint cannot store.

    what: the beginning of the error message
    leaves: by name
    backend: reads the checkpoint later; its `dtypes` are the floating dtypes that can be stored

    TypeError for a leaf that is no array, and for an array with a dtype other than bool, integers
    and `backend.dtypes`. ValueError for a name that safetensors reserves or that is no valid
    Unicode.
    """
    able = f"arrays of bool, integers, {' or '.join(backend.dtypes)}"
    for name, leaf in leaves.items():
        if name == RESERVED:
            raise ValueError(f"{what}: an array cannot be called {name}, which is safetensors' own")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{what}: the name {name!r:.60} is no Unicode text") from error
        is_plain = hasattr(leaf, "dtype") and not isinstance(leaf, np.ma.MaskedArray)
        kind = stored_dtype_name(leaf) if is_plain else type(leaf).__name__
        if kind not in (*WHOLE, *backend.dtypes):
            raise TypeError(f"{what}: {name} cannot be stored: {able} can be, got {kind}")


def stored_dtype_name(array: Any) -> str:
    """The array API's name of an array's dtype, in any byte order."""
    dtype = array.dtype
    return str(getattr(dtype, "name", str(dtype).rpartition(".")[2]))


def on_host(leaves: Mapping[str, Any], backend: Backend) -> dict[str, np.ndarray]:
    """The leaves as NumPy arrays, as a file stores them."""
    return {name: file_layout(np.asarray(backend.to_numpy(x))) for name, x in leaves.items()}
