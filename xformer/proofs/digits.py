"""Check gradients to many digits, and measure the errors of values and gradients in float64.

Every case of the catalogue runs on numbers of n digits (`xformer.arrays.digits`). The derivative
along a random direction in all inputs, on dual numbers, must equal sum(gradient * direction). A
wrong digit of any element of a gradient would change that sum, so one direction suffices.

The same values and gradients in float64, minus those of n digits, are the errors of float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from xformer import backends
from xformer.arrays.derivatives import jvp
from xformer.arrays.digits import Precise, digits
from xformer.backends import Backend
from xformer.base import tree
from xformer.dispatch import reference_only
from xformer.proofs.catalogue import Case
from xformer.proofs.gradcheck import ROUNDING

ZERO = 1e-12  # a smaller number, relative to the largest one, is 0 but for rounding

# Subjects of cases whose forward and backward have constants in float64 that are not exactly
# derivatives of each other, and these constants. They agree to the digits of float64.
INSIDE = "gelu and cross_entropy inside"
CONSTANTS = {
    "erf": "coefficients of polynomials, 2 / sqrt(pi)",
    "gelu": "constants of erf, or sqrt(2 / pi) and 0.044715",
    "glu": "gelu inside",
    "mse": "2 / n",
    "info_nce": "1 / n of a mean",
    "cross_entropy": "label smoothing as a fraction of each class",
    "linear_cross_entropy": "label smoothing as a fraction of each class",
    "experts": "gelu inside",
    "feed_forward": "gelu inside",
    "block": "gelu inside",
    "blocks": "gelu inside",
    "stack": "gelu inside",
    "GPT": INSIDE,
    "Transformer": INSIDE,
    "LanguageModel": INSIDE,
    "EncoderDecoder": INSIDE,
}


class Errors(NamedTuple):
    """The largest errors of a case in float64, relative to the largest number of their array."""

    y: float
    gradients: float


class Accuracy(NamedTuple):
    """What a case showed.

    proof: |by hand - dual| of the derivative along a direction, relative to sum(|gradient *
        direction|), in n digits
    reference, kernels: errors in float64 of the references, and of NumPy's kernels
    """

    case: Case
    n: int
    proof: float
    reference: Errors
    kernels: Errors

    @property
    def agreed(self) -> int:
        """The number of digits to which the gradients are right, at most n."""
        if not self.proof > 0:
            return self.n if self.proof == 0 else 0  # 0 for NaN
        return math.floor(max(0.0, min(self.n, -math.log10(self.proof))))

    @property
    def ok(self) -> bool:
        """Whether all n digits agree; of subjects with CONSTANTS, the digits of float64."""
        has_constants = self.case.subject in CONSTANTS
        return self.agreed == self.n or (has_constants and self.proof <= ROUNDING)


def accuracy(case: Case, n: int = 50) -> Accuracy:
    """Check the gradient of a case in n digits, and measure the errors of float64.

    The hand-written gradient is compared with the derivative on dual numbers, both in n digits.
    The errors in float64 of y and of the gradients, of the references and of NumPy's kernels, are
    differences from the numbers of n digits.

    ValueError unless n is an integer in [17, 10000], `backends.Unusable` without gmpy2.
    """
    host = backends.get("numpy")
    with_kernels = _run(case, host)
    with reference_only():
        plain = _run(case, host)
    with digits(n) as exact:
        run = _run(case, exact)
        proof = _proof(run, exact)
        errors = [
            Errors(*(_distance(got, to, exact) for got, to in zip(found[:2], run[:2], strict=True)))
            for found in (plain, with_kernels)
        ]
    return Accuracy(case, n, proof, *errors)


class _Run(NamedTuple):
    """Outputs and gradients by name, and what they came from."""

    ys: dict[str, Any]
    grads: dict[str, Any]
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    dys: dict[str, Any]


def _run(case: Case, backend: Backend) -> _Run:
    fn, args = case.build(backend)
    y, cache = fn(*args)
    outs = _outputs(y)
    dys = _normal(outs, 1, backend)
    grads = cache.backward(*dys)
    is_one = not isinstance(grads, tuple) or hasattr(grads, "_fields")  # of one tree of parameters
    grads = (grads,) if is_one else grads[: len(args)]
    return _Run(_flat(outs), _flat(grads), fn, args, _flat(dys))


def _proof(run: _Run, backend: Backend) -> float:
    """The error of sum(gradient * v) for a random direction v. See `Accuracy`."""
    v = _normal(run.args, 2, backend)
    _, dy = jvp(lambda *args: run.fn(*args)[0], run.args, v)
    numeric = sum(map(_total, _products(_flat(_outputs(dy)), run.dys)))
    terms = _products(run.grads, _flat(v))
    error, size = abs(sum(map(_total, terms)) - numeric), sum(_total(abs(x)) for x in terms)
    return float(error / size) if size else float(error)


def _products(a: dict[str, Any], b: dict[str, Any]) -> list[Any]:
    """Products of the arrays of a with those of b; b may have further ones."""
    return [x * b[name] for name, x in a.items()]


def _total(x: Precise) -> Any:
    return x.__array_namespace__().sum(x).numbers[()]


def _distance(got: dict[str, Any], exact: dict[str, Any], backend: Backend) -> float:
    """The largest distance of two sets of arrays, each relative to its largest number.

    An array that is 0 but for rounding, such as the gradient of a key's bias, is measured relative
    to the largest number of all arrays.
    """
    sizes = {name: _largest(x) for name, x in exact.items()}
    all_of_them = max(sizes.values(), default=0.0)
    worst = 0.0
    for name, size in sizes.items():
        error = _largest(backend.asarray(got[name]) - exact[name])
        worst = max(worst, error / ((size if size > ZERO * all_of_them else all_of_them) or 1.0))
    return worst


def _largest(x: Any) -> float:
    return float(abs(x).numbers.max(initial=0))


def _normal(like: Any, seed: int, backend: Backend) -> Any:
    """Normal numbers in the shapes of a tree; None for None."""
    rng = backend.generator(seed, "float64")
    return tree.map(lambda x: rng.normal(tuple(x.shape)), like)


def _outputs(y: Any) -> tuple[Any, ...]:
    """The outputs of a function: those of a NamedTuple are several."""
    return tuple(y) if isinstance(y, tuple) else (y,)


def _flat(arrays: tuple[Any, ...]) -> dict[str, Any]:
    return tree.flatten(dict(enumerate(arrays)))
