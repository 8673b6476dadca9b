"""What `rope` promises beyond its gradient, which test_gradients.py checks."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np
import pytest

from xformer.backends import Backend
from xformer.ops import rope

RNG = np.random.default_rng(13)
X = RNG.normal(size=(2, 3, 5, 8))
ANGLES = RNG.normal(size=(5, 4))
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)


def test_a_pair_is_a_complex_number(library: Backend) -> None:
    """Interleaved, channels (2i, 2i + 1) are real and imaginary part, and are multiplied."""
    tables = {"cos": library.asarray(COS), "sin": library.asarray(SIN)}
    y, _ = rope(library.asarray(X), **tables, interleaved=True)
    wanted = (X[..., ::2] + 1j * X[..., 1::2]) * np.exp(1j * ANGLES)
    y = library.to_numpy(y)
    assert np.allclose(y[..., ::2] + 1j * y[..., 1::2], wanted, rtol=1e-14)


def test_both_conventions_are_one_after_a_permutation(library: Backend) -> None:
    pairs = [0, 2, 4, 6, 1, 3, 5, 7]  # first the even channels, then the odd ones
    tables = {"cos": library.asarray(COS), "sin": library.asarray(SIN)}
    y, cache = rope(library.asarray(X), **tables, interleaved=True)
    half, half_cache = rope(library.asarray(X[..., pairs]), **tables)
    assert np.array_equal(library.to_numpy(y)[..., pairs], library.to_numpy(half))
    dx, dhalf = cache.backward(y), half_cache.backward(half)
    assert np.array_equal(library.to_numpy(dx)[..., pairs], library.to_numpy(dhalf))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_keep_lengths_and_backward_undoes_them(
    library: Backend, interleaved: bool
) -> None:
    tables = {"cos": library.asarray(COS), "sin": library.asarray(SIN)}
    y, cache = rope(library.asarray(X), **tables, interleaved=interleaved)
    norms = np.linalg.norm(library.to_numpy(y), axis=-1)
    assert np.allclose(norms, np.linalg.norm(X, axis=-1), rtol=1e-14)
    assert np.allclose(library.to_numpy(cache.backward(y)), X, rtol=1e-13, atol=1e-14)


def test_a_factor_comes_out_of_backward_too() -> None:
    """Twice the tables, twice the gradient; an inverse would halve it."""
    dx = rope(X, cos=COS, sin=SIN)[1].backward(X)
    assert np.array_equal(rope(X, cos=2 * COS, sin=2 * SIN)[1].backward(X), 2 * dx)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rest_of_a_head_passes_through(library: Backend, interleaved: bool) -> None:
    tables = {"cos": library.asarray(COS[:, :3]), "sin": library.asarray(SIN[:, :3])}
    y, cache = rope(library.asarray(X), **tables, interleaved=interleaved)
    part, _ = rope(library.asarray(X[..., :6]), **tables, interleaved=interleaved)
    assert np.array_equal(library.to_numpy(y)[..., :6], library.to_numpy(part))
    assert np.array_equal(library.to_numpy(y)[..., 6:], X[..., 6:])
    assert np.array_equal(library.to_numpy(cache.backward(y))[..., 6:], X[..., 6:])


def test_tables_of_each_sequence(library: Backend) -> None:
    cos, sin = RNG.normal(size=(2, 2, 5, 4))
    tables = {"cos": library.asarray(cos), "sin": library.asarray(sin)}
    y = library.to_numpy(rope(library.asarray(X), **tables)[0])
    for b in range(2):
        one, _ = rope(X[b : b + 1], cos=cos[b], sin=sin[b])
        assert np.allclose(y[b], one[0], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("family", "interleaved"), [("llama", False), ("gptj", True), ("cohere", True)]
)
def test_equals_the_one_of_transformers(family: str, interleaved: bool) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    reference = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    x, cos, sin = (torch.tensor(a) for a in (X, COS, SIN))
    if family == "gptj":  # (B, T, H, K) there
        wanted = reference.apply_rotary_pos_emb(x.transpose(1, 2), sin[None], cos[None])
        wanted = wanted.transpose(1, 2)
    else:  # one column a channel: the halves alike, or the two of a pair
        twice = [t.repeat_interleave(2, -1) if interleaved else t.repeat(1, 2) for t in (cos, sin)]
        wanted, _ = reference.apply_rotary_pos_emb(x, x, twice[0][None], twice[1][None])
    y, _ = rope(X, cos=COS, sin=SIN, interleaved=interleaved)
    limit = 1e-6 if family == "cohere" else 1e-14  # Cohere's works in float32 throughout
    assert np.allclose(y, wanted.numpy(), rtol=limit, atol=limit)


BOTH = "must be (T, R/2) or (B, T, R/2) with B = 2, T = 5 and R <= K = 8 (from x), got shape"


@pytest.mark.parametrize(
    ("x", "cos", "sin", "error", "message"),
    [
        (X[0], COS, SIN, ValueError, "x must be (B, H, T, K), got shape (3, 5, 8)"),
        (X, COS[:4], SIN, ValueError, f"cos {BOTH} (4, 4)"),
        (X, COS, SIN[:, None], ValueError, f"sin {BOTH} (5, 1, 4)"),
        (X, COS[None], SIN[None], ValueError, f"cos {BOTH} (1, 5, 4)"),
        (X, COS[0], SIN[0], ValueError, f"cos {BOTH} (4,)"),
        (X, COS[..., [0] * 5], SIN[..., [0] * 5], ValueError, f"cos {BOTH} (5, 5)"),
        (X, COS, SIN[:, :3], ValueError, "sin must have the shape of cos, (5, 4), got (5, 3)"),
        (X, COS.astype("float32"), SIN, TypeError, "cos must be float64, got float32"),
        (X, COS, SIN.astype(int), TypeError, "sin must be float64, got int64"),
        (X, None, SIN, TypeError, "cos must be an array, got None"),
        (X, COS, SIN.tolist(), TypeError, "sin must be an array, got list"),
        (X.astype(int), COS, SIN, TypeError, "x must be float32 or float64, got int64"),
    ],
)
def test_bad_input(x: Any, cos: Any, sin: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^rope: {re.escape(message)}$"):
        rope(x, cos=cos, sin=sin)


def test_bad_gradients() -> None:
    _, cache = rope(X, cos=COS, sin=SIN)
    with pytest.raises(ValueError, match=r"^rope: dy must have shape \(2, 3, 5, 8\), got \(3, 5"):
        cache.backward(X[0])
    with pytest.raises(TypeError, match=r"^rope: dy must be float64, got float32$"):
        cache.backward(X.astype(np.float32))
