"""Growing texts: what `extend` gives for pieces of a text is what `forward` gives for all of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from causal_models import (
    ALL,
    CHANGES,
    T5_NAMES,
    UNPADDED,
    V,
    causal,
    require_other_arrays,
    seq2seq,
)
from libraries import only

from xformer import tree
from xformer.backends import Backend

B, T = 3, 19
PIECES = (9, 10, 11, 15, 16, 17, 18, 19)  # where each ends
PADS = (0, 4, 7)  # of each row
EXACT = {"rtol": 1e-10, "atol": 1e-10}
MASKED = [n for n in ALL if n not in UNPADDED]


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and which they are: padding stands on the left."""
    keep = np.arange(T) >= np.asarray(PADS)[:, None]
    return np.random.default_rng(1).integers(1, V, (B, T)), keep


def grown(
    model: Any,
    params: Any,
    tokens: Any,
    mask: Any,
    state: Any = None,
    pieces: tuple[int, ...] = PIECES,
) -> list[Any]:
    """Logits of each piece."""
    logits, start = [], 0
    state = model.init_state() if state is None else state
    for end in pieces:
        own = {} if mask is None or start >= max(PADS) else {"mask": mask[:, start:end]}
        part, state = model.decode(params, tokens[:, start:end], state, all_logits=True, **own)
        logits.append(part)
        start = end
    assert state.length == T
    return logits


@pytest.mark.parametrize("name", ALL)
def test_decoders(name: str) -> None:
    model, params = causal(name)
    tokens, _ = texts()
    want, _ = model.forward(params, tokens)
    np.testing.assert_allclose(
        np.concatenate(grown(model, params, tokens, None), axis=1), want, **EXACT
    )


@pytest.mark.parametrize("name", MASKED)
def test_decoders_with_padding_on_the_left(name: str) -> None:
    """Each row is what it would be alone, too."""
    model, params = causal(name)
    tokens, keep = texts()
    got = np.concatenate(grown(model, params, tokens, keep), axis=1)
    want, _ = model.forward(params, tokens, mask=keep)
    np.testing.assert_allclose(got[keep], want[keep], **EXACT)
    for row, n in enumerate(PADS):
        alone, _ = model.forward(params, tokens[row : row + 1, n:])
        np.testing.assert_allclose(got[row, n:], alone[0], **EXACT)


FIXED = [(n, n in MASKED) for n in ALL if n != "shaw"]
FIXED += [(n, False) for n in ("gpt2", "llama", "mistral")]  # without padding


@pytest.mark.parametrize(("name", "padded"), FIXED)
def test_fixed_columns(library: Backend, name: str, padded: bool) -> None:
    """Where a text is and how long is an array; the logits are those of a text that grows."""
    model, params = causal(name)
    params = tree.map(library.asarray, params)
    tokens, keep = (library.asarray(a) for a in texts())
    own = {"mask": keep[:, :8]} if padded else {}
    _, state = model.decode(params, tokens[:, :8], model.init_state(), **own)
    for i in (8, 9):  # after which windows have dropped keys
        _, state = model.decode(params, tokens[:, i : i + 1], state)
    fixed = state.preallocate(T + 3)
    for end in range(10, T):
        token = tokens[:, end : end + 1]
        want, state = model.decode(params, token, state)
        got, fixed = model.decode(params, token, fixed)
        np.testing.assert_allclose(library.to_numpy(got), library.to_numpy(want), **EXACT)
        assert (int(fixed.length), fixed.capacity) == (end + 1, T + 3)


@only("numpy")
def test_columns_become_more(library: Backend) -> None:
    """Of a text that fills them, or does not yet; that of before is no longer needed."""
    model, params = causal("mistral")
    tokens, keep = texts()
    _, state = model.decode(params, tokens[:, :10], model.init_state(), mask=keep[:, :10])
    fixed = state.preallocate(12)
    for end in range(10, T):
        fixed = fixed.preallocate(fixed.capacity + 4) if end in (12, 14) else fixed
        got, fixed = model.decode(params, tokens[:, end : end + 1], fixed)
        want, state = model.decode(params, tokens[:, end : end + 1], state)
        np.testing.assert_allclose(got, want, **EXACT)
    assert fixed.capacity == 20


@pytest.mark.parametrize("is_static", [False, True])
def test_a_recurrent_layer_cannot_forget(is_static: bool) -> None:
    model, params = causal("qwen3_5_text")
    _, state = model.decode(params, texts()[0][:, :8], model.init_state())
    state = state.preallocate(T) if is_static else state
    model.truncate(state, 0)
    with pytest.raises(ValueError, match="cannot drop its last 2 tokens"):
        model.truncate(state, 2)


FORGETTING = [(name, padded) for name, padded in FIXED if name != "qwen3_5_text"]


@only("numpy", "array-api-strict", "torch", "jax")
@pytest.mark.parametrize(("name", "padded"), FORGETTING)
def test_fixed_columns_of_several_tokens(library: Backend, name: str, padded: bool) -> None:
    """Logits after each of them, also in the place of others that were read and forgotten."""
    model, params = causal(name)
    params = tree.map(library.asarray, params)
    tokens, keep = (library.asarray(a) for a in texts())
    own = {"mask": keep[:, :8]} if padded else {}
    _, state = model.decode(params, tokens[:, :8], model.init_state(), **own)
    want, _ = model.decode(params, tokens[:, 8:14], state, all_logits=True)
    fixed = state.preallocate(T)
    _, fixed = model.decode(params, tokens[:, 2:6], fixed)
    fixed = model.truncate(fixed, 4)
    got = []
    for part in (slice(8, 11), slice(11, 12), slice(12, 14)):
        logits, fixed = model.decode(params, tokens[:, part], fixed, all_logits=True)
        got.append(library.to_numpy(logits))
    np.testing.assert_allclose(np.concatenate(got, axis=1), library.to_numpy(want), **EXACT)
    assert (int(fixed.length), fixed.capacity) == (14, T)


def test_what_fixed_columns_do_not_take() -> None:
    model, params = causal("gpt2")
    _, state = model.decode(params, texts()[0], model.init_state())
    with pytest.raises(ValueError, match="decode: a static state has a mask already, got another"):
        mask = np.ones((3, 1), np.bool_)
        model.decode(params, texts()[0][:, :1], state.preallocate(30), mask=mask)
    with pytest.raises(ValueError, match="decode: at most 40 tokens fit the model's context"):
        model.decode(params, texts()[0][:, :1], state.preallocate(41))
    for empty, n in ((model.init_state(), 5), (state, 18)):
        with pytest.raises(ValueError, match=r"n must be at least the \d+ tokens there"):
            empty.preallocate(n)
    model, params = causal("shaw")
    _, state = model.decode(params, texts()[0], model.init_state())
    with pytest.raises(ValueError, match=r"a static KV cache needs no params\.shaw"):
        model.decode(params, texts()[0][:, :1], state.preallocate(30))


@pytest.mark.parametrize("name", T5_NAMES)
@only("numpy", "array-api-strict", "torch", "jax")
def test_targets_in_fixed_columns(library: Backend, name: str) -> None:
    """And sources in more columns, which change nothing."""
    model, params = seq2seq(name)
    params = tree.map(library.asarray, params)
    tokens, keep = (library.asarray(a) for a in texts())
    for mask in (None, keep):
        state = model.init_state(params, tokens, src_mask=mask)
        _, state = model.decode(params, tokens[:, :5], state)
        want, _ = model.decode(params, tokens[:, 5:9], state, all_logits=True)
        fixed = state.preallocate(12).wider(T + 3)
        _, fixed = model.decode(params, tokens[:, :2], fixed)
        fixed, got = model.truncate(fixed, 2), []
        for part in (slice(5, 6), slice(6, 9)):
            logits, fixed = model.decode(params, tokens[:, part], fixed, all_logits=True)
            got.append(library.to_numpy(logits))
        np.testing.assert_allclose(np.concatenate(got, axis=1), library.to_numpy(want), **EXACT)
    with pytest.raises(ValueError, match=r"preallocate: n must be at least the 5 tokens there are"):
        state.preallocate(4)
    if model.context is not None:
        with pytest.raises(
            ValueError, match=f"at most {model.context} tokens fit the model's context"
        ):
            model.decode(params, tokens[:, :1], state.preallocate(model.context + 1))


@pytest.mark.parametrize("name", T5_NAMES)
def test_encoder_decoders(name: str) -> None:
    model, params = seq2seq(name)
    src, mask = texts()
    mask = mask[:, ::-1].copy()  # sources are padded on the right
    tokens = np.random.default_rng(2).integers(1, V, (B, T))
    want, _ = model.forward(params, src, tokens, src_mask=mask)
    state = model.init_state(params, src, src_mask=mask)
    got = np.concatenate(grown(model, params, tokens, None, state), axis=1)
    np.testing.assert_allclose(got, want, **EXACT)


@only("numpy-readonly", "array-api-strict", "torch", "jax", "cupy")
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_on_every_library(library: Backend, name: str) -> None:
    model, params = causal(name)
    tokens, keep = texts()
    want, _ = model.forward(params, tokens, mask=keep)
    params = tree.map(library.asarray, params)
    pieces = (9, 10, 19) if library.name == "jax" else PIECES  # it compiles for each anew
    parts = grown(model, params, library.asarray(tokens), library.asarray(keep), pieces=pieces)
    got = np.concatenate([library.to_numpy(part) for part in parts], axis=1)
    np.testing.assert_allclose(got[keep], want[keep], **EXACT)


@only("numpy", "torch", "cupy")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_a_past_that_was_given_other_arrays(library: Backend, name: str, change: str) -> None:
    """They count, and not what the past's own memory has."""
    require_other_arrays(library, name, change, "float64")


@pytest.mark.parametrize("name", [name for name in ALL if name != "qwen3_5_text"])
def test_a_state_is_rewound(name: str) -> None:
    """What was written after the tokens that are forgotten leaves no trace."""
    model, params = causal(name)
    tokens, keep = texts()
    mask = {"mask": keep[:, :9]} if name in MASKED else {}
    _, before = model.decode(params, tokens[:, :9], model.init_state(), **mask)
    _, longer = model.decode(params, tokens[:, ::-1][:, :5].copy(), before)
    for n in range(6):
        state = model.truncate(longer, n)
        assert state.length == 14 - n
        shorter = tokens[:, ::-1][:, : 5 - n].copy()
        _, want = model.decode(params, shorter, before) if n < 5 else (None, before)
        got, after = (model.decode(params, tokens[:, 9:12], s)[0] for s in (state, want))
        np.testing.assert_allclose(got, after, **EXACT)


def test_a_target_is_rewound() -> None:
    model, params = seq2seq("t5")
    src, tgt = np.asarray([[5, 6, 7]]), np.asarray([[0, 3, 4, 5]])
    state = model.init_state(params, src)
    _, two = model.decode(params, tgt[:, :2], state)
    _, four = model.decode(params, tgt[:, 2:], two)
    again = model.truncate(four, 2)
    got, want = (model.decode(params, tgt[:, 1:3], s)[0] for s in (again, two))
    assert again.length == 2
    np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (13, "n must be at most the 12 tokens there are, got 13"),
        (-1, "n must be an int of at least 0, got -1"),
        (
            2,
            "truncate: without the last 2 tokens 3 earlier keys are needed, and a window has lef",
        ),
    ],
)
def test_what_cannot_be_rewound(n: int, message: str) -> None:
    model, params = causal("mistral")
    tokens, _ = texts()
    state = model.init_state()
    for start, end in pairwise((0, 10, 11, 12)):
        _, state = model.decode(params, tokens[:, start:end], state)
    assert model.truncate(state, 1).length == 11
    with pytest.raises(ValueError, match=message):
        model.truncate(state, n)


def test_texts_that_are_not_those_of_the_state() -> None:
    model, params = causal("llama")
    tokens = np.asarray([[1, 2], [3, 4]])
    states = [model.decode(params, tokens, model.init_state())[1]]
    kept = np.asarray([[False, True], [True, True]])
    states.append(model.decode(params, tokens, model.init_state(), mask=kept)[1])
    for state in states:
        for n in (1, 3):
            with pytest.raises(ValueError, match=f"the batch size of the state, 2, got {n}"):
                model.decode(params, np.ones((n, 1), np.int64), state)
    model, params = seq2seq("t5")
    with pytest.raises(ValueError, match="the batch size of the state, 2, got 3"):
        model.decode(params, np.ones((3, 1), np.int64), model.init_state(params, tokens))


@pytest.mark.parametrize("name", MASKED)
def test_more_padding_and_less_change_nothing(name: str) -> None:
    model, params = causal(name)
    tokens, keep = texts()
    _, state = model.decode(params, tokens[:, :9], model.init_state(), mask=keep[:, :9])
    want, _ = model.decode(params, tokens[:, 9:10], state)
    wider = state.padded(20)
    got, after = model.decode(params, tokens[:, 9:10], wider)
    assert (wider.length, after.length) == (20, 21)
    np.testing.assert_allclose(got, want, **EXACT)
    got, after = model.decode(params, tokens[:, 9:10], wider.padded(9))
    assert after.length == 10
    np.testing.assert_allclose(got, want, **EXACT)
