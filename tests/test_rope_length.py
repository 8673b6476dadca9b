"""RoPE frequencies that change with the length: one result, however a text is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from causal_models import V, causal
from libraries import only, slow_but

from xformer import tree
from xformer.backends import Backend
from xformer.generation import beam_search, generate, prefill, speculative
from xformer.layers import RopeConfig
from xformer.layers.rope_by_layer import Rotary, frequency_length

TRAINED, T = 8, 19  # tokens
EXACT = {"rtol": 1e-10, "atol": 1e-10}
LONG: dict[str, Any] = {"original_max_len": TRAINED, "factor": 4.0}
SHORTER: dict[str, Any] = {"short_factor": (1.1,), "long_factor": (1.4,)}
LONG |= {"short_factor": (1.0, 1.2), "long_factor": (1.5, 3.0)}
CHANGING: dict[str, Rotary] = {
    "dynamic": RopeConfig(4, scaling="dynamic", factor=2.0, max_len=TRAINED),
    "longrope": RopeConfig(4, scaling="longrope", **LONG),
}
LATER = RopeConfig(2, 50.0, scaling="longrope", **LONG | {"original_max_len": 11} | SHORTER)
CHANGING["by layer"] = (CHANGING["longrope"], None, LATER)
CHANGING["by layer, dynamic"] = (LATER, CHANGING["dynamic"], RopeConfig(4))
STEADY: dict[str, Rotary] = {
    "linear": RopeConfig(4, scaling="linear", factor=2.0),
    "yarn": RopeConfig(4, scaling="yarn", factor=4.0, original_max_len=TRAINED),
    "llama3": RopeConfig(
        4,
        scaling="llama3",
        factor=4.0,
        original_max_len=TRAINED,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
}
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7], [1, 8, 2, 8]]


def scaled(name: str, family: str = "llama") -> tuple[Any, Any]:
    """A decoder of three layers and its parameters, in float64."""
    model, params = causal(family)
    return replace(model, rotary=(CHANGING | STEADY)[name]), params


def whole(model: Any, params: Any, ids: list[list[int]]) -> np.ndarray:
    """Logits (B, V) after each text, by one forward pass over all of it."""
    longest = max(map(len, ids))
    mask = np.array([[i >= longest - len(row) for i in range(longest)] for row in ids])
    tokens = np.array([[0] * (longest - len(row)) + row for row in ids])
    return model.forward(params, tokens, mask=mask)[0][:, -1]


def greedy(model: Any, params: Any, prompts: list[list[int]], n: int) -> list[list[int]]:
    """New ids, each by one forward pass over the whole text before it."""
    texts = [list(prompt) for prompt in prompts]
    for _ in range(n):
        for text, new in zip(texts, whole(model, params, texts).argmax(axis=-1), strict=True):
            text.append(int(new))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@only("numpy-readonly", "array-api-strict", "torch", "jax")
@pytest.mark.parametrize("name", CHANGING)
def test_pieces_give_the_logits_of_the_whole(library: Backend, name: str) -> None:
    """Tokens one by one, and some at a time; `every` gives all of the last piece."""
    model, params = scaled(name)
    tokens = np.random.default_rng(1).integers(1, V, (2, T))
    params = tree.map(library.asarray, params)
    state = model.init_state()
    ends = (6, 10, T) if library.name == "jax" else (3, 8, 9, 10, 15, T)
    for start, end in zip((0, *ends), ends, strict=False):
        text = library.asarray(tokens[:, :end])
        got, state = model.decode(params, text[:, start:], state, all_logits=True)
        want, _ = model.forward(params, text)
        np.testing.assert_allclose(
            library.to_numpy(got), library.to_numpy(want[:, start:, :]), **EXACT
        )


@pytest.mark.parametrize("name", [*CHANGING, *STEADY])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prompt_in_chunks_and_after_a_prefix(name: str, family: str) -> None:
    """Of texts of any lengths; Mistral's window drops keys, so that its texts have one length."""
    model, params = scaled(name, family)
    rows = np.random.default_rng(2).integers(1, V, (3, T)).tolist()
    if family == "llama":
        rows = [rows[0], rows[1][:5], rows[2][:11]]
    want = whole(model, params, rows)
    for chunk in (1, 4, 7, None):
        got = prefill(model, params, rows, chunk=chunk).logits
        np.testing.assert_allclose(got, want, **EXACT)
        prefix = prefill(model, params, [row[:4] for row in rows], chunk=chunk)
        got = prefill(model, params, [row[4:] for row in rows], after=prefix, chunk=chunk).logits
        np.testing.assert_allclose(got, want, **EXACT)
        # The prefix is what it was.
        np.testing.assert_allclose(prefix.logits, whole(model, params, [r[:4] for r in rows]))
        again = prefill(model, params, [[5]] * 3, after=prefix).logits
        np.testing.assert_allclose(
            again, whole(model, params, [[*row[:4], 5] for row in rows]), **EXACT
        )


@only("numpy", "torch", "jax")
@pytest.mark.parametrize("name", CHANGING)
def test_greedy_texts(library: Backend, name: str) -> None:
    """JAX pads the texts to columns of its own."""
    model, params = scaled(name)
    want = greedy(model, params, PROMPTS, 7)
    params = tree.map(library.asarray, params)
    assert generate(model, params, PROMPTS, max_new_tokens=7) == want


@pytest.mark.parametrize("name", slow_but(("dynamic", "by layer", "yarn"), [*CHANGING, *STEADY]))
def test_guesses(name: str) -> None:
    """A round ends where frequencies change, whatever the draft; drawn texts go on too."""
    model, params = scaled(name)
    ((*want,),) = greedy(model, params, PROMPTS[:1], 14)
    first = model.with_layers([0])
    of_first = params._replace(stack=params.stack._replace(blocks=params.stack.blocks[:1]))
    for draft in ((model, params), (first, of_first), scaled("dynamic"), causal("qwen3", seed=1)):
        rounds = list(speculative(model, params, *draft, PROMPTS[0], k=4, max_new_tokens=14))
        assert [i for new in rounds for i in new] == want
    rounds = list(speculative(model, params, model, params, PROMPTS[0], k=4, max_new_tokens=14))
    sizes = {"dynamic": [3, *[1] * 11], "longrope": [3, 5, 5, 1]}  # from 6 tokens to 8, and on
    sizes |= {"by layer": [3, 3, 5, 3], "by layer, dynamic": sizes["dynamic"]}  # to 11, and on
    assert [len(new) for new in rounds] == sizes.get(name, [5, 5, 4])


@pytest.mark.parametrize("name", CHANGING)
def test_beams_are_those_of_the_whole_texts(name: str) -> None:
    """The score is the sum of log probabilities, each by a forward pass over the whole text."""
    model, params = scaled(name)
    for prompt, found in zip(
        PROMPTS, beam_search(model, params, PROMPTS, n_beams=3, max_new_tokens=6), strict=True
    ):
        for ids, score in found:
            total = 0.0
            for i, new in enumerate(ids):
                # Frequencies go by the longest text of a batch.
                n = max(map(len, PROMPTS)) + i
                text = [*prompt, *ids[:i]]
                tokens = np.array([[0] * (n - len(text)) + text, [1] * n])
                mask = np.arange(n) >= np.array([[n - len(text)], [0]])
                logits = model.forward(params, tokens, mask=mask)[0][0, -1]
                total += logits[new] - np.logaddexp.reduce(logits)
            assert score == pytest.approx(total / len(ids), rel=1e-9)


@pytest.mark.parametrize("name", CHANGING)
def test_a_state_is_rewound_across_the_change(name: str) -> None:
    model, params = scaled(name)
    tokens = np.random.default_rng(3).integers(1, V, (2, T))
    _, state = model.decode(params, tokens[:, :12], model.init_state())
    for left in (0, 5, 8, 9, 11):
        rewound = model.truncate(state, 12 - left)
        text = np.concatenate((tokens[:, :left], tokens[:, -2:]), axis=1)
        got, _ = model.decode(params, text[:, left:], rewound)
        np.testing.assert_allclose(got, model.forward(params, text)[0][:, -1], **EXACT)


@pytest.mark.parametrize("name", CHANGING)
def test_rows_padding_and_ids_that_are_written_over(name: str) -> None:
    """What is read again are the ids of then, of the rows that are left, without their padding."""
    model, params = scaled(name)
    tokens = np.random.default_rng(4).integers(1, V, (3, 11))
    buffer = tokens[:, :6].copy()
    _, state = model.decode(params, buffer, model.init_state())
    buffer[:] = 0
    kept = state.rows(np.array([2, 0])).padded(13).padded(8)
    got, _ = model.decode(params, tokens[[2, 0], 6:], kept)
    np.testing.assert_allclose(got, model.forward(params, tokens[[2, 0]])[0][:, -1], **EXACT)


@pytest.mark.parametrize("name", CHANGING)
def test_fixed_columns_up_to_the_change(name: str) -> None:
    model, params = scaled(name)
    tokens = np.random.default_rng(5).integers(1, V, (1, 12))
    _, state = model.decode(params, tokens[:, :6], model.init_state())
    fixed = state.preallocate(TRAINED)
    for end in (7, 8):
        got, fixed = model.decode(params, tokens[:, end - 1 : end], fixed)
        want, _ = model.forward(params, tokens[:, :end])
        np.testing.assert_allclose(got, want[:, -1], **EXACT)
    with pytest.raises(ValueError, match=r"^decode: a static state must have at most 8 slots"):
        model.decode(params, tokens[:, 6:7], state.preallocate(TRAINED + 1))
    _, state = model.decode(params, tokens[:, 6:], state)
    with pytest.raises(ValueError, match=r"^preallocate: the RoPE frequencies of 12 tokens change"):
        state.preallocate(20)


def test_what_the_frequencies_go_by() -> None:
    lengths = [0, 7, 8, 9, 10, 500]
    for rotary in STEADY.values():
        assert [frequency_length(rotary, n) for n in lengths] == [0] * 6
    found = {name: [frequency_length(r, n) for n in lengths] for name, r in CHANGING.items()}
    assert found["dynamic"] == found["by layer, dynamic"] == [0, 0, 0, 9, 10, 500]
    assert found["longrope"] == [0, 0, 0, 9, 9, 9]
    assert found["by layer"] == [0, 0, 0, 9, 9, 12]
    assert frequency_length(None, 500) == frequency_length((None, None), 500) == 0


def test_numba_reads_ahead_up_to_the_change() -> None:
    """In float32, where kernels have short texts of the frequencies of longer ones too."""
    pytest.importorskip("numba")
    from xformer import backends, dispatch

    place = backends.get("numba")
    for name in CHANGING:
        model, params = scaled(name, "llama")
        params = tree.map(lambda p: place.asarray(p.astype(np.float32)), params)
        rows = np.random.default_rng(6).integers(1, V, (1, 12)).tolist()
        with place.active():
            got = prefill(model, params, rows, chunk=1).logits
            texts = generate(model, params, [rows[0][:3]], max_new_tokens=14)
            with dispatch.reference_only():
                want = prefill(model, params, rows).logits
                assert generate(model, params, [rows[0][:3]], max_new_tokens=14) == texts
        np.testing.assert_allclose(got, want, atol=2e-3)  # three layers blow up roundings
