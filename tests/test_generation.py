"""One token after another: prompts, stops, seeds, prefixes, the context's end, bad requests."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from causal_models import NAMES, T5_NAMES, UNPADDED, V, causal, lively, seq2seq
from libraries import only

import xformer as xf
from xformer import pretrained, tree
from xformer.backends import Backend
from xformer.generation import PrefilledPrompt, beam_search, generate, prefill, sample, stream
from xformer.generation.samplers import compose, temperature, top_k, top_p
from xformer.generation.settings import settings_of
from xformer.models import Classifier, LanguageModel, Transformer

GPT = xf.GPT(vocab_size=7, n_layers=1, d_model=8, n_heads=2, max_len=5)
PARAMS = tree.map(lambda p: p * 20, GPT.init(seed=1))  # far from uniform
NUMPY = xf.backends.get("numpy")
WINDOWS = (
    *("mistral", "qwen2", "gemma2", "gemma3_text", "smollm3", "starcoder2", "olmo3", "cohere2"),
    "gpt_oss",
)  # layers have windows
PROMPTS = [[5, 6, 7, 8, 9], [3], [30, 31, 32]]
WARM = compose(temperature(1.5), top_p(0.95))


def greedy(model: Any, params: Any, prompt: list[int], n: int) -> list[int]:
    """Without a cache: a forward pass over all the text for each token."""
    text = list(prompt)
    for _ in range(n):
        logits, _ = model.forward(params, np.asarray([text]))
        text.append(int(np.argmax(logits[0, -1])))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", [n for n in NAMES if n not in UNPADDED])
def test_prompts_of_any_lengths(name: str) -> None:
    model, params = causal(name)
    want = [greedy(model, params, prompt, 9) for prompt in PROMPTS]
    assert generate(model, params, PROMPTS, max_new_tokens=9) == want


def test_positions_for_queries_and_keys_want_prompts_of_one_length() -> None:
    model, params = causal("positions for q, k, v")
    prompts = [[5, 6], [7, 8]]
    want = [greedy(model, params, prompt, 9) for prompt in prompts]
    assert generate(model, params, prompts, max_new_tokens=9) == want
    with pytest.raises(ValueError, match='need positions in mode "add", got'):
        generate(model, params, PROMPTS, max_new_tokens=9)


@pytest.mark.parametrize("name", T5_NAMES)
def test_sources_of_any_lengths(name: str) -> None:
    model, params = seq2seq(name)
    want = []
    for source in PROMPTS:
        target = [2]
        for _ in range(9):
            logits, _ = model.forward(params, np.asarray([source]), np.asarray([target]))
            target.append(int(np.argmax(logits[0, -1])))
        want.append(target[1:])
    prefix = prefill(model, params, PROMPTS, start_id=2)
    assert generate(model, params, prefix, max_new_tokens=9) == want


def test_the_start_of_a_target_is_the_configurations() -> None:
    model, params = seq2seq("t5")
    given = generate(model, params, prefill(model, params, PROMPTS, start_id=0), max_new_tokens=5)
    assert generate(model, params, PROMPTS, max_new_tokens=5) == given
    bare = {k: v for k, v in model.hf_config.items() if k != "decoder_start_token_id"}
    assert prefill(pretrained.model(bare | {"pad_token_id": 3}), params, PROMPTS).ids[0] == (3,)
    with pytest.raises(ValueError, match="start_id, the start token of the targets, must be given"):
        generate(*seq2seq("Transformer"), PROMPTS, max_new_tokens=5)
    with pytest.raises(ValueError, match=r"start_id must lie in \[0, 37\), got 37"):
        prefill(model, params, PROMPTS, start_id=V)


# Stops


def test_each_row_ends_by_itself() -> None:
    model, params = causal("mixtral")
    free = generate(model, params, PROMPTS, max_new_tokens=12)
    stop = {free[0][2], free[1][7]}
    ends = [next((i for i, x in enumerate(row) if x in stop), 11) + 1 for row in free]
    want = [row[:end] for row, end in zip(free, ends, strict=True)]
    assert len({len(row) for row in want}) > 1
    assert generate(model, params, PROMPTS, max_new_tokens=12, stop=stop) == want
    steps = list(stream(model, params, PROMPTS, max_new_tokens=12, stop=stop))
    assert len(steps) == max(ends)  # not a step more
    assert [[s[i] for s in steps if s[i] is not None] for i in range(3)] == want


def test_nothing_new() -> None:
    assert generate(GPT, PARAMS, [[1], [2, 3]], max_new_tokens=0) == [[], []]


# Draws


def last_logits(prompt: list[int]) -> np.ndarray:
    return GPT.forward(PARAMS, np.asarray([prompt[-GPT.context :]]))[0][0, -1]


@pytest.mark.parametrize(
    ("t", "k"), [pytest.param(1.0, None, marks=pytest.mark.slow), (0.5, None), (2.0, 3)]
)
def test_draws_follow_the_distribution(t: float, k: int | None) -> None:
    logits = last_logits([2, 4]) / t
    if k:
        logits = np.where(logits < np.sort(logits)[-k], -np.inf, logits)
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    n = 500
    options: dict[str, Any] = {"max_new_tokens": 1, "temperature": t, "top_k": k}
    drawn = Counter(next(sample(GPT, PARAMS, [2, 4], seed=i, **options)) for i in range(n))
    shares = np.array([drawn[i] / n for i in range(7)])
    assert (shares[probs == 0] == 0).all()
    assert abs(shares - probs).max() < 4 * 0.5 / np.sqrt(n)  # four standard deviations at most


def test_padding_within_a_source_is_no_token() -> None:
    """By the model's pad_id: alone, beside a longer source, and in a compiled program."""
    model = Transformer(11, 13, 8, 2, 1, 1, 9)
    params, source = model.init(0), [5, 0, 3]
    (alone,) = prefill(model, params, [source], start_id=1).logits
    beside = prefill(model, params, [source, [1, 2, 3, 4, 5]], start_id=1).logits[0]
    (compiled,) = prefill(model, params, [source], start_id=1, compiled=True).logits
    tokens = np.array([source])
    want, _ = model.forward(params, tokens, np.array([[1]]))
    for logits in (alone, beside, compiled):
        np.testing.assert_allclose(logits, want[0, 0], atol=1e-6)
    memory, _ = model.encode(params, tokens)
    with pytest.raises(ValueError, match="decode_target: a model with a pad_id needs src_mask"):
        model.decode_target(params, *memory, np.array([[1]]))
    assert settings_of(model).suppress_tokens == (0,)


def test_a_seed_gives_the_same_tokens_and_another_one_others() -> None:
    model, params = causal("llama")
    runs = [
        generate(model, params, PROMPTS, max_new_tokens=9, sampler=WARM, seed=seed)
        for seed in (5, 5, 6)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_the_first_text_of_a_batch_is_that_of_its_prompt_alone() -> None:
    model, params = causal("llama")
    options: dict[str, Any] = {"max_new_tokens": 9, "sampler": WARM, "seed": 3}
    alone = generate(model, params, PROMPTS[:1], **options)
    assert generate(model, params, PROMPTS, **options)[:1] == alone
    twice = generate(model, params, PROMPTS[:1] * 2, **options)
    assert twice[0] == alone[0] != twice[1]


@only("array-api-strict", "torch", "cupy")
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_seed_gives_the_same_text_on_other_libraries(library: Backend, name: str) -> None:
    model, params = seq2seq(name) if name == "t5" else causal(name)
    sampler = compose(temperature(1.5), top_k(9))
    options: dict[str, Any] = {"max_new_tokens": 6, "sampler": sampler, "seed": 1}
    want = generate(model, params, PROMPTS, **options)
    params = tree.map(library.asarray, params)
    assert generate(model, params, PROMPTS, **options) == want


@only("jax")
def test_padded_states_of_libraries_that_compile(
    library: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past several of their lengths, to the end of the context."""
    from xformer.generation import prefix

    monkeypatch.setattr(prefix, "COLUMNS", 2)
    model = xf.GPT(vocab_size=V, n_layers=1, d_model=8, n_heads=2, max_len=7)
    params = lively(model, 0)
    prompts = [[1, 2, 3], [4]]
    want = generate(model, params, prompts, max_new_tokens=5)
    assert generate(model, tree.map(library.asarray, params), prompts, max_new_tokens=5) == want


def test_frozen_parameters_generate_too() -> None:
    model, params = causal("gpt2")
    want = generate(model, params, PROMPTS, max_new_tokens=5)
    assert generate(model, tree.freeze(params), PROMPTS, max_new_tokens=5) == want


# Prefixes


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 99])
@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma2", "alibi"])
def test_a_prompt_is_read_in_chunks(name: str, chunk: int) -> None:
    model, params = causal(name)
    whole = prefill(model, params, PROMPTS)
    parts = prefill(model, params, PROMPTS, chunk=chunk)
    np.testing.assert_allclose(parts.logits, whole.logits, rtol=1e-9, atol=1e-9)
    assert parts.ids == whole.ids == tuple(map(tuple, PROMPTS))
    assert generate(model, params, parts, max_new_tokens=5) == generate(
        model, params, whole, max_new_tokens=5
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_is_continued_many_times(name: str) -> None:
    model, params = causal(name)
    prefix = prefill(model, params, [[4, 5, 6]])
    before = prefix.logits.copy()
    for more in ([7, 8], [9], [7, 8]):
        text = prefill(model, params, [more], after=prefix)
        assert text.ids == ((4, 5, 6, *more),)
        want = greedy(model, params, [4, 5, 6, *more], 5)
        assert generate(model, params, text, max_new_tokens=5) == [want]
    assert generate(model, params, prefix, max_new_tokens=5) == [
        greedy(model, params, [4, 5, 6], 5)
    ]
    np.testing.assert_array_equal(prefix.logits, before)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in UNPADDED])
def test_a_prefix_for_many_prompts(name: str) -> None:
    """Of one length with every model; of several where no layer goes by distances."""
    model, params = causal(name)
    prefix = prefill(model, params, [[4, 5, 6]])
    ragged = [[7, 8, 9], [10], [11, 12]]
    for prompts in ([[7, 8], [9, 10], [11, 12]], ragged):
        near = (*WINDOWS, "alibi", "relative bias", "shaw", "qwen3_5_text")
        if prompts is ragged and name in near:
            with pytest.raises(ValueError, match="the same length for this model: its layers"):
                prefill(model, params, prompts, after=prefix)
            continue
        text = prefill(model, params, prompts, after=prefix)
        want = [greedy(model, params, [4, 5, 6, *more], 5) for more in prompts]
        assert generate(model, params, text, max_new_tokens=5) == want


def test_a_target_is_continued() -> None:
    model, params = seq2seq("t5")
    prefix = prefill(model, params, PROMPTS)
    free = generate(model, params, prefix, max_new_tokens=6)
    more = prefill(model, params, [row[:2] for row in free], after=prefix)
    assert generate(model, params, more, max_new_tokens=4) == [row[2:] for row in free]
    with pytest.raises(ValueError, match="prompts must have the same length for this model"):
        prefill(model, params, [[1], [2, 3], [4]], after=prefix)


def test_rows_of_a_prefix() -> None:
    model, params = causal("qwen3")
    prefix = prefill(model, params, PROMPTS)
    free = generate(model, params, prefix, max_new_tokens=6)
    assert generate(model, params, prefix.rows([2, 0, 2]), max_new_tokens=6) == [
        free[2],
        free[0],
        free[2],
    ]


def test_a_prefix_of_other_texts() -> None:
    prefix = prefill(GPT, PARAMS, [[1], [2]])
    with pytest.raises(ValueError, match="3 prompts cannot continue the 2 texts of after"):
        prefill(GPT, PARAMS, [[1], [2], [3]], after=prefix)


# The end of the context


def test_the_context_is_filled_to_its_end() -> None:
    model = xf.GPT(vocab_size=V, n_layers=1, d_model=8, n_heads=2, max_len=6)
    params = lively(model, 0)
    for prompts, most in (([[1, 2, 3], [4]], 4), ([[1] * 6], 1)):
        assert len(generate(model, params, prompts, max_new_tokens=most)[0]) == most
        longest = len(prompts[0])
        message = f"holds 6 tokens, and there are {longest} of the prompt and {most} more"
        for start in (prompts, prefill(model, params, prompts)):
            with pytest.raises(ValueError, match=message):
                stream(model, params, start, max_new_tokens=most + 1)  # before the first step


def test_a_prompt_longer_than_the_context() -> None:
    with pytest.raises(ValueError, match=r"the model's context holds 5 tokens, and there are 6$"):
        generate(GPT, PARAMS, [[1] * 6], max_new_tokens=1)
    with pytest.raises(ValueError, match="prefill: the model's context holds 5 tokens"):
        prefill(GPT, PARAMS, [[1, 2]], after=prefill(GPT, PARAMS, [[1] * 4]))


def test_a_text_slides_past_the_context() -> None:
    """Each token then comes after the last max_len tokens alone, as a forward pass gives it."""
    for prompt in ([3, 1], [0, 1, 2, 3, 4, 5, 6]):
        tokens = list(prompt)
        for token in sample(GPT, PARAMS, prompt, max_new_tokens=12, temperature=0):
            assert token == int(np.argmax(last_logits(tokens)))
            tokens.append(token)
        assert len(tokens) == len(prompt) + 12
    rows = generate(
        GPT, PARAMS, [[3, 1], [0, 1, 2, 3, 4, 5, 6]], max_new_tokens=12, sliding_context=True
    )
    assert rows[1] == tokens[7:]


def test_models_without_limit_go_on() -> None:
    model, params = causal("alibi")
    assert len(generate(model, params, [[1]], max_new_tokens=100)[0]) == 100


# Bad requests


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([], {}, ValueError, r"prompts must hold a list of ids each, got \[\]"),
        ([[]], {}, ValueError, "prompt 0 must hold at least one token, got none: .* bos_id"),
        ([[1], []], {}, ValueError, "prompt 1 must hold at least one token"),
        ([1, 2], {}, TypeError, "prompt 0 must be a list of ids, got 1"),
        (["ab"], {}, TypeError, "prompt 0 must be a list of ids, got 'ab'"),
        ("ab", {}, ValueError, "prompts must hold a list of ids each, got 'ab'"),
        ([[0.5]], {}, TypeError, r"prompt 0 must be a list of ids, got \[0.5\]"),
        ([[7]], {}, ValueError, r"ids must lie in \[0, 7\), got ids from 7 to 7"),
        ([[-1]], {}, ValueError, r"ids must lie in \[0, 7\), got ids from -1 to -1"),
        (
            [[1]],
            {"max_new_tokens": -1},
            ValueError,
            "max_new_tokens must be an int of at least 0, got -1",
        ),
        ([[1]], {"seed": -1}, ValueError, "seed must be an int of at least 0, got -1"),
        ([[1]], {"stop": "."}, TypeError, "stop must hold ids, got '.'"),
        ([[1]], {"stop": 3}, TypeError, "stop must hold ids, got 3"),
        ([[1]], {"stop": ["."]}, TypeError, r"stop must hold ids, got \['.'\]"),
        ([[1]], {"stop": [None]}, TypeError, r"stop must hold ids, got \[None\]"),
        ([[1]], {"stop": [True]}, TypeError, r"stop must hold ids, got \[True\]"),
        ([[1]], {"stop": object()}, TypeError, "stop must hold ids, got <object"),
        ([[1]], {"sampler": 5}, TypeError, "sampler must be a function of logits and ids, got 5"),
        (None, {}, ValueError, "prompts must hold a list of ids each, got None"),
        (5, {}, ValueError, "prompts must hold a list of ids each, got 5"),
        (np.array(3), {}, ValueError, r"prompts must hold a list of ids each, got array\(3\)"),
    ],
)
def test_bad_requests_are_refused(
    prompts: Any, options: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        generate(GPT, PARAMS, prompts, **{"max_new_tokens": 1} | options)


@pytest.mark.parametrize("write", [generate, partial(beam_search, n_beams=2)])
def test_stops_may_be_anything_that_holds_ids(write: Any) -> None:
    """None is no stop, and what can be read only once is read once."""
    free = write(GPT, PARAMS, [[1]], max_new_tokens=4)
    stop = (free[0] if write is generate else free[0][0].ids)[1]
    ended = write(GPT, PARAMS, [[1]], max_new_tokens=4, stop=[stop])
    assert ended != free
    assert write(GPT, PARAMS, [[1]], max_new_tokens=4, stop=None) == free
    for one in (iter([stop]), (i for i in [stop]), {stop}, np.array([stop], np.uint8), {stop: 1}):
        assert write(GPT, PARAMS, [[1]], max_new_tokens=4, stop=one) == ended


def test_what_is_no_model_of_these_parameters() -> None:
    for params in (None, (), {}):
        with pytest.raises(TypeError, match="params must be the model's parameters, got"):
            generate(GPT, params, [[1]], max_new_tokens=1)
    with pytest.raises(TypeError, match="prefill: after must be a PrefilledPrompt, got int"):
        prefill(GPT, PARAMS, [[1]], after=5)
    with pytest.raises(TypeError, match="compose: a filter must be a function, got None"):
        compose(top_k(3), None)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "must hold at least one token"),
        ([1], {"temperature": -1.0}, r"t must lie in \[0, inf\], got -1.0"),
        ([1], {"top_k": 0}, "k must be an int of at least 1, got 0"),
    ],
)
def test_bad_samples_are_refused(prompt: list[int], options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(GPT, PARAMS, prompt, **{"max_new_tokens": 1} | options)


def test_bad_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk must be an int of at least 1, got 0"):
        prefill(GPT, PARAMS, [[1]], chunk=0)


@pytest.mark.parametrize(
    "change", [{"causal": False}, {"head": None}, {"head": Classifier(n_labels=2)}]
)
def test_models_that_write_nothing_are_refused(change: dict[str, Any]) -> None:
    network = GPT
    model = LanguageModel(**{"embed": network.embed, "blocks": network.blocks} | change)
    with pytest.raises(ValueError, match="must be a causal language model or an encoder-decoder"):
        generate(model, model.init(), [[1]], max_new_tokens=1)


@pytest.mark.parametrize("write", [generate, partial(beam_search, n_beams=2)])
def test_a_broken_model_writes_nothing(write: Any) -> None:
    broken = tree.map(lambda a: a * np.nan, PARAMS)
    with pytest.raises(ValueError, match="largest logit of each row must be finite, got nan"):
        write(GPT, broken, [[1, 2]], max_new_tokens=2)


def test_an_encoder_decoder_does_not_slide() -> None:
    with pytest.raises(ValueError, match="sliding_context needs a LanguageModel"):
        stream(*seq2seq("t5"), PROMPTS, max_new_tokens=1, sliding_context=True)


def test_not_a_model() -> None:
    with pytest.raises(ValueError, match=r"generate: the model must be a causal .*, got 3"):
        generate(3, PARAMS, [[1]], max_new_tokens=1)


def test_prefixes_are_values() -> None:
    assert issubclass(PrefilledPrompt, tuple)
