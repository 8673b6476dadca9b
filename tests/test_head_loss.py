"""The loss of models of a large vocabulary: by the kernel, as by two ops one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from block_configs import block_config

from xformer import GPT, Transformer, backends, ops, reference_only, tree
from xformer.backends.numpy.linear_cross_entropy import LARGE, NumpyLinearCrossEntropyCache
from xformer.finetune import lora
from xformer.layers import EmbedConfig
from xformer.models import EncoderDecoder, LanguageModel, LMHead, MaskedLMHead
from xformer.models.loss import LogitsLossCache
from xformer.proofs.catalogue.case import random

V = LARGE + 3
BLOCK = (block_config(8, 2, 12),)
EMBED = EmbedConfig(V, 8, 8, positions="none")
RNG = np.random.default_rng(0)
TOKENS, TARGETS = RNG.integers(1, V, (2, 3, 5))
TARGETS[0, 3:] = -1
OPTIONS = {"ignore_index": -1, "label_smoothing": 0.1, "z_loss": 0.01}


def language_model(head: Any, **options: Any) -> LanguageModel:
    return LanguageModel(EMBED, BLOCK, head=head, **options)


MODELS: dict[str, Any] = {
    "tied": language_model(LMHead()),
    "untied, bias": language_model(LMHead(tied=False, bias=True)),
    "scale": language_model(LMHead(scale=0.3)),
    "masked LM": language_model(MaskedLMHead(), causal=False),
    "masked LM, untied": language_model(MaskedLMHead(tied=False), causal=False),
    "GPT": GPT(V, 1, 8, 2, 5),
    "T5": EncoderDecoder(BLOCK, BLOCK, EMBED, shared_embed=True, head=LMHead(scale=0.3)),
    "Transformer": Transformer(V, V, 8, 2, 1, 1, 5),
}


def examples(model: Any, tokens: Any = TOKENS, targets: Any = TARGETS) -> tuple[Any, ...]:
    if getattr(model, "pad_id", None) is not None:
        return tokens, tokens, np.maximum(targets, 0)
    return (tokens, tokens, targets) if isinstance(model, EncoderDecoder) else (tokens, targets)


def drawn(model: Any) -> Any:
    return random(backends.get("numpy").generator(3, "float64"), model.init())


def head_of(cache: Any) -> Any:
    """What the head's loss keeps."""
    return getattr(cache.model, "decode", cache.model).head


def require_same(model: Any, params: Any, options: dict[str, Any], kind: Any) -> Any:
    """Loss and gradients are those of the reference, and of the logits; the cache is of a kind."""
    own = {k: v for k, v in options.items() if k != "ignore_index"}
    options = options if getattr(model, "pad_id", None) is None else own
    given = examples(model)
    loss, cache = model.loss(params, *given, **options)
    top = getattr(head_of(cache), "top", head_of(cache))
    assert isinstance(getattr(top, "op", top), kind)
    grads = cache.backward()
    with reference_only():
        wanted, judge = model.loss(params, *given, **options)
        wanted_grads = tree.flatten(judge.backward())
    assert loss == pytest.approx(wanted, rel=1e-12)
    got = tree.flatten(grads)
    assert got.keys() == wanted_grads.keys()
    for name, grad in got.items():
        scale = np.max(np.abs(wanted_grads[name]))
        np.testing.assert_allclose(grad, wanted_grads[name], rtol=0, atol=1e-12 + 1e-11 * scale)
    return grads


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [OPTIONS, {"ignore_index": -1, "reduction": "sum"}])
def test_same_loss_and_gradients(name: str, options: dict[str, Any]) -> None:
    model = MODELS[name]
    require_same(model, drawn(model), options, NumpyLinearCrossEntropyCache)


@pytest.mark.parametrize("name", ["tied", "masked LM", "T5"])
def test_it_is_the_cross_entropy_of_the_logits(name: str) -> None:
    model = MODELS[name]
    params = drawn(model)
    *given, targets = examples(model)
    logits, _ = model.forward(params, *given)
    for reduction in ("mean", "sum", "none"):
        wanted, _ = ops.cross_entropy(logits, targets=targets, reduction=reduction, **OPTIONS)
        loss, _ = model.loss(params, *given, targets, reduction=reduction, **OPTIONS)
        np.testing.assert_allclose(loss, wanted, rtol=1e-12)


def test_a_gradient_that_is_not_one() -> None:
    model = MODELS["tied"]
    params = drawn(model)
    _, cache = model.loss(params, *examples(model), **OPTIONS)
    whole, half = (tree.flatten(cache.backward(np.full((), d))) for d in (1.0, 0.5))
    for name, grad in whole.items():
        np.testing.assert_allclose(half[name], grad / 2, rtol=1e-12, atol=1e-15)


def test_a_softcap_stands_between() -> None:
    model = language_model(LMHead(softcap=2.0))
    require_same(model, drawn(model), OPTIONS, LogitsLossCache)


def test_an_adapter_of_the_head() -> None:
    model = MODELS["untied, bias"]
    params = lora.attach(drawn(model), 2, 4.0, ("head",))
    params = tree.map(lambda a: a + 0.1, params)  # also what begins as zero
    grads = require_same(model, params, OPTIONS, LogitsLossCache)
    assert grads.head.base.w is None and grads.head.a is not None


def test_frozen_heads() -> None:
    model = MODELS["untied, bias"]
    for frozen, dw, db in (("head.w", None, True), ("head.b", True, None), ("head*", None, None)):
        params = tree.freeze(drawn(model), frozen)
        grads = require_same(model, params, OPTIONS, NumpyLinearCrossEntropyCache)
        assert (grads.head.w is None, grads.head.b is None) == (dw is None, db is None)
    tied = MODELS["tied"]
    params = tree.freeze(drawn(tied), "embed.table")
    grads = require_same(tied, params, OPTIONS, NumpyLinearCrossEntropyCache)
    assert grads.embed.table is None
    _, cache = tied.loss(params, *examples(tied), **OPTIONS)
    assert head_of(cache).top.op.dw is None  # nor made for nothing
