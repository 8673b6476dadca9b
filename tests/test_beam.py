"""Beam search: against all texts there are, prompts of a batch apart, bad requests."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from causal_models import causal, lively, seq2seq
from libraries import only

import xformer as xf
from xformer import ops, tree
from xformer.backends import Backend
from xformer.generation import beam_search, generate, prefill
from xformer.generation.beam import _largest

V = 4
MODEL = xf.GPT(vocab_size=V, n_layers=1, d_model=8, n_heads=2, max_len=9)
PARAMS = lively(MODEL, 0)
PROMPT = [1, 3]


def every_text(length: int, stop: int | None, penalty: float) -> list[tuple[float, list[int]]]:
    """All texts of at most that length, which end with stop or there, the best first."""
    scores = {}
    for ids in product(range(V), repeat=length):
        end = ids.index(stop) + 1 if stop in ids else length
        text = [*PROMPT, *ids[:end]]
        logits, _ = MODEL.forward(PARAMS, np.asarray([text]))
        log_probs = ops.log_softmax(logits)[0][0]
        score = sum(log_probs[len(PROMPT) + i - 1, x] for i, x in enumerate(ids[:end]))
        scores[ids[:end]] = float(score) / end**penalty
    return sorted(((s, list(ids)) for ids, s in scores.items()), reverse=True)


@pytest.mark.parametrize("stop", [None, 2])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
def test_with_beams_for_all_texts_it_finds_the_best(penalty: float, stop: int | None) -> None:
    length = 3
    options: dict[str, Any] = {"n_beams": V**length, "early_stopping": "never"}
    ((*found,),) = beam_search(
        MODEL,
        PARAMS,
        [PROMPT],
        max_new_tokens=length,
        length_penalty=penalty,
        stop=() if stop is None else (stop,),
        **options,
    )
    want = every_text(length, stop, penalty)
    best = [beam for beam in found if beam.score > -1e8][:10]
    assert [beam.ids for beam in best] == [ids for _, ids in want[:10]]
    np.testing.assert_allclose([beam.score for beam in best], [s for s, _ in want[:10]])


def test_one_beam_is_greedy() -> None:
    model, params = causal("llama")
    prompts = [[1, 2, 3], [4]]
    found = beam_search(model, params, prompts, n_beams=1, max_new_tokens=9)
    assert [beams[0].ids for beams in found] == generate(model, params, prompts, max_new_tokens=9)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_prompts_of_a_batch_do_not_see_each_other(early_stopping: Any) -> None:
    model, params = causal("mixtral")
    prompts = [[1, 2, 3], [4], [5, 6]]
    stop = {beams[0] for beams in generate(model, params, prompts, max_new_tokens=3)}
    options: dict[str, Any] = {"n_beams": 3, "max_new_tokens": 8, "early_stopping": early_stopping}
    together = beam_search(model, params, prompts, stop=stop, **options)
    for prompt, beams in zip(prompts, together, strict=True):
        (alone,) = beam_search(model, params, [prompt], stop=stop, **options)
        assert [b.ids for b in alone] == [b.ids for b in beams]
        np.testing.assert_allclose([b.score for b in alone], [b.score for b in beams])
        assert [b.score for b in alone] == sorted((b.score for b in alone), reverse=True)


def test_a_prefix_is_searched_from() -> None:
    model, params = causal("gemma2")
    prompts = [[1, 2, 3, 4, 5, 6], [4]]
    want = beam_search(model, params, prompts, n_beams=2, max_new_tokens=5)
    prefix = prefill(model, params, prompts, chunk=2)
    assert beam_ids(beam_search(model, params, prefix, n_beams=2, max_new_tokens=5)) == beam_ids(
        want
    )


@only("array-api-strict", "torch", "cupy")
@pytest.mark.parametrize("name", ["mistral", "t5"])
def test_the_same_on_other_libraries(library: Backend, name: str) -> None:
    model, params = seq2seq(name) if name == "t5" else causal(name)
    prompts = [[1, 2, 3], [4]]
    want = beam_search(model, params, prompts, n_beams=3, max_new_tokens=6)
    found = beam_search(
        model, tree.map(library.asarray, params), prompts, n_beams=3, max_new_tokens=6
    )
    assert beam_ids(found) == beam_ids(want)


def beam_ids(found: Any) -> list[list[list[int]]]:
    return [[beam.ids for beam in beams] for beams in found]


def test_the_largest_and_of_equal_ones_the_first() -> None:
    values = np.asarray([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0])
    assert _largest(values, 4).tolist() == [1, 3, 2, 4]
    assert _largest(values, 99).tolist() == [1, 3, 2, 4, 5, 0, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_beams": 0}, "n_beams must be an int of at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an int of at least 1, got 0"),
        ({"length_penalty": float("nan")}, "length_penalty must lie"),
        ({"early_stopping": "always"}, "early_stopping must be True, False or .* got 'always'"),
        ({"max_new_tokens": 9}, "context holds 9 tokens, and there are 2 of the prompt and 8 more"),
    ],
)
def test_bad_requests_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        beam_search(MODEL, PARAMS, [PROMPT], **{"n_beams": 2, "max_new_tokens": 3} | options)


def test_prompts_are_checked() -> None:
    with pytest.raises(ValueError, match="prompt 0 must hold at least one token"):
        beam_search(MODEL, PARAMS, [[]], n_beams=2, max_new_tokens=3)
    with pytest.raises(TypeError, match="stop must hold ids, got 'x'"):
        beam_search(MODEL, PARAMS, [[1]], n_beams=2, max_new_tokens=3, stop="x")


@pytest.mark.parametrize("penalty", [1e6, -1e6, float("inf"), float("-inf")])
def test_penalties_that_leave_no_score_are_refused(penalty: float) -> None:
    model = xf.GPT(vocab_size=7, n_layers=1, d_model=8, n_heads=2, max_len=9)
    with pytest.raises(
        ValueError, match=r"length_penalty must leave 3 \*\* length_penalty positive"
    ):
        beam_search(model, model.init(), [[1]], n_beams=2, max_new_tokens=3, length_penalty=penalty)
