"""A feed-forward network in chunks: the numbers of the whole one, in less memory."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest
from judges import require_close
from libraries import only

from xformer import GPT, backends, inference, ops, tree
from xformer.backends import Backend
from xformer.finetune import lora
from xformer.layers import FeedForwardConfig, FeedForwardParams, feed_forward
from xformer.layers.feed_forward import ChunkedCache, chunked_feed_forward
from xformer.models import LanguageModel

SIZES: dict[str, Any] = {"vocab_size": 32, "d_model": 32, "n_heads": 4, "max_len": 64}


def network(chunk_len: int | None, **options: Any) -> LanguageModel:
    """A GPT whose feed-forward networks run in chunks."""
    model = GPT(n_layers=2, **SIZES | options)
    ffn = dataclasses.replace(model.blocks[0].ffn, chunk_len=chunk_len)
    return dataclasses.replace(model, blocks=(dataclasses.replace(model.blocks[0], ffn=ffn),) * 2)


def example(library: Backend, length: int = 7) -> tuple[Any, FeedForwardParams, Any]:
    """x, params and dy, in float64."""
    rng = library.generator(0, "float64")
    params = FeedForwardConfig(11, gated=True).init(rng, 5)
    params = tree.map(lambda a: a + 0.3 * rng.normal(a.shape), params)
    return rng.normal((2, length, 5)), params, rng.normal((2, length, 5))


@pytest.mark.parametrize("chunk_len", [1, 3, 7, 100])
def test_the_numbers_are_those_of_the_whole(library: Backend, chunk_len: int) -> None:
    x, params, dy = example(library)
    y, cache = chunked_feed_forward(x, params, chunk_len=chunk_len, activation="silu")
    whole, of_whole = feed_forward(x, params, activation="silu")
    got, wanted = (
        {
            name: library.to_numpy(a)
            for name, a in tree.flatten({"y": out, "grads": c.backward(dy)}).items()
        }
        for out, c in ((y, cache), (whole, of_whole))
    )
    require_close(got, wanted, rtol=1e-13)


@only("numpy")
def test_no_tokens(library: Backend) -> None:
    x, params, dy = example(library, length=0)
    y, cache = chunked_feed_forward(x, params, chunk_len=3)
    dx, dparams = cache.backward(dy)
    assert y.shape == dx.shape == (2, 0, 5)
    assert not any(a.any() for a in tree.flatten(dparams).values())


@only("numpy")
def test_only_the_input_is_saved(library: Backend) -> None:
    x, params, _ = example(library)
    _, cache = chunked_feed_forward(x, params, chunk_len=2)
    assert tree.nbytes((params, cache)) - tree.nbytes(params) == x.nbytes
    with inference():
        assert tree.nbytes(chunked_feed_forward(x, params, chunk_len=2)[1]) == 0


def test_the_peak_of_both_passes_falls() -> None:
    """Hidden units of 8 tokens of 512, for a network that is 16 times as wide inside."""
    rng = backends.get("numpy").generator(0, "float32")
    params = FeedForwardConfig(512).init(rng, 32)
    x = rng.normal((2, 512, 32))
    peaks: dict[str, list[int]] = {"whole": [], "chunks": []}
    for name, peak in peaks.items():
        for _ in range(2):  # the second time, kernels have their scratch memory
            tracemalloc.start()
            if name == "whole":
                y, cache = feed_forward(x, params)
            else:
                y, cache = chunked_feed_forward(x, params, chunk_len=8)
            forward = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            cache.backward(y)
            peak[:] = forward, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            del y, cache
    hidden, stream = 2 * 512 * 512 * 4, x.nbytes
    assert peaks["whole"][0] > hidden and peaks["whole"][1] > 2 * hidden
    assert peaks["chunks"][0] < 2.5 * stream + hidden / 16  # y, and its parts
    assert peaks["chunks"][1] < 4 * stream + hidden / 4  # and dx, and the gradients of params


def test_a_model_in_chunks() -> None:
    """The same loss and gradients; each layer saves the input of the network, not hidden units."""
    whole, chunks = network(None), network(16)
    params, tokens = whole.init(1, dtype="float64"), np.arange(128).reshape(2, 64) % 32
    results = []
    for model in (whole, chunks):
        loss, cache = model.loss(params, tokens, tokens)
        size = tree.nbytes((params, cache)) - tree.nbytes(params)
        results.append((float(loss), tree.flatten(cache.backward()), size))
    blocks = cache.model.hidden.stack.blocks
    assert all(isinstance(b.chain.branches[-1].sublayer, ChunkedCache) for b in blocks)
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-13)
    require_close(results[1][1], results[0][1], rtol=1e-12)
    hidden = 2 * 64 * 128 * 8  # B * T * F
    assert results[0][2] - results[1][2] >= 2 * 2 * hidden  # before and after GELU, in two layers


def test_dropout_and_other_options_around_it() -> None:
    """Dropout of the output, reversible blocks and checkpointing: the same bits are dropped."""
    tokens, key = np.arange(128).reshape(2, 64) % 32, ops.RandomKey(3)
    for options in ({"dropout": 0.2}, {"dropout": 0.2, "reversible": True}):
        grads = []
        for model in (network(None, **options), network(10, **options)):
            params = model.init(1, dtype="float64")
            _, cache = model.loss(params, tokens, tokens, dropout_key=key)
            grads.append(tree.flatten(cache.backward()))
        require_close(grads[1], grads[0], rtol=1e-12)


def test_adapters_in_chunks() -> None:
    tokens = np.arange(40).reshape(2, 20) % 32
    params = lora.attach(network(None).init(1, dtype="float64"), rank=2, alpha=4)
    one, other = (
        tree.flatten(model.loss(params, tokens, tokens)[1].backward())
        for model in (network(None), network(6))
    )
    require_close(other, one, rtol=1e-12)
    assert other.keys() == tree.flatten(tree.trained(params)).keys()


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk_len must be an int of at least 1, got 0"):
        FeedForwardConfig(8, chunk_len=0)
    with pytest.raises(ValueError, match=r"^feed_forward: chunk_len excludes dropout"):
        FeedForwardConfig(8, dropout=0.1, chunk_len=4)
    x, params, dy = example(backends.get("numpy"))
    with pytest.raises(ValueError, match="chunk_len must be an int of at least 1, got 0"):
        chunked_feed_forward(x, params, chunk_len=0)
    _, cache = chunked_feed_forward(x, params, chunk_len=4)
    with pytest.raises(ValueError, match=r"^feed_forward: dy must have shape \(2, 7, 5\)"):
        cache.backward(dy[:, :3])
