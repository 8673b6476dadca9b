"""Mistakes of a first hour in Python: each message names what was called and what was wanted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xformer as xf
from xformer import backends, generation, layers, models, ops, sentences, training

GPT = xf.GPT(vocab_size=13, n_layers=1, d_model=8, n_heads=2, max_len=8)
PAIR = xf.Transformer(7, 7, 8, 2, 1, 1, 8)
PARAMS, OF_PAIR = GPT.init(0), PAIR.init(0)
TOKENS = np.asarray([[1, 2, 3], [4, 5, 6]])
X = np.ones((2, 3, 8), np.float32)
Q = np.ones((2, 2, 3, 4), np.float32)
ENCODER = models.LanguageModel(
    layers.EmbedConfig(vocab_size=13, width=8, d_model=8, max_len=8),
    GPT.blocks,
    causal=False,
)
OF_ENCODER = ENCODER.init(0)
WANTED = "params must be LanguageModelParams, as from model.init(seed) or load, got"
Call = Callable[[], Any]
MODELS: list[tuple[Call, str]] = [
    (
        lambda: GPT(TOKENS),
        "LanguageModel is not called: y, cache = model.forward(params, tokens)",
    ),
    (lambda: GPT(PARAMS, TOKENS), "a LanguageModel is not called: "),
    (lambda: PAIR(TOKENS, TOKENS), "model.forward(params, src, tgt)"),
    (lambda: PAIR(TOKENS), "an EncoderDecoder is not called: "),
    (lambda: GPT.forward(None, TOKENS), f"LanguageModel: {WANTED} None"),
    (lambda: GPT.loss(None, TOKENS, TOKENS), f"{WANTED} None"),
    (lambda: GPT.forward(PARAMS._asdict(), TOKENS), f"{WANTED} dict"),
    (lambda: GPT.forward((GPT, PARAMS), TOKENS), f"{WANTED} tuple"),
    (lambda: GPT.forward(GPT, TOKENS), f"{WANTED} LanguageModel"),
    (lambda: GPT.forward(TOKENS, PARAMS), f"{WANTED} ndarray"),
    (lambda: GPT.forward(OF_PAIR, TOKENS), f"{WANTED} EncoderDecoderParams"),
    (lambda: PAIR.forward(PARAMS, TOKENS, TOKENS), "params must be EncoderDecoderParams, as"),
    (lambda: PAIR.init_state(None, TOKENS), "params must be EncoderDecoderParams, as"),
    (
        lambda: GPT.decode(None, TOKENS, GPT.init_state()),
        f"{WANTED} None",
    ),
    (lambda: generation.generate(GPT, None, [[1]], max_new_tokens=1), "parameters, got None"),
    (lambda: training.loss_of(None), "loss_of: the model must have a loss, got NoneType"),
]
OPS: list[tuple[Call, str]] = [
    (lambda: ops.sdpa(Q, Q, Q, casual=True), "'casual'; did you mean causal?"),
    (lambda: ops.sdpa(Q, Q, Q, is_causal=True), "sdpa: got an unexpected keyword argument"),
    (lambda: ops.sdpa(Q, Q, Q, attn_mask=None), "'attn_mask'; did you mean mask?"),
    (lambda: ops.sdpa(Q, Q, Q, dropout=0.1), "'dropout'; did you mean dropout_rate?"),
    (lambda: ops.sdpa(Q, Q, Q, banana=1), "'banana'; it takes q, k, v, bias, sinks, mask=, caus"),
    (lambda: ops.sdpa(Q, Q, Q, causal="yes"), "sdpa: causal must be True or False, got 'yes'"),
    (lambda: ops.softmax(X, dim=-1), "softmax: got an unexpected keyword argument 'dim'; did you"),
    (
        lambda: ops.dropout(X, 0.5),
        "dropout: too many positional arguments; it takes x, rate=",
    ),
    (
        lambda: ops.cross_entropy(X),
        "cross_entropy: missing a required argument: 'targets'; it",
    ),
]
OTHERS: list[tuple[Call, str]] = [
    (lambda: xf.explain("sdpa"), "explain: op must be an op, such as xformer.ops.sdpa, got 'sdpa'"),
    (lambda: xf.kernel("sdpa", "numpy"), "kernel: op must be an op, such as xformer.ops.sdpa"),
    (lambda: xf.gradcheck(None), "gradcheck: fn must be a function, got None"),
    (lambda: xf.jvp(None, (X,), (X,)), "jvp: fn must be a function, got None"),
    (lambda: xf.tree.map(None, PARAMS), "tree.map: fn must be a function, got None"),
    (lambda: training.Bytes().encode(None), "Bytes: the text must be a string, got None"),
    (lambda: training.Bytes().encode(b"a"), "Bytes: the text must be a string, got bytes"),
    (lambda: training.Characters("ab").encode(None), "Characters: the text must be a string, got"),
    (
        lambda: training.load_corpus(__file__, "bytes"),
        "named_vocabulary('bytes') makes it",
    ),
    (lambda: sentences.similarity([[1.0]]), "similarity: a must be an array, got list"),
    (lambda: sentences.embed(ENCODER, None, None, ["a"]), f"embed: {WANTED} None"),
    (
        lambda: sentences.embed(ENCODER, OF_ENCODER, "folder", ["a"]),
        "embed: tokenizer must be one of xformer.pretrained.tokenizer.tokenizer(folder), got str",
    ),
    (lambda: GPT.init(0, dtype=np.float32), "give the name of the dtype"),
    (lambda: GPT.init(0, "cuda"), "got 'cuda'; did you mean cupy?"),
    (lambda: backends.get("gpu"), "got 'gpu'; did you mean cupy?"),
]


def _said(value: Any) -> str:
    """The id of a sentence; none of a function, whose name holds an address."""
    return value[:40] if isinstance(value, str) else ""


@pytest.mark.parametrize(("call", "said"), [*MODELS, *OTHERS], ids=_said)
def test_the_message_names_what_was_called(call: Call, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        call()


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize(("call", "said"), OPS, ids=_said)
def test_an_op_says_what_it_takes(call: Call, said: str, kernels: str) -> None:
    if (why := backends.unavailable_reason(kernels)) is not None:
        pytest.skip(why)
    with xf.kernels(kernels), pytest.raises(TypeError, match=re.escape(said)):
        call()
    with xf.reference_only(), pytest.raises(TypeError, match=re.escape(said)):
        call()


def test_numpys_booleans_are_booleans() -> None:
    y, _ = ops.sdpa(Q, Q, Q, causal=np.True_)
    assert (y == ops.sdpa(Q, Q, Q, causal=True)[0]).all()


def test_settings_of_a_folder_that_is_not_there() -> None:
    for read in (sentences.settings, sentences.rank_settings):
        with pytest.raises(FileNotFoundError, match="there is no folder or file nowhere"):
            read("nowhere")
