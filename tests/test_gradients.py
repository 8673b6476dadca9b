"""Every case of the catalogue, on every library: its gradients, and the same numbers everywhere."""

from __future__ import annotations

import pytest
from judges import (
    AUTOGRAD,
    FLOAT32,
    FLOAT64,
    by_hand,
    by_jax,
    by_torch_autograd,
    on_numpy,
    require_close,
)
from libraries import only
from xformer.backends import Backend

from xformer import backends, reference_only
from xformer.catalogue import Case, cases

NUMPY = backends.get("numpy")
every_case = pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)


@every_case
def test_gradient_is_the_derivative(case: Case) -> None:
    # On NumPy: of the other libraries all numbers are compared with NumPy's, far more closely.
    # `xformer check` does this on each of them.
    small = case.room == "ops"
    case.check(NUMPY, alone=True, elementwise=64 if small else 0).require()


@every_case
def test_same_numbers_on_every_library(case: Case, library: Backend) -> None:
    require_close(by_hand(case, library), on_numpy(case), FLOAT64)


@every_case
def test_float32(case: Case, library: Backend) -> None:
    got, wanted = by_hand(case, library, "float32"), on_numpy(case, "float32")
    assert all(a.dtype == "float32" for a in got.values())
    require_close(got, wanted, FLOAT32)


@every_case
@only("torch")
def test_gradient_is_autograds(case: Case, library: Backend) -> None:
    require_close(by_hand(case, library), by_torch_autograd(case, library), AUTOGRAD)
    with reference_only():
        require_close(by_hand(case, library), by_torch_autograd(case, library), AUTOGRAD)


@every_case
@only("jax")
def test_gradient_is_jaxs(case: Case, library: Backend) -> None:
    require_close(by_hand(case, library), by_jax(case, library), AUTOGRAD)
    if case.room == "ops":  # what stands on them calls the same ops
        with reference_only():
            require_close(by_hand(case, library), by_jax(case, library), AUTOGRAD)
