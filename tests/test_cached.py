"""Growing texts: what `extend` gives for pieces of a text is what `forward` gives for all of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from causal_models import NAMES, T5_NAMES, V, causal, seq2seq
from libraries import only
from xformer.backends import Backend

from xformer import tree

B, T = 3, 19
PIECES = (9, 10, 11, 15, 16, 17, 18, 19)  # where each ends
PADS = (0, 4, 7)  # of each row
EXACT = {"rtol": 1e-10, "atol": 1e-10}
MASKED = [n for n in NAMES if n != "positions for q, k, v"]


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
    state = model.start() if state is None else state
    for end in pieces:
        own = {} if mask is None or start >= max(PADS) else {"mask": mask[:, start:end]}
        part, state = model.extend(params, tokens[:, start:end], state, every=True, **own)
        logits.append(part)
        start = end
    assert state.length == T
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_decoders(name: str) -> None:
    model, params = causal(name)
    tokens, _ = texts()
    want, _ = model.forward(params, tokens)
    network = getattr(model, "network", model)
    np.testing.assert_allclose(
        np.concatenate(grown(network, params, tokens, None), axis=1), want, **EXACT
    )


@pytest.mark.parametrize("name", MASKED)
def test_decoders_with_padding_on_the_left(name: str) -> None:
    """Each row is what it would be alone, too."""
    model, params = causal(name)
    tokens, keep = texts()
    network = getattr(model, "network", model)
    got = np.concatenate(grown(network, params, tokens, keep), axis=1)
    want, _ = model.forward(params, tokens, mask=keep)
    np.testing.assert_allclose(got[keep], want[keep], **EXACT)
    for row, n in enumerate(PADS):
        alone, _ = model.forward(params, tokens[row : row + 1, n:])
        np.testing.assert_allclose(got[row, n:], alone[0], **EXACT)


@pytest.mark.parametrize("name", T5_NAMES)
def test_encoder_decoders(name: str) -> None:
    model, params = seq2seq(name)
    network = getattr(model, "network", model)
    src, mask = texts()
    mask = mask[:, ::-1].copy()  # sources are padded on the right
    tokens = np.random.default_rng(2).integers(1, V, (B, T))
    want, _ = network.forward(params, src, tokens, src_mask=mask)
    state = network.start(params, src, src_mask=mask)
    got = np.concatenate(grown(network, params, tokens, None, state), axis=1)
    np.testing.assert_allclose(got, want, **EXACT)


@only("numpy-readonly", "array-api-strict-restricted", "torch", "jax", "cupy")
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


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_rewound(name: str) -> None:
    """What was written after the tokens that are forgotten leaves no trace."""
    model, params = causal(name)
    network = getattr(model, "network", model)
    tokens, keep = texts()
    mask = {"mask": keep[:, :9]} if name in MASKED else {}
    _, before = network.extend(params, tokens[:, :9], network.start(), **mask)
    _, longer = network.extend(params, tokens[:, ::-1][:, :5].copy(), before)
    for n in range(6):
        state = network.rewind(longer, n)
        assert state.length == 14 - n
        shorter = tokens[:, ::-1][:, : 5 - n].copy()
        _, want = network.extend(params, shorter, before) if n < 5 else (None, before)
        got, after = (network.extend(params, tokens[:, 9:12], s)[0] for s in (state, want))
        np.testing.assert_allclose(got, after, **EXACT)


def test_a_target_is_rewound() -> None:
    model, params = seq2seq("t5")
    src, tgt = np.asarray([[5, 6, 7]]), np.asarray([[0, 3, 4, 5]])
    state = model.start(params, src)
    _, two = model.extend(params, tgt[:, :2], state)
    _, four = model.extend(params, tgt[:, 2:], two)
    again = model.rewind(four, 2)
    got, want = (model.extend(params, tgt[:, 1:3], s)[0] for s in (again, two))
    assert again.length == 2
    np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (13, "n must be at most the 12 tokens there are, got 13"),
        (-1, "n must be an int of at least 0, got -1"),
        (2, "rewind: by 2 tokens, 3 keys before them are needed, and a window has left 2"),
    ],
)
def test_what_cannot_be_rewound(n: int, message: str) -> None:
    model, params = causal("mistral")
    tokens, _ = texts()
    state = model.start()
    for start, end in pairwise((0, 10, 11, 12)):
        _, state = model.extend(params, tokens[:, start:end], state)
    assert model.rewind(state, 1).length == 11
    with pytest.raises(ValueError, match=message):
        model.rewind(state, n)


def test_texts_that_are_not_those_of_the_state() -> None:
    model, params = causal("llama")
    tokens = np.asarray([[1, 2], [3, 4]])
    states = [model.extend(params, tokens, model.start())[1]]
    kept = np.asarray([[False, True], [True, True]])
    states.append(model.extend(params, tokens, model.start(), mask=kept)[1])
    for state in states:
        for n in (1, 3):
            with pytest.raises(ValueError, match=f"the batch size of the state, 2, got {n}"):
                model.extend(params, np.ones((n, 1), np.int64), state)
    model, params = seq2seq("t5")
    with pytest.raises(ValueError, match="the batch size of the state, 2, got 3"):
        model.extend(params, np.ones((3, 1), np.int64), model.start(params, tokens))


@pytest.mark.parametrize("name", MASKED)
def test_more_padding_and_less_change_nothing(name: str) -> None:
    model, params = causal(name)
    network = getattr(model, "network", model)
    tokens, keep = texts()
    _, state = network.extend(params, tokens[:, :9], network.start(), mask=keep[:, :9])
    want, _ = network.extend(params, tokens[:, 9:10], state)
    wider = state.padded(20)
    got, after = network.extend(params, tokens[:, 9:10], wider)
    assert (wider.length, after.length) == (20, 21)
    np.testing.assert_allclose(got, want, **EXACT)
    got, after = network.extend(params, tokens[:, 9:10], wider.padded(9))
    assert after.length == 10
    np.testing.assert_allclose(got, want, **EXACT)
