"""Every model of the catalogue, on every library: its gradients, and the same numbers everywhere."""

from __future__ import annotations

import pytest
from judges import by_hand, by_jax, by_torch_autograd, on_numpy, require_close

from xformer import reference_only
from xformer.backends import Backend
from xformer.catalogue import Case, cases

CASES = [case for case in cases() if case.room == "models"]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_gradient_is_the_derivative(case: Case, library: Backend) -> None:
    case.check(library, alone=False).require()


@every_case
def test_same_numbers_on_every_library(case: Case, library: Backend) -> None:
    require_close(by_hand(case, library), on_numpy(case), 1e-12)


@every_case
def test_float32(case: Case, library: Backend) -> None:
    got, wanted = by_hand(case, library, "float32"), on_numpy(case, "float32")
    assert all(a.dtype == "float32" for a in got.values())
    require_close(got, wanted, 1e-4)


@every_case
@pytest.mark.libraries("torch")
def test_gradient_is_autograds(case: Case, library: Backend) -> None:
    require_close(by_hand(case, library), by_torch_autograd(case, library), 1e-10)
    with reference_only():
        require_close(by_hand(case, library), by_torch_autograd(case, library), 1e-10)


@every_case
@pytest.mark.libraries("jax")
def test_gradient_is_jaxs(case: Case, library: Backend) -> None:
    require_close(by_hand(case, library), by_jax(case, library), 1e-10)
    with reference_only():
        require_close(by_hand(case, library), by_jax(case, library), 1e-10)
