"""Compiled tokens of guesses and of targets: the ids of those made call by call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs extra numba")

from causal_models import causal, seq2seq
from test_speculative import layers

from xformer import tree
from xformer.backends.numba.program.compiled import Compiled
from xformer.generation import compiled_decoding as compiling
from xformer.generation import generate, prefill, prompts, speculative
from xformer.generation.samplers import temperature, top_k
from xformer.layers import RopeConfig

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def calls() -> Iterator[list[Any]]:
    """Compiled functions that are made meanwhile."""
    compiling._compiled.cache_clear()
    found: list[Any] = []
    init = Compiled.__init__

    def noted(self: Any, *given: Any, **options: Any) -> None:
        init(self, *given, **options)
        found.append(self)

    with patch.object(Compiled, "__init__", noted):
        yield found


def in_float32(model: Any, params: Any) -> tuple[Any, Any]:
    return model, tree.map(lambda p: p.astype(np.float32), params)


def programs(calls: list[Any]) -> int:
    """How many were recorded; Python looks up T5's buckets of distances, and reads masks."""
    lines = "\n".join(call.explain() for call in calls).split("\n")
    python = {line for line in lines if line.startswith("-")}
    small = "take of int64", "cumulative_sum of int64", "copy of bool"
    assert python <= {f"- 1 x {what}: there is no kernel" for what in small}
    return sum(len(call.programs) for call in calls)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_guesses(name: str, calls: list[Any]) -> None:
    """Of a draft that is refused often, and of one that is not; by two programs."""
    model, params = in_float32(*causal(name))
    options: dict[str, Any] = {"k": 3, "max_new_tokens": 22}
    for sampler in (None, temperature(1.5)):
        for draft in (layers(model, params, 1), (model, params)):
            own = model, params, *draft, PROMPT
            wanted = list(speculative(*own, sampler=sampler, **options))
            assert list(speculative(*own, sampler=sampler, **options, compiled=True)) == wanted
            assert list(speculative(*own, sampler=sampler, seed=1, **options, compiled=True))
    # Of the model and its first layer: four and one token at a time, and the model as a draft.
    assert programs(calls) == 3


def test_guesses_across_columns() -> None:
    """Columns are doubled, and used to the end of the context; one token is a prompt too."""
    model, params = in_float32(*causal("gpt2"))
    with patch.object(compiling, "LEAST", 8):
        for prompt in (PROMPT, PROMPT[:1]):
            n = model.context - len(prompt) + 1
            own = model, params, *layers(model, params, 1), prompt
            wanted = list(speculative(*own, k=4, max_new_tokens=n))
            assert list(speculative(*own, k=4, max_new_tokens=n, compiled=True)) == wanted
            stop = {wanted[2][-1]}
            wanted = list(speculative(*own, k=4, max_new_tokens=n, stop=stop))
            assert (
                list(speculative(*own, k=4, max_new_tokens=n, stop=stop, compiled=True)) == wanted
            )


@pytest.mark.usefixtures("numba_kernels")
def test_guesses_are_programs_by_themselves(calls: list[Any]) -> None:
    model, params = in_float32(*causal("llama"))
    own = model, params, *layers(model, params, 1), PROMPT
    for n in (compiling.PAYS - 1, compiling.PAYS):
        wanted = list(speculative(*own, k=3, max_new_tokens=n, compiled=False))
        assert not calls
        assert list(speculative(*own, k=3, max_new_tokens=n)) == wanted
    assert programs(calls) == 2


def test_why_guesses_are_not_compiled() -> None:
    model, params = in_float32(*causal("shaw"))
    why = "speculative: tokens are not compiled: Shaw's relative positions"
    with pytest.warns(RuntimeWarning, match=why):
        list(
            speculative(model, params, model, params, PROMPT, k=2, max_new_tokens=3, compiled=True)
        )


TARGETS = ["t5", "t5 1.1", "transformer", "shared memory"]
SOURCES = [PROMPT, [2, 7], [1, 8, 2, 8, 1, 8, 2]]


@pytest.mark.parametrize("name", TARGETS)
def test_targets(name: str, calls: list[Any]) -> None:
    """Of sources of other lengths, too; a prefix stays what it was."""
    model, params = in_float32(*seq2seq(name))
    for sampler in (None, top_k(3)):
        for sources in (SOURCES[:1], SOURCES):
            given = prefill(model, params, sources, start_id=1)
            options: Any = {"max_new_tokens": 20, "sampler": sampler}
            wanted = generate(model, params, given, **options)
            for _ in range(2):
                assert generate(model, params, given, **options, compiled=True) == wanted
    assert programs(calls) == 4
    for source in SOURCES:  # of as many columns
        given = prefill(model, params, [source], start_id=1)
        wanted = generate(model, params, given, max_new_tokens=9)
        assert generate(model, params, given, max_new_tokens=9, compiled=True) == wanted
    assert programs(calls) == 4


@pytest.mark.usefixtures("numba_kernels")
def test_targets_are_programs_by_themselves(calls: list[Any]) -> None:
    """Their columns are doubled; their tokens may come as guesses."""
    model, params = in_float32(*seq2seq("t5"))
    with patch.object(compiling, "LEAST", 8):
        wanted = generate(model, params, SOURCES, max_new_tokens=30, compiled=False)
        assert generate(model, params, SOURCES, max_new_tokens=30) == wanted
    assert programs(calls) > 1
    own = model, params, *in_float32(*seq2seq("t5 1.1", seed=1)), SOURCES[0]
    wanted_rounds = list(speculative(*own, k=3, max_new_tokens=24, compiled=False))
    assert list(speculative(*own, k=3, max_new_tokens=24)) == wanted_rounds


@pytest.mark.usefixtures("numba_kernels")
@pytest.mark.parametrize("name", TARGETS)
def test_sources(name: str) -> None:
    """One program for all lengths of a bucket; targets go on."""
    model, params = in_float32(*seq2seq(name))
    prompts._encoder.cache_clear()
    for sources in (SOURCES[:1], SOURCES):
        right = prefill(model, params, sources, start_id=1)
        found = prefill(model, params, sources, start_id=1, compiled=True)
        np.testing.assert_allclose(found.logits, right.logits, rtol=0, atol=1e-4)
        assert (found.ids, found.width) == (right.ids, right.width)
        assert (found.state.src_mask is None) == (right.state.src_mask is None)
        for got, wanted in zip(found.state.memory, right.state.memory, strict=True):
            np.testing.assert_allclose(got.k, wanted.k, rtol=0, atol=1e-4)
            np.testing.assert_allclose(got.v, wanted.v, rtol=0, atol=1e-4)
        ids = generate(model, params, right, max_new_tokens=6, compiled=False)
        assert generate(model, params, found, max_new_tokens=6, compiled=False) == ids
        assert generate(model, params, found, max_new_tokens=6, compiled=True) == ids
    (call,) = prompts._encoder(model).compiled._calls.values()
    assert (
        "instructions" in call.explain() and len(call.programs) == 2
    )  # of one source, and of three
    prefill(model, params, [PROMPT[:3]], start_id=1, compiled=True)
    assert len(call.programs) == 2


RAGGED = [[1, 5, 2, 7, 3], [4, 6]]


@pytest.mark.usefixtures("numba_kernels")
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "alibi", "shaw", "mixtral"])
def test_prompts(name: str) -> None:
    """One program for all lengths of a bucket; texts go on."""
    model, params = in_float32(*causal(name))
    longest = min(20, model.context or 20)
    for texts in ([PROMPT], RAGGED, [list(range(longest))]):
        prompts._forward.cache_clear()
        for own in ([text[:-1] for text in texts], texts):
            right = prefill(model, params, own)
            found = prefill(model, params, own, compiled=True)
            np.testing.assert_allclose(found.logits, right.logits, rtol=0, atol=1e-4)
            assert (found.ids, found.width) == (right.ids, right.width)
            assert (found.state.mask is None) == (right.state.mask is None)
            assert found.state.length == right.state.length
            assert [p.k.shape for p in found.state.kv_cache] == [
                p.k.shape for p in right.state.kv_cache
            ]
        forward = prompts._forward(model)
        assert "instructions" in forward.compiled.explain()
        if name in ("gpt2", "llama", "gemma2"):
            assert programs(list(forward.compiled._calls.values())) == 1
        ids = generate(model, params, texts, max_new_tokens=6, compiled=False)
        if name != "shaw":
            assert generate(model, params, texts, max_new_tokens=6, compiled=True) == ids
        after = prefill(model, params, texts, chunk=2, compiled=True)
        np.testing.assert_allclose(after.logits, right.logits, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("numba_kernels")
def test_prompts_that_are_read_anew() -> None:
    """The last tokens of a text that slides have one length: a program reads them."""
    prompts._forward.cache_clear()
    model, params = in_float32(*causal("gpt2"))
    text = list(np.random.default_rng(0).integers(0, 30, model.context))
    options: dict[str, Any] = {"max_new_tokens": 12, "sliding_context": True}
    wanted = generate(model, params, [text], compiled=False, **options)
    assert generate(model, params, [text], compiled=True, **options) == wanted
    assert programs(list(prompts._forward(model).compiled._calls.values())) == 1


@pytest.mark.usefixtures("numba_kernels")
def test_prompts_whose_rope_frequencies_change() -> None:
    """Programs are for those that stay the same; texts go on into others."""
    model, params = in_float32(*causal("llama"))
    model = replace(model, rotary=RopeConfig(4, scaling="dynamic", factor=2.0, max_len=20))
    for length, recorded in ((12, True), (18, False)):  # the latter in 32 columns
        prompts._forward.cache_clear()
        text = [i % 7 for i in range(length)]
        right = prefill(model, params, [text])
        found = prefill(model, params, [text], compiled=True)
        np.testing.assert_allclose(found.logits, right.logits, rtol=0, atol=1e-4)
        calls = prompts._forward(model).compiled._calls
        assert bool(calls) == recorded
