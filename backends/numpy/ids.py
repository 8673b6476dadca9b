"""Private copies of ids, to which no other thread can write."""

from __future__ import annotations

from typing import Any

import numpy as np


def private_copy(ids: Any) -> Any:
    """Return a copy of `ids` if it is a NumPy array, else `ids`.

    Kernels check the copy, then use it: another thread may write new ids into the original.
    Subclasses are kept, so that the check can refuse masked arrays.
    """
    return np.array(ids, subok=True) if isinstance(ids, np.ndarray) else ids
