"""Every case of the catalogue, on every library: its gradients, and the same numbers everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from judges import (
    AUTOGRAD,
    FLOAT64,
    by_hand,
    by_torch_autograd,
    compiled,
    dtypes,
    on_numpy,
    one_of_each,
    require_close,
    require_rounded,
)
from libraries import LIBRARIES, only

from xformer import backends, reference_only
from xformer.backends import Backend
from xformer.proofs.catalogue import Case, cases

NUMPY = backends.get("numpy")
OPS = [case for case in cases() if case.group == "ops"]
every_case = pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
# NumPy's arrays that cannot be written to stand for those that can. JAX has tests of its own.
others = only(*(name for name in LIBRARIES if name not in ("numpy", "jax")))


@every_case
def test_gradient_is_the_derivative(case: Case) -> None:
    # On NumPy: of the other libraries all numbers are compared with NumPy's, far more closely.
    # All inputs together: `test_derivatives` takes them to the last bits, and torch judges each
    # input. `xformer gradcheck`, README's command, checks each input of all cases on each library.
    case.check(NUMPY, alone=False).require()


@every_case
@others
def test_same_numbers_on_every_library(case: Case, library: Backend) -> None:
    require_close(by_hand(case, library), on_numpy(case), FLOAT64)


@every_case
@others
def test_float32(case: Case, library: Backend) -> None:
    got = by_hand(case, library, "float32")
    assert all(a.dtype == "float32" for a in got.values())
    require_rounded(got, case)


@pytest.mark.parametrize("case", cases()[::16], ids=lambda case: case.name)
def test_half_precision_is_no_float32(case: Case) -> None:
    """The limits of `test_float32`, which follow each case's condition, are narrow enough."""
    exact = on_numpy(case, "float32")
    if any(a.any() for a in exact.values()):
        with pytest.raises(AssertionError, match="x the limit"):
            require_rounded({name: in_half(a) for name, a in exact.items()}, case)


def in_half(a: np.ndarray) -> np.ndarray:
    """Rounded to the 11 bits of float16, with the exponents and the dtype of float32."""
    significand, exponent = np.frexp(a)
    return np.ldexp(np.round(significand * 2**11) / 2**11, exponent).astype(np.float32)


@every_case
@only("torch")
def test_gradient_is_autograds(case: Case, library: Backend) -> None:
    require_close(by_hand(case, library), by_torch_autograd(case, library), AUTOGRAD)
    with reference_only():
        require_close(by_hand(case, library), by_torch_autograd(case, library), AUTOGRAD)


@pytest.mark.parametrize("case", one_of_each())  # they compile for long
@only("jax")
def test_jax_has_the_same_numbers_and_gradients(case: Case, library: Backend) -> None:
    got, judged = compiled(case, library)
    require_close(got, on_numpy(case), FLOAT64)
    require_close(got, judged, AUTOGRAD)


@pytest.mark.parametrize("case", one_of_each())
@only("jax")
def test_jax_stays_in_float32(case: Case, library: Backend) -> None:
    assert dtypes(case, library, "float32") == {"float32"}


@pytest.mark.parametrize("case", OPS[::16], ids=lambda case: case.name)
@only("jax")
def test_jax_op_by_op(case: Case, library: Backend) -> None:
    require_close(by_hand(case, library), on_numpy(case), FLOAT64)
