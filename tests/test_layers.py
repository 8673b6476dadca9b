"""What the layers promise beyond their gradients, which test_gradients.py checks."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from block_configs import block_config

from xformer import RandomKey, backends, layers, ops, reference_only, tree
from xformer.backends import Backend
from xformer.layers.residual import Branch, residuals
from xformer.models import EncoderDecoder, LanguageModel


def test_causal_blocks_do_not_look_ahead(library: Backend) -> None:
    rng = library.generator(0, "float64")
    config = block_config(d_model=6, n_heads=2, d_ff=11)
    params = layers.StackParams.init(rng, (config,) * 2)
    host = np.array(library.to_numpy(rng.normal((2, 5, 6))))
    before, _ = layers.stack(
        library.asarray(host), params, configs=(config,) * 2, context=layers.Context(causal=True)
    )
    host[:, 3] += 1
    after, _ = layers.stack(
        library.asarray(host), params, configs=(config,) * 2, context=layers.Context(causal=True)
    )
    before, after = library.to_numpy(before), library.to_numpy(after)
    assert np.array_equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any(axis=(0, 2)).all()


def test_heads_attend_for_themselves(library: Backend) -> None:
    """Head by head in NumPy, without reshapes: what attention is, written plainly."""
    rng = library.generator(0, "float64")
    x, memory = rng.normal((2, 5, 6)), rng.normal((2, 7, 13))
    w_q, w_k, w_v = rng.normal((6, 12)), rng.normal((13, 6)), rng.normal((13, 4))  # K = 3, M = 2
    linear = layers.LinearParams
    kv = layers.KeyValueParams(linear(w_k, None), linear(w_v, None))
    params = layers.AttentionParams(linear(w_q, None), kv, None)
    config = layers.AttentionConfig(6, 4, 2, d_head=3, d_value=2)
    y, _ = layers.attention(x, params, layers.SideInputs(memory), config=config)
    x, memory, w_q, w_k, w_v, y = map(library.to_numpy, (x, memory, w_q, w_k, w_v, y))
    for b in range(2):
        for h in range(4):
            g = h // 2  # two query heads share one of keys and values
            q, k = x[b] @ w_q[:, 3 * h : 3 * h + 3], memory[b] @ w_k[:, 3 * g : 3 * g + 3]
            e = np.exp(q @ k.T / 3**0.5)
            wanted = e / e.sum(axis=1, keepdims=True) @ memory[b] @ w_v[:, 2 * g : 2 * g + 2]
            assert np.allclose(y[b, :, 2 * h : 2 * h + 2], wanted, rtol=1e-12, atol=1e-14)


EXPERTS = layers.ExpertsConfig(n_experts=3, top_k=2, d_ff=11)
OPTIONS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm_placement": "post"},
    "bare": {"attn_norm": False, "output": "bias"},
    "parallel": {"parallel": True},
    "experts": {"experts": EXPERTS},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_sequence_is_a_batch_of_one(library: Backend, name: str) -> None:
    """With the same numbers and gradients, and an axis less."""
    rng = library.generator(0, "float64")
    config = block_config(d_model=6, n_heads=2, d_ff=11, dropout=0.3, **OPTIONS[name])
    cross = name != "parallel"
    params = config.init(rng, cross=cross)
    x, dy = rng.normal((5, 6)), rng.normal((5, 6))
    memory = rng.normal((7, 6)) if cross else None
    context = layers.Context(causal=True, dropout_key=RandomKey(3))
    options: Any = {"config": config, "context": context}
    one, one_cache = layers.block(x, params, layers.SideInputs(memory), **options)
    batch = None if memory is None else memory[None, ...]
    many, many_cache = layers.block(x[None, ...], params, layers.SideInputs(batch), **options)
    got = one_cache.backward(dy)
    wanted = many_cache.backward(dy[None, ...])
    assert one.shape == got[0].shape == (5, 6)
    pairs = (one, got[0], got[2].memory), (many, wanted[0], wanted[2].memory)
    for a, b in zip(*pairs, strict=True):
        if a is not None:
            assert np.array_equal(library.to_numpy(a), library.to_numpy(b)[0])
    for name, grad in tree.flatten(got[1]).items():
        other = tree.flatten(wanted[1])[name]
        assert np.array_equal(library.to_numpy(grad), library.to_numpy(other)), name


def test_dropout_of_a_block_draws_six_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the probabilities of both attentions, the hidden units, and what each sublayer adds."""
    attn = layers.AttentionConfig(6, 2, dropout=0.3)
    ffn = layers.FeedForwardConfig(11, dropout=0.3)
    config = layers.BlockConfig(attn, ffn, dropout=0.3)
    rng = backends.get("numpy").generator(0, "float64")
    params, x = config.init(rng, cross=True), rng.normal((2, 5, 6))
    drawn: list[Any] = []

    def spied(run: Any, option: str) -> Any:
        def spy(*args: Any, **options: Any) -> Any:
            drawn.append(options[option])
            return run(*args, **options)

        return spy

    monkeypatch.setattr(ops, "dropout", spied(ops.dropout, "key"))
    monkeypatch.setattr(ops, "sdpa", spied(ops.sdpa, "dropout_key"))
    context = layers.Context(dropout_key=RandomKey(3))
    layers.block(x, params, layers.SideInputs(x), config=config, context=context)
    assert len(drawn) == len(set(drawn)) == 6


def test_models_of_vectors_take_batches(library: Backend) -> None:
    rng = library.generator(0, "float64")
    blocks = (block_config(d_model=6, n_heads=2, d_ff=11),)
    x = rng.normal((5, 6))
    model = LanguageModel(None, blocks, head=None)
    message = r"must be \(B, T, D\), got shape \(5, 6\)$"
    with pytest.raises(ValueError, match=rf"^LanguageModel: tokens {message}"):
        model.forward(model.init_from(rng), x)
    pair = EncoderDecoder(blocks, blocks)
    params = pair.init_from(rng)
    with pytest.raises(ValueError, match=rf"^EncoderDecoder: src {message}"):
        pair.encode(params, x)
    with pytest.raises(ValueError, match=rf"^EncoderDecoder: tgt {message}"):
        pair.decode_target(params, x[None, ...], None, x)


def test_with_a_past_nothing_is_kept(library: Backend) -> None:
    rng = library.generator(0, "float64")
    config = block_config(d_model=6, n_heads=2, d_ff=11)
    params = layers.StackParams.init(rng, (config,) * 2).blocks
    x, kv_cache = rng.normal((2, 5, 6)), (layers.KVCache(),) * 2
    y, cache = layers.blocks(
        x, params, configs=(config,) * 2, context=layers.Context(kv_cache=kv_cache)
    )
    assert [own.length for own in cache.kv_cache] == [5, 5] and not cache.blocks
    with pytest.raises(
        ValueError, match=r"^blocks: with a KV cache nothing is saved for a backward$"
    ):
        cache.backward(y)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_memories_are_as_many_as_layers(library: Backend, n: int) -> None:
    """One for all of them apart."""
    rng = library.generator(0, "float64")
    configs = (block_config(d_model=6, n_heads=2, d_ff=11),) * 2
    params = layers.StackParams.init(rng, configs, cross=True, shared_memory=True).blocks
    kv = layers.KeyValue(rng.normal((2, 2, 7, 3)), rng.normal((2, 2, 7, 3)))
    x = rng.normal((2, 5, 6))
    with pytest.raises(ValueError, match=rf"^blocks: memory must be one .* each of 2, got {n}$"):
        layers.blocks(x, params, layers.SideInputs([kv] * n), configs=configs)
    one, _ = layers.blocks(x, params, layers.SideInputs(kv), configs=configs)
    two, _ = layers.blocks(x, params, layers.SideInputs([kv] * 2), configs=configs)
    assert np.array_equal(library.to_numpy(one), library.to_numpy(two))


def test_the_gradient_of_a_sum_has_its_shape(library: Backend) -> None:
    rng = library.generator(0, "float64")
    x, params = rng.normal((4, 6)), layers.NormParams(rng.normal((6,)), None)
    with reference_only():
        _, cache = layers.add_norm(x, x, params, config=layers.NormConfig())
        for ds in (x[:3, :], x[:, :1]):
            with pytest.raises(ValueError, match=r"^add_norm: ds must have shape \(4, 6\), got"):
                cache.backward(ds, x)
        with pytest.raises(TypeError, match=r"^add_norm: ds must be "):
            cache.backward(library.asarray(np.ones((4, 6), np.float32)), x)


def test_the_gradient_of_a_sublayers_input_is_let_go() -> None:
    """Before the backward of the sublayer before it runs."""
    last: list[Any] = []
    gone: list[bool] = []

    class Cache:
        def backward(self, dy: Any) -> Any:
            gone.extend(ref() is None for ref in last)
            dx = 2 * dy
            last[:] = [weakref.ref(dx)]
            return (dx,)

    branch = Branch(lambda x: (x, Cache()), None)
    _, cache = residuals(np.ones(3), [branch] * 3)
    dx, _ = cache.backward(np.ones(3))
    assert gone == [True, True] and dx.tolist() == [27.0] * 3
