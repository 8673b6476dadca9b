"""Filters that forbid and force tokens: each gives what transformers' LogitsProcessor gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from huggingface import torch

from xformer.backends import Backend
from xformer.generation.constraints import (
    bad_words,
    constrained,
    constraints,
    force,
    no_repeat_ngram,
    suppress,
)
from xformer.generation.samplers import Filter, temperature
from xformer.generation.settings import Settings

V, B = 7, 3
RNG = np.random.default_rng(0)


def theirs(name: str, *arguments: Any) -> Any:
    from transformers.generation import logits_process

    return getattr(logits_process, name)(*arguments)


CASES: list[tuple[Filter, Any]] = [
    *((no_repeat_ngram(n), ("NoRepeatNGramLogitsProcessor", n)) for n in (1, 2, 3)),
    (
        bad_words([[2], [3, 4], [0, 1, 5], [3, 6]]),
        ("NoBadWordsLogitsProcessor", [[2], [3, 4], [0, 1, 5], [3, 6]], None),
    ),
    (suppress([1, 5]), ("SuppressTokensLogitsProcessor", [1, 5])),
    (suppress([1, 5], below=4), ("MinLengthLogitsProcessor", 4, [1, 5])),
    (
        suppress([1, 5], above=3, below=5),
        ("SuppressTokensAtBeginLogitsProcessor", [1, 5], 4),
    ),
    (force([3], 1), ("ForcedBOSTokenLogitsProcessor", 3)),
    (force([3, 6], 5), ("ForcedEOSTokenLogitsProcessor", 6, [3, 6])),
]


@pytest.mark.parametrize(("own", "judge"), CASES, ids=[str(judge) for _, judge in CASES])
def test_each_is_the_processor_of_transformers(own: Filter, judge: Any, library: Backend) -> None:
    for length in range(1, 12):
        ids = RNG.integers(0, V, (B, length))
        logits = RNG.normal(size=(B, V)).astype(np.float32)
        want = theirs(*judge)(torch.tensor(ids), torch.tensor(logits)).numpy()
        got = own(library.asarray(logits), ids.tolist())
        np.testing.assert_array_equal(library.to_numpy(got), want)


def test_texts_of_several_lengths() -> None:
    logits = RNG.normal(size=(2, V)).astype(np.float32)
    got = suppress([1], below=2)(logits, [[0], [0, 0]])
    assert np.isinf(got[0, 1]) and (got[1] == logits[1]).all()
    got = force([2], 2)(logits, [[0], [0, 0]])
    assert (got[0] == logits[0]).all() and got[1, 2] == 0 and np.isinf(got[1]).sum() == V - 1


def test_nothing_said_is_no_filter() -> None:
    assert constraints(Settings(), {1}, 3, 9) is None
    assert constraints(Settings(min_length=3, min_new_tokens=0), {1}, 3, 9) is None
    assert constraints(Settings(min_new_tokens=2), (), 3, 9) is None
    assert constrained(None, None) is None
    sampler = temperature(1)
    assert constrained(None, sampler) is sampler
    own = constraints(Settings(suppress_tokens=(2,)), (), 3, 9)
    logits = np.asarray([[0.0, 1, 2, 1.5, 0, 0, 0]])
    (got,) = np.isfinite(constrained(own, None)(logits, [[0]]))  # type: ignore[misc]
    assert got.tolist() == [i == 3 for i in range(V)]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="each must have at least one token"):
        bad_words([[1], []])
    with pytest.raises(ValueError, match="n must be an int of at least 1, got 0"):
        no_repeat_ngram(0)
