"""Gradients by numbers, element by element, and their distance from the ones written by hand.

`xformer.gradcheck` is the everyday check; this one exists to be compared with the errors that
document 003 prints, and uses its metric.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from xformer import tree

FLOOR = 1e-8  # of the metric: gradients below it are compared absolutely
TWO_POINT = ((1, 1 / 2),)
FOURTH_ORDER = ((1, 8 / 12), (2, -1 / 12))


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """max over the elements of |a - b| / max(|a| + |b|, 1e-8)."""
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(a) + np.abs(b), FLOOR)))


def numerical_gradient(
    loss: Callable[[Any], float],
    args: Any,
    name: str,
    *,
    step: float,
    rule: tuple[tuple[int, float], ...] = FOURTH_ORDER,
) -> np.ndarray:
    """d loss / d (leaf `name` of the tree `args`): sum of w (L(m step) - L(-m step)) / step."""
    leaves = tree.flatten(args)
    leaf = leaves[name]
    gradient = np.zeros_like(leaf)
    for index in np.ndindex(leaf.shape):

        def moved(distance: float, index: tuple[int, ...] = index) -> float:
            changed = leaf.copy()
            changed[index] += distance
            return loss(tree.unflatten(args, leaves | {name: changed}))

        terms = (w * (moved(m * step) - moved(-m * step)) for m, w in rule)
        gradient[index] = sum(terms) / step
    return gradient
