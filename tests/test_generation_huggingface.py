"""Token for token what transformers' generate gives: greedy, beams, stops, of every family."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from causal_models import CONFIGS, T5, V
from huggingface import build, double_precision, torch, transformers
from libraries import slow_but

from xformer import pretrained
from xformer.generation import Beam, beam_search, generate
from xformer.generation.samplers import compose, repetition_penalty, temperature

MAX_NEW = 14
FAMILIES = [*CONFIGS, "t5"]
QUICK = ("gpt2", "deepseek_v3", "gemma3_text", "qwen3", "t5")
TRAINED = 8  # tokens, after which RoPE frequencies change
LONG: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": TRAINED}
LONG |= {"short_factor": [1.0, 1.2], "long_factor": [1.5, 3.0]}
LLAMA = {name: value for name, value in CONFIGS["llama"].items() if name != "rope_scaling"}
CHANGING: dict[str, dict[str, Any]] = {
    "dynamic": LLAMA
    | {
        "max_position_embeddings": TRAINED,
        "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 12.0},
    },
    "longrope": LLAMA | {"rope_parameters": LONG | {"rope_theta": 12.0}},
}
LENGTHS = (6, 2, 4)  # of the prompts
N_BEAMS = 3


class Pair(NamedTuple):
    """transformers' model and ours."""

    hf: Any
    model: Any
    params: Any
    prompts: list[list[int]]
    is_t5: bool

    def theirs(self, stop: tuple[int, ...], **options: Any) -> tuple[list[list[int]], Any]:
        """The new ids of each text, up to the one that ended it, and the scores of beams."""
        width = max(LENGTHS)
        ids, mask = np.zeros((2, len(LENGTHS), width), np.int64)
        for i, prompt in enumerate(self.prompts):
            place = slice(len(prompt)) if self.is_t5 else slice(width - len(prompt), None)
            ids[i, place], mask[i, place] = prompt, 1
        with double_precision(integers=not self.is_t5), torch.no_grad():
            out = self.hf.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                max_new_tokens=MAX_NEW,
                pad_token_id=0,
                eos_token_id=list(stop) or None,
                decoder_start_token_id=0 if self.is_t5 else None,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        new = out.sequences[:, 1 if self.is_t5 else width :].tolist()
        scores = getattr(out, "sequences_scores", None)
        return [up_to(row, stop) for row in new], scores


@cache
def pair(family: str, folder: Path) -> Pair:
    if family == "t5":
        hf = build(transformers.T5ForConditionalGeneration, transformers.T5Config(**T5))
    else:
        options = dict((CONFIGS | CHANGING)[family])
        kind = getattr(transformers, options.pop("architecture"))
        hf = build(kind, kind.config_class(**options))
    for name, p in hf.named_parameters():  # or a tied head would say the last token again
        if p.ndim > 1 and not re.search("wte|embed|shared", name):
            p.data *= 6
    hf.generation_config = transformers.GenerationConfig()
    hf.double().save_pretrained(folder / family)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, V, n).tolist() for n in LENGTHS]
    return Pair(hf, *pretrained.load(folder / family, dtype="float64"), prompts, family == "t5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def up_to(ids: list[int], stop: tuple[int, ...]) -> list[int]:
    ends = [i + 1 for i, x in enumerate(ids) if x in stop]
    return ids[: min(ends, default=len(ids))]


def stops(both: Pair) -> list[tuple[int, ...]]:
    """No stop id, one, and two, which greedy texts meet at different places."""
    texts = generate(both.model, both.params, both.prompts, max_new_tokens=MAX_NEW)
    return [(), (texts[0][3],), (texts[1][8], texts[2][5])]


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_greedy(family: str, folder: Path) -> None:
    both = pair(family, folder)
    lengths = set()
    for stop in stops(both):
        want, _ = both.theirs(stop)
        got = generate(both.model, both.params, both.prompts, max_new_tokens=MAX_NEW, stop=stop)
        assert got == want
        lengths.update(map(len, got))
    assert len(lengths) > 2  # they do stop


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_greedy_with_a_repetition_penalty(family: str, folder: Path) -> None:
    """Each prompt alone: transformers counts padding among the ids that a text has."""
    both = pair(family, folder)
    sampler = compose(repetition_penalty(3.0), temperature(0))
    for i in range(len(LENGTHS)):
        one = both._replace(prompts=[both.prompts[i]] * len(LENGTHS))
        if len(one.prompts[0]) < max(LENGTHS) and not both.is_t5:
            continue
        want, _ = one.theirs((), repetition_penalty=3.0)
        got = generate(one.model, one.params, one.prompts, max_new_tokens=MAX_NEW, sampler=sampler)
        assert got == want


@pytest.mark.parametrize("name", CHANGING)
def test_rope_frequencies_that_change_with_the_length(name: str, folder: Path) -> None:
    """As without a cache there: with one, transformers keeps keys rotated for shorter texts."""
    both = pair(name, folder)
    want, _ = both.theirs((), use_cache=False)
    assert generate(both.model, both.params, both.prompts, max_new_tokens=MAX_NEW) == want
    options: Any = {"early_stopping": False, "length_penalty": 1.0}
    want, scores = both.theirs(
        (), use_cache=False, num_beams=N_BEAMS, num_return_sequences=N_BEAMS, **options
    )
    found = beams(both, (), **options)
    assert [beam.ids for beam in found] == want
    np.testing.assert_allclose([beam.score for beam in found], scores, rtol=1e-9)


OPTIONS = list(product((True, False, "never"), (1.0, 0.0, -1.0, 2.5)))


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_beams(family: str, folder: Path) -> None:
    """All beams of all prompts with their scores; for two families under every option."""
    both = pair(family, folder)
    full = family in ("gpt2", "t5")
    for stop in stops(both):
        for early_stopping, length_penalty in OPTIONS if full else OPTIONS[4:5]:
            options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
            want, scores = both.theirs(
                stop, num_beams=N_BEAMS, num_return_sequences=N_BEAMS, **options
            )
            found = beams(both, stop, **options)
            assert [beam.ids for beam in found] == want, (stop, options)
            np.testing.assert_allclose([beam.score for beam in found], scores, rtol=1e-9)


def beams(both: Pair, stop: tuple[int, ...], **options: Any) -> list[Beam]:
    found = beam_search(
        both.model,
        both.params,
        both.prompts,
        n_beams=N_BEAMS,
        max_new_tokens=MAX_NEW,
        stop=stop,
        **options,
    )
    return [beam for one in found for beam in one]
