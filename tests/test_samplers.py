"""Filters of logits: transformers' distributions, on every library; and draws from them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from libraries import only

from xformer.backends import Backend
from xformer.generation import samplers
from xformer.generation.samplers import compose, draw, probabilities

B, V = 6, 23
IDS = [[3, 3, 0], [1], [22, 5], [4, 4], [0, 1, 2], [7, 21]]  # of each text so far


def logits(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, V)) * 3
    if kind == "ties":
        x = np.round(x / 2)
    elif kind == "equal":
        x = np.zeros((B, V))
    elif kind == "extreme":
        x[0], x[1, 4], x[2, 5:], x[3] = -300.0, 900.0, -np.inf, np.linspace(-800, 800, V)
    return x


KINDS = ("random", "ties", "equal", "extreme")
# Ours, its argument, and the class in transformers.
FILTERS = [
    *[("temperature", t, "TemperatureLogitsWarper") for t in (0.3, 1.0, 2.5)],
    *[("top_k", k, "TopKLogitsWarper") for k in (1, 4, 22, 23, 99)],
    *[("top_p", p, "TopPLogitsWarper") for p in (0.0, 0.1, 0.5, 0.9, 0.999, 1.0)],
    *[("min_p", p, "MinPLogitsWarper") for p in (0.0, 0.05, 0.5, 1.0)],
    *[("repetition_penalty", p, "RepetitionPenaltyLogitsProcessor") for p in (0.5, 1.0, 1.7)],
]


def theirs(name: str, argument: float, x: np.ndarray, ids: Any = IDS) -> np.ndarray:
    """What the class of transformers makes of the rows, each alone: its ids are of one length.

    Which of equal logits top-p drops, is left to torch.sort, which here keeps them in their order.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    judge = getattr(transformers, name)(argument)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "sort", partial(torch.sort, stable=True))
        pairs = zip(ids, x, strict=True)
        rows = [judge(torch.tensor([i]), torch.tensor(row[None])) for i, row in pairs]
    return torch.cat(rows).numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "argument", "judge"), FILTERS)
def test_the_distribution_is_that_of_transformers(
    name: str, argument: float, judge: str, kind: str
) -> None:
    x = logits(kind)
    got = getattr(samplers, name)(argument)(x, IDS)
    want = theirs(judge, argument, x)
    np.testing.assert_allclose(probabilities(got), probabilities(want), rtol=1e-12)
    assert got.dtype == x.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_many_in_their_order(kind: str) -> None:
    x = logits(kind)
    names = ["repetition_penalty", "temperature", "top_k", "top_p", "min_p"]
    chosen = dict(zip(names, (1.3, 0.7, 9, 0.8, 0.1), strict=True))
    got = compose(*[getattr(samplers, n)(a) for n, a in chosen.items()])(x, IDS)
    judges = {ours: judge for ours, _, judge in FILTERS}
    want = x
    for n, a in chosen.items():
        want = theirs(judges[n], a, want)
    np.testing.assert_allclose(probabilities(got), probabilities(want), rtol=1e-12)


@pytest.mark.parametrize(("name", "argument"), sorted({f[:2] for f in FILTERS}))
def test_every_library_agrees(library: Backend, name: str, argument: float) -> None:
    for kind in KINDS:
        x = logits(kind)
        want = getattr(samplers, name)(argument)(x, IDS)
        got = library.to_numpy(getattr(samplers, name)(argument)(library.asarray(x), IDS))
        # JAX knows no numbers below 1e-307: they are 0.
        np.testing.assert_allclose(probabilities(got), probabilities(want), 1e-12, 1e-307)


@only("numpy", "torch", "jax", "cupy")
def test_float32_stays_float32(library: Backend) -> None:
    """And without warnings, which are errors here."""
    for name, argument, _ in FILTERS:
        y = getattr(samplers, name)(argument)(library.asarray(logits("ties"), "float32"), IDS)
        assert library.to_numpy(y).dtype == np.float32


def test_temperature_zero_leaves_the_first_of_the_likeliest() -> None:
    for t in (0, 0.0, 1e-300):
        x = np.asarray([[1.0, 5.0, 5.0], [0.0, -1.0, 0.0]])
        kept = np.isfinite(samplers.temperature(t)(x, [[], []]))
        assert kept.tolist() == [[False, True, False], [True, False, False]]


def test_ties_of_top_k_are_kept() -> None:
    x = np.asarray([[3.0, 1.0, 2.0, 2.0, 0.0]])
    assert np.isfinite(samplers.top_k(2)(x, [[]])).tolist() == [[True, False, True, True, False]]


def test_nothing_to_compose() -> None:
    x = logits("random")
    assert compose()(x, IDS) is x


def test_a_text_without_ids_is_not_punished() -> None:
    x = logits("random")[:1]
    np.testing.assert_array_equal(samplers.repetition_penalty(2.0)(x, [[]]), x)


# Draws


def test_draws_follow_the_distribution() -> None:
    """Equally spaced numbers draw each token as often as its probability says, to one draw."""
    x, n = logits("ties")[:1], 10_000
    drawn = draw(np.repeat(x, n, axis=0), (np.arange(n) + 0.5) / n)
    counts = np.bincount(drawn, minlength=V)
    assert np.abs(counts - probabilities(x)[0] * n).max() <= 1


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(1, 0)])
def test_what_is_impossible_is_never_drawn(uniform: float) -> None:
    x = np.asarray([[-np.inf, 0.0, -np.inf, 0.0, -np.inf], [-1e4, -1e4, 1e4, -np.inf, -1e4]])
    first, second = draw(x, [uniform] * 2)
    assert first in (1, 3) and second == 2


def test_float32_logits_draw_in_float64() -> None:
    x = logits("random").astype(np.float32)
    uniform = np.random.default_rng(1).random(B).tolist()
    assert draw(x, uniform) == draw(x.astype(np.float64), uniform)


# What is refused


@pytest.mark.parametrize(
    ("name", "argument", "error", "message"),
    [
        ("temperature", -1.0, ValueError, r"temperature: t must lie in \[0, inf\], got -1.0"),
        ("temperature", float("nan"), ValueError, "temperature: t must lie"),
        ("temperature", "hot", TypeError, "temperature: t must be a number, got str"),
        ("top_k", 0, ValueError, "top_k: k must be an int of at least 1, got 0"),
        ("top_k", 2.0, ValueError, "top_k: k must be an int of at least 1, got 2.0"),
        ("top_p", 1.1, ValueError, r"top_p: p must lie in \[0, 1\], got 1.1"),
        ("top_p", -0.1, ValueError, "top_p: p must lie"),
        ("min_p", 50, ValueError, r"min_p: p must lie in \[0, 1\], got 50"),
        ("repetition_penalty", 0.0, ValueError, "penalty must be positive and finite, got 0.0"),
        ("repetition_penalty", float("inf"), ValueError, "must be positive and finite, got inf"),
    ],
)
def test_bad_arguments(name: str, argument: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(samplers, name)(argument)


@pytest.mark.parametrize("row", [[float("nan"), 1.0], [-float("inf")] * 2, [float("inf"), 1.0]])
def test_logits_without_probabilities(row: list[float]) -> None:
    with pytest.raises(ValueError, match="the largest logit of each row must be finite, got "):
        draw(np.asarray([[0.0, 1.0], row]), [0.5, 0.5])
