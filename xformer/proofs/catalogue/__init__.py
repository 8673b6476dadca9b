"""The catalogue of gradient checks: every op, layer and model with every option, on small inputs.

    for case in xformer.proofs.catalogue.cases():
        case.check(backends.get("torch")).require()

`xformer gradcheck` and the tests run them. If possible, sizes are different primes, so that a check
detects exchanged axes. Gains and biases are random, never ones and zeros.
"""

from __future__ import annotations

from xformer.proofs.catalogue import blocks, layers, models, ops
from xformer.proofs.catalogue.case import Case

__all__ = ["Case", "cases"]


def cases() -> tuple[Case, ...]:
    """All cases: ops, then layers, then models."""
    return (*ops.cases(), *layers.cases(), *blocks.cases(), *models.cases())
