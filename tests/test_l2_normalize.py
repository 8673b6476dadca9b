"""What `l2_normalize` promises beyond its gradients, which test_gradients.py checks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from xformer.backends import Backend
from xformer.ops import l2_normalize

RNG = np.random.default_rng(5)
X, DY = RNG.normal(size=(2, 3, 7)), RNG.normal(size=(2, 3, 7))


@pytest.mark.parametrize("eps", [1e-12, 2.5])
def test_equals_torchs(eps: float) -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor(X, requires_grad=True)
    wanted = torch.nn.functional.normalize(x, dim=-1, eps=eps)
    (dwanted,) = torch.autograd.grad(wanted, x, torch.tensor(DY))
    y, cache = l2_normalize(X, eps=eps)
    for a, b in ((y, wanted), (cache.backward(DY), dwanted)):
        assert np.allclose(a, b.detach().numpy(), rtol=1e-13, atol=1e-15)


def test_length_and_slope_along_the_vector(library: Backend) -> None:
    """Vectors come out with length 1, and making one longer changes nothing."""
    y, cache = l2_normalize(library.asarray(X))
    dx = library.to_numpy(cache.backward(library.asarray(DY)))
    assert np.allclose(np.linalg.norm(library.to_numpy(y), axis=-1), 1, rtol=1e-14)
    assert np.allclose((dx * X).sum(axis=-1), 0, atol=1e-14)


def test_short_vectors_are_divided_by_eps(library: Backend) -> None:
    x = np.array([[0.0, 0.0], [0.3, -0.4], [3.0, -4.0]])
    y, cache = l2_normalize(library.asarray(x), eps=2.0)
    assert np.allclose(library.to_numpy(y), [[0, 0], [0.15, -0.2], [0.6, -0.8]], rtol=1e-14)
    dx = library.to_numpy(cache.backward(library.asarray(np.ones((3, 2)))))
    assert np.array_equal(dx[:2], [[0.5, 0.5], [0.5, 0.5]])
    y, cache = l2_normalize(library.asarray(x))
    assert np.array_equal(library.to_numpy(y)[0], [0, 0])
    assert np.allclose(library.to_numpy(cache.backward(y * 0 + 1))[0], 1e12, rtol=1e-14)


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (np.ones(()), {}, ValueError, "x must be (..., D), got shape ()"),
        (X[..., :0], {}, ValueError, "axis -1 of x must not be empty, got shape (2, 3, 0)"),
        (X, {"eps": -1.0}, ValueError, "eps must lie in [0, inf], got -1.0"),
        (X, {"eps": np.nan}, ValueError, "eps must lie in [0, inf], got nan"),
        (X, {"eps": "0"}, TypeError, "eps must be a number, got str"),
    ],
)
def test_bad_input(x: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^l2_normalize: {re.escape(message)}$"):
        l2_normalize(x, **options)


def test_bad_gradients() -> None:
    _, cache = l2_normalize(X)
    with pytest.raises(TypeError, match=r"^l2_normalize: dy must be float64, got float32$"):
        cache.backward(X.astype(np.float32))
