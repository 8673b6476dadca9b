"""Gradient checks to make: every op, layer and model, with every option, on small random inputs.

    for case in xformer.catalogue.cases():
        case.check(backends.get("torch")).require()

`xformer gradcheck` and the tests run them. Sizes are different primes where they may be, so that no
two axes can be taken for each other; gains and biases are random, never ones and zeros.
"""

from __future__ import annotations

from xformer.catalogue import blocks, layers, models, ops
from xformer.catalogue.case import Case

__all__ = ["Case", "cases"]


def cases() -> tuple[Case, ...]:
    """All of them: ops, then layers, then models."""
    return (*ops.cases(), *layers.cases(), *blocks.cases(), *models.cases())
