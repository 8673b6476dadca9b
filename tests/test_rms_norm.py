"""What `rms_norm` promises beyond its gradients, which test_gradients.py checks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from xformer.backends import Backend
from xformer.ops import layer_norm, rms_norm

RNG = np.random.default_rng(3)
X, W, DY = RNG.normal(size=(2, 3, 7)), RNG.normal(size=7), RNG.normal(size=(2, 3, 7))


@pytest.mark.parametrize("w", [W, None], ids=["w", "no w"])
def test_equals_torchs(w: np.ndarray | None) -> None:
    torch = pytest.importorskip("torch")
    leaves = [torch.tensor(a, requires_grad=True) for a in (X, w) if a is not None]
    wanted = torch.nn.functional.rms_norm(leaves[0], (7,), *leaves[1:], eps=0.1)
    dwanted = torch.autograd.grad(wanted, leaves, torch.tensor(DY))
    y, cache = rms_norm(X, w, eps=0.1)
    got = [grad for grad in cache.backward(DY) if grad is not None]
    for a, b in zip((y, *got), (wanted, *dwanted), strict=True):
        assert np.allclose(a, b.detach().numpy(), rtol=1e-13, atol=1e-15)


def test_offset_is_added_to_the_weight(library: Backend) -> None:
    x, w, dy = (library.asarray(a) for a in (X, W, DY))
    y, cache = rms_norm(x, w, offset=1.0)
    wanted, wanted_cache = rms_norm(x, w + 1)
    pairs = zip(cache.backward(dy), wanted_cache.backward(dy), strict=True)
    for a, b in ((y, wanted), *pairs):
        assert np.array_equal(library.to_numpy(a), library.to_numpy(b))


def test_of_rows_with_mean_zero_it_is_layer_norm() -> None:
    x = X - X.mean(axis=-1, keepdims=True)
    assert np.allclose(rms_norm(x, W)[0], layer_norm(x, W)[0], rtol=1e-13, atol=1e-15)


def test_rows_of_zeros(library: Backend) -> None:
    y, cache = rms_norm(library.asarray(np.zeros((2, 5))), eps=0.25)
    dx, dw = cache.backward(library.asarray(np.ones((2, 5))))
    assert not library.to_numpy(y).any() and dw is None
    assert (library.to_numpy(dx) == 2).all()  # 1 / sqrt(eps)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((X, np.ones(3)), {}, ValueError, "w must be (D,) with D = 7 (from x), got shape (3,)"),
        ((np.ones(()),), {}, ValueError, "x must be (..., D), got shape ()"),
        ((X[..., :0],), {}, ValueError, "axis -1 of x must not be empty, got shape (2, 3, 0)"),
        ((X, W), {"eps": -1e-6}, ValueError, "eps must lie in [0, inf], got -1e-06"),
        ((X, W), {"eps": None}, TypeError, "eps must be a number, got NoneType"),
        ((X, W), {"offset": "1"}, TypeError, "offset must be a number, got str"),
        ((X, W), {"offset": np.nan}, ValueError, "offset must lie in [-inf, inf], got nan"),
        ((X,), {"offset": 1}, ValueError, "offset must be 0 where there is no w, got 1.0"),
    ],
)
def test_bad_input(args: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^rms_norm: {re.escape(message)}$"):
        rms_norm(*args, **options)


def test_bad_gradients() -> None:
    _, cache = rms_norm(X, W)
    with pytest.raises(ValueError, match=r"^rms_norm: dy must have shape \(2, 3, 7\), got \(7,\)$"):
        cache.backward(W)
