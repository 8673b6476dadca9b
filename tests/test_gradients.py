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

from xformer import reference_only
from xformer.catalogue import Case, cases

every_case = pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)


@every_case
def test_gradient_is_the_derivative(case: Case, library: Backend) -> None:
    # Of large trees elsewhere one direction will do: the numbers are compared with NumPy's.
    small = case.room == "ops"
    on_host = library.name == "numpy"
    options = {"alone": small or on_host, "elementwise": 64 if small and on_host else 0}
    case.check(library, **options).require()


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
    with reference_only():
        require_close(by_hand(case, library), by_jax(case, library), AUTOGRAD)
