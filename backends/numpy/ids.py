"""A private copy of ids: no other thread can write to it."""

from __future__ import annotations

from typing import Any

import numpy as np


def private(ids: Any) -> Any:
    """A copy of NumPy's arrays, for a check and for what trusts it: a thread may refill the ids.

    Of the same type: the check refuses subclasses such as masked arrays.
    """
    return np.array(ids, subok=True) if isinstance(ids, np.ndarray) else ids
