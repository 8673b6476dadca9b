"""Integers of NumPy are sizes, seeds and counts as Python's are; bools and fractions are none."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

import xformer
from xformer import backends, ops, optim, training, tree
from xformer.dispatch.checks import require_sizes, whole
from xformer.generation import beam_search, generate, prefill, samplers, speculative
from xformer.layers import (
    AttentionConfig,
    EmbedConfig,
    ExpertsConfig,
    FeedForwardConfig,
    NormConfig,
    RelativeConfig,
)
from xformer.models import Classifier, TokenClassifier, Transformer
from xformer.training import Pairs, Rows, TrainConfig, Windows
from xformer.training.shuffle import permuted

SIZES: dict[str, Any] = {
    "vocab_size": 11, "n_layers": 1, "d_model": 8, "n_heads": 2, "max_len": 100,
}  # fmt: skip
# The smallest: 4 * 100 and 100 + 60 are more than they hold.
KINDS = (np.int8, np.uint8, np.int32, np.int64, np.uint64, lambda n: np.asarray(n, np.int16))


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_is_the_int(kind: Any) -> None:
    assert type(whole(kind(3))) is int and whole(kind(3)) == 3
    assert require_sizes("op", 1, n=kind(100)) == (100,)
    sized = {name: kind(n) for name, n in SIZES.items()}
    assert xformer.GPT(**sized) == xformer.GPT(**SIZES)
    assert repr(xformer.GPT(**sized)) == repr(xformer.GPT(**SIZES))
    for make, options in (
        (AttentionConfig, {"d_model": 8, "n_heads": 2, "n_kv_heads": 1}),
        (
            EmbedConfig,
            {"vocab_size": 11, "width": 8, "d_model": 8, "max_len": 100, "positions": "learned"},
        ),
        (FeedForwardConfig, {"d_ff": 100}),
        (ExpertsConfig, {"n_experts": 4, "top_k": 2, "d_ff": 100}),
        (RelativeConfig, {"n_heads": 2, "n_buckets": 8, "max_distance": 100}),
        (Classifier, {"n_labels": 3}),
        (TokenClassifier, {"n_labels": 3}),
        (TrainConfig, {"steps": 100, "batch_size": 2, "seed": 7, "patience": 3}),
        (optim.Rule, {"min_ndim": 2}),
    ):
        made = make(**{name: n if isinstance(n, str) else kind(n) for name, n in options.items()})
        assert repr(made) == repr(make(**options))
        json.dumps(
            {field.name: getattr(made, field.name, None) for field in dataclasses.fields(made)}
        )
    wide = Transformer(
        **dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), kind(11)),
        d_model=kind(8), n_heads=kind(2), d_ff=kind(100), max_len=kind(9),
        n_encoder_layers=kind(1), n_decoder_layers=kind(1), pad_id=kind(0),
    )  # fmt: skip
    assert type(wide.encoder[0].ffn.d_ff) is int
    params = wide.init(seed=kind(3))
    new, same = (
        generate(wide, params, prefill(wide, params, [[1, 3]], start_id=one), max_new_tokens=n)
        for one, n in ((kind(1), kind(4)), (1, 4))
    )
    assert new == same


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_data(kind: Any) -> None:
    model = xformer.GPT(**SIZES)
    params = model.init(seed=kind(3))
    again = model.init(seed=3)
    for a, b in zip(tree.flatten(params).values(), tree.flatten(again).values(), strict=True):
        assert np.array_equal(a, b)
    prompts, long = [[1, 2, 3]], [list(range(10)) * 6]
    options = {"sampler": samplers.top_k(kind(3)), "seed": kind(5)}
    drawn = generate(model, params, prompts, max_new_tokens=kind(4), **options)
    assert drawn == generate(
        model, params, prompts, max_new_tokens=4, sampler=samplers.top_k(3), seed=5
    )
    with pytest.raises(ValueError, match="holds 100 tokens, and there are 60 of the prompt and 99"):
        generate(model, params, long, max_new_tokens=kind(100))
    assert beam_search(
        model, params, prompts, n_beams=kind(2), max_new_tokens=kind(3)
    ) == beam_search(model, params, prompts, n_beams=2, max_new_tokens=3)
    assert prefill(model, params, long, chunk=kind(50)).width == 60
    guessed = speculative(model, params, model, params, [1, 2], k=kind(2), max_new_tokens=kind(4))
    assert [i for row in guessed for i in row] == generate(
        model, params, [[1, 2]], max_new_tokens=4
    )[0]

    tokens = np.arange(900)
    one, two = (Windows(tokens, n(100), n(2), n(7)) for n in (kind, int))
    assert np.array_equal(one.batch(kind(100)).arrays[0], two.batch(100).arrays[0])
    assert one.fingerprint() == two.fingerprint()
    rows = [
        Rows([(np.arange(3),)] * 5, n(2), lambda examples, rng: examples, n(7)) for n in (kind, int)
    ]
    assert rows[0].fingerprint() == rows[1].fingerprint()
    pairs = [
        Pairs([[1], [2, 3]], [[4], [5]], bos_id=n(0), eos_id=n(1), batch_size=n(2), seed=n(3))
        for n in (kind, int)
    ]
    assert pairs[0].fingerprint() == pairs[1].fingerprint()
    assert np.array_equal(permuted(3, kind(100), seed=kind(5)), permuted(3, 100, seed=5))
    schedule = training.TrainConfig(steps=kind(100), warmup=kind(60)).learning_rate()
    assert schedule(kind(100)) == training.TrainConfig(steps=100, warmup=60).learning_rate()(100)


@pytest.mark.parametrize("kind", [np.int8, np.uint64, np.int32])
def test_keys_and_ignored_targets(kind: Any) -> None:
    x = np.ones((3, 5), np.float32)
    key = xformer.RandomKey(kind(100), kind(3), kind(1))
    assert key == xformer.RandomKey(100, 3, 1) and all(type(part) is int for part in key)
    dropped, _ = ops.dropout(x, rate=0.5, key=key)
    assert np.array_equal(dropped, ops.dropout(x, rate=0.5, key=xformer.RandomKey(100, 3, 1))[0])
    targets = np.array([1, 4, 2])
    loss, _ = ops.cross_entropy(x, targets=targets, ignore_index=kind(4))
    assert loss == ops.cross_entropy(x, targets=targets, ignore_index=4)[0]
    strict = backends.get("array-api-strict")
    y, _ = ops.cross_entropy(
        strict.asarray(x), targets=strict.asarray(targets), ignore_index=kind(4)
    )
    assert np.allclose(strict.to_numpy(y), loss)
    q = np.arange(24, dtype=np.float32).reshape(1, 1, 6, 4)
    near, _ = ops.sdpa(q, q, q, window=(kind(2), None))
    assert np.array_equal(near, ops.sdpa(q, q, q, window=(2, None))[0])
    y, _ = ops.softmax(x, axis=kind(1))
    assert np.array_equal(y, ops.softmax(x)[0])


def test_numbers_of_numpy_are_floats_in_configurations() -> None:
    """JSON, in which a run keeps them, has no float32."""
    config = TrainConfig(steps=3, lr=np.float32(0.5), clip=np.float64(1))
    assert type(config.lr) is float and type(config.clip) in (float, np.float64)
    assert type(NormConfig(eps=np.float32(1e-5)).eps) is float


@pytest.mark.parametrize("bad", [True, False, np.True_, 2.0, np.float32(2), "2", None, [2], b"2"])
def test_what_is_no_integer(bad: Any) -> None:
    assert whole(bad) is None
    for name in SIZES:
        with pytest.raises(ValueError, match=rf"{name} must be an int of at least 1, got"):
            xformer.GPT(**SIZES | {name: bad})
    with pytest.raises(ValueError, match="attention: d_model must be an int of at least 1, got"):
        Transformer(11, 11, bad, 2, 1, 1, 9)
    model = xformer.GPT(**SIZES)
    with pytest.raises(ValueError, match="generator: seed must be an int of at least 0, got"):
        model.init(seed=bad)
    params = model.init()
    for name in ("max_new_tokens", "seed"):
        with pytest.raises(ValueError, match=rf"^generate: {name} must be an int of at least 0"):
            generate(model, params, [[1]], **{"max_new_tokens": 2, name: bad})
    with pytest.raises(ValueError, match="k must be an int of at least 1, got"):
        samplers.top_k(bad)
    with pytest.raises(TypeError, match=r"key\.seed must be an int, got"):
        ops.dropout(np.ones(3), rate=0.5, key=xformer.RandomKey(bad))
    if bad is not None:
        with pytest.raises(TypeError, match="ignore_index must be an int, got"):
            ops.cross_entropy(np.ones((1, 3)), targets=np.array([1]), ignore_index=bad)
    with pytest.raises(TypeError, match="axis must be an integer, got"):
        ops.softmax(np.ones((1, 3)), axis=bad)
