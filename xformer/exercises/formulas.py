"""What several wrong formulas need, on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np


def rows(x: Any) -> Any:
    """(..., D) -> (N, D)."""
    return np.reshape(x, (-1, x.shape[-1]))


def mean(x: Any) -> Any:
    """The mean along the last axis, (..., 1)."""
    return np.mean(x, axis=-1, keepdims=True)


def total(x: Any) -> Any:
    """The sum along the last axis, (..., 1)."""
    return np.sum(x, axis=-1, keepdims=True)


def softmax(x: Any, axis: int = -1) -> Any:
    """Softmax along an axis."""
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)
