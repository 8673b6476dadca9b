"""Transformer-XL: segments with a memory against whole texts, their gradients, and decoding."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from block_configs import block_config
from causal_models import lively
from judges import AUTOGRAD, require_close
from libraries import only

import xformer as xf
from xformer import backends, generation, layers, tree
from xformer.backends import Backend
from xformer.layers.positions import distances
from xformer.models import GPT, EncoderDecoder, LanguageModel, SegmentMemory

NUMPY = backends.get("numpy")
V, T = 11, 12
EXACT: Any = {"rtol": 1e-12, "atol": 1e-12}
GPT_SIZES: Any = {"vocab_size": V, "n_layers": 3, "d_model": 12, "n_heads": 3, "max_len": 4}


def model_of(memory_len: int | None = T, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """A network, and random parameters in float64."""
    gpt = GPT(**GPT_SIZES | {"positions": "xl", "memory_len": memory_len} | options)
    return gpt, lively(gpt, seed)


def texts(library: Backend = NUMPY, n: int = T) -> tuple[Any, Any]:
    """Tokens and targets, (2, n)."""
    ids = np.random.default_rng(0).integers(0, V, (2, n + 1))
    return library.asarray(ids[:, :-1]), library.asarray(ids[:, 1:])


def in_segments(model: LanguageModel, params: Any, tokens: Any, sizes: list[int]) -> Any:
    """The logits of all segments, (2, T, V), on the host, and the last memory."""
    memory, start, logits = model.init_memory(params, 2), 0, []
    for size in sizes:
        y, _, memory = model.segment(params, tokens[:, start : start + size], memory)
        logits.append(np.asarray(backends.backend_of(y).to_numpy(y)))
        start += size
    return np.concatenate(logits, axis=1), memory


# ---- Segments and the whole text ----


@pytest.mark.parametrize("sizes", [[4, 4, 4], [1] * T, [5, 2, 5], [12]])
def test_segments_are_the_whole_text(library: Backend, sizes: list[int]) -> None:
    model, params = model_of()
    params, tokens = tree.map(library.asarray, params), texts(library)[0]
    whole, _ = model.forward(params, tokens)
    got, memory = in_segments(model, params, tokens, sizes)
    np.testing.assert_allclose(got, library.to_numpy(whole), **EXACT)
    assert (memory.length, memory.inputs[0].shape) == (T, (2, T, 12))


@pytest.mark.parametrize(
    "options",
    [
        {"norm_placement": "post"},
        {"norm_placement": "sandwich"},
        {"n_kv_heads": 1, "bias": False},
        {"activation_checkpointing": True, "tied": False},
    ],
)
def test_segments_of_other_models(options: dict[str, Any]) -> None:
    model, params = model_of(**options)
    whole, _ = model.forward(params, texts()[0])
    got, _ = in_segments(model, params, texts()[0], [5, 4, 3])
    np.testing.assert_allclose(got, whole, **EXACT)


@pytest.mark.parametrize("memory_len", [0, 1, 3, 7])
@pytest.mark.parametrize("sizes", [[4, 4, 4], [2, 5, 5], [1] * T])
def test_a_short_memory_is_a_mask_of_the_whole_text(memory_len: int, sizes: list[int]) -> None:
    """Position i attends to memory_len positions before its segment, and to its segment."""
    model, params = model_of(memory_len)
    tokens, _ = texts()
    start = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)  # of the segment of each position
    mask = np.arange(T) >= (start - memory_len)[:, None]
    (x, _), _ = layers.embed(params.embed, ids=tokens, config=model.embed)
    x, _ = layers.stack(
        x, params.stack, configs=model.blocks, context=layers.Context(mask=mask, causal=True)
    )
    wanted, _ = layers.linear(x, layers.LinearParams(params.embed.table.T, None))
    got, memory = in_segments(model, params, tokens, sizes)
    np.testing.assert_allclose(got, wanted, **EXACT)
    assert memory.length == memory_len


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_memory_keeps_no_longer_array(size: int) -> None:
    """The arrays of a full memory are not slices of arrays with the segment."""
    model, params = model_of(3)
    _, memory = in_segments(model, params, texts()[0], [size, size])
    for x in memory.inputs:
        assert x.base is None and x.nbytes == 2 * 3 * 12 * 8


def test_the_memory_matters_and_may_be_longer_than_in_training() -> None:
    model, params = model_of(2)
    logits = {}
    for m in (0, 2, 8, T):
        longer = dataclasses.replace(model, memory_len=m)
        logits[m], _ = in_segments(longer, params, texts()[0], [4, 4, 4])
    for a, b in ((0, 2), (2, 8)):
        assert np.array_equal(logits[a][:, :4], logits[b][:, :4])
        assert (abs(logits[a] - logits[b]).max(axis=2)[:, 4:] > 1e-4).all()
    np.testing.assert_allclose(logits[8], logits[T], **EXACT)  # all earlier positions


def test_the_layer_projects_the_distances() -> None:
    """r is the projection of sin and cos of S - 1, ..., 0."""
    p = distances(5, 6, like=np.ones(1))
    for c, distance in enumerate((4, 3, 2, 1, 0)):
        angles = distance / 10000.0 ** (np.arange(0, 6, 2) / 6)
        np.testing.assert_allclose(p[c, 0::2], np.sin(angles), atol=1e-15)
        np.testing.assert_allclose(p[c, 1::2], np.cos(angles), atol=1e-15)
    assert [distances(n, 6, like=p).shape for n in (0, 1, 2, 9)] == [(n, 6) for n in (0, 1, 2, 9)]
    attn = layers.AttentionConfig(6, 2, n_kv_heads=1, xl=True)
    params = attn.init(NUMPY.generator(0, "float64"), layers.NormConfig())
    assert params.xl.r.w.shape == (6, 3) and params.xl.r.b is None
    assert not params.xl.content_bias.any() and params.xl.position_bias.shape == (6,)
    _, cache = layers.attention(
        np.ones((2, 5, 6)),
        params,
        config=layers.AttentionConfig((np.ones((2, 5, 6))).shape[-1], 2, 1),
        context=layers.Context(causal=True),
    )
    np.testing.assert_allclose(cache.core.r[0], p @ params.xl.r.w, **EXACT)


# ---- Gradients ----


def test_no_gradient_flows_into_the_memory() -> None:
    """torch's autograd of two segments: by hand is what it gives for a detached memory."""
    torch = pytest.importorskip("torch")
    model, params = model_of(3)
    tokens, targets = texts(n=8)
    memory = model.init_memory(params, 2)
    _, _, memory = model.segment_loss(params, tokens[:, :4], targets[:, :4], memory)
    _, cache, _ = model.segment_loss(params, tokens[:, 4:], targets[:, 4:], memory)
    by_hand = tree.flatten(cache.backward())

    def by_autograd(detach: bool) -> dict[str, np.ndarray]:
        leaves = tree.map(lambda a: torch.tensor(a, requires_grad=True), params)
        parts = [torch.tensor(a) for a in (tokens, targets)]
        memory = model.init_memory(leaves, 2)
        _, _, memory = model.segment_loss(leaves, *(a[:, :4] for a in parts), memory)
        if detach:
            memory = tree.map(lambda a: a if isinstance(a, int) else a.detach(), memory)
        loss, _, _ = model.segment_loss(leaves, *(a[:, 4:] for a in parts), memory)
        named = tree.flatten(leaves)
        grads = torch.autograd.grad(loss, list(named.values()))
        return {name: g.numpy() for name, g in zip(named, grads, strict=True)}

    require_close(by_hand, by_autograd(detach=True), AUTOGRAD)
    through = by_autograd(detach=False)
    name = "stack.blocks.0.ffn.up.w"
    assert abs(through[name] - by_hand[name]).max() > 1e-4 * abs(by_hand[name]).max()


def test_frozen_positions_have_no_gradient() -> None:
    model, params = model_of(3)
    tokens, targets = texts(n=4)
    loss, cache = model.loss(params, tokens, targets)
    wanted = cache.backward()
    for name in ("r.w", "content_bias", "position_bias"):
        some = tree.freeze(params, f"*.xl.{name}")
        again, cache = model.loss(some, tokens, targets)
        grads = tree.flatten(cache.backward())
        assert again == loss
        rest = {n: g for n, g in tree.flatten(wanted).items() if not n.endswith(f".xl.{name}")}
        assert grads.keys() == rest.keys()
        require_close(grads, rest, AUTOGRAD)


def test_memory_within_inference() -> None:
    model, params = model_of(6)
    wanted = in_segments(model, params, texts()[0], [4, 4, 4])
    with xf.inference():
        got = in_segments(model, params, texts()[0], [4, 4, 4])
    for a, b in zip(tree.flatten(wanted).values(), tree.flatten(got).values(), strict=True):
        assert np.array_equal(a, b)


@only("jax")
def test_segments_under_jit(library: Backend) -> None:
    import jax

    model, params = model_of(6)
    params, tokens = tree.map(library.asarray, params), texts(library)[0]
    wanted, last = in_segments(model, params, tokens, [4, 4, 4])

    def step(params: Any, tokens: Any, inputs: Any, length: int) -> Any:
        y, _, memory = model.segment(params, tokens, SegmentMemory(inputs, length))
        return y, memory.inputs

    jitted = jax.jit(step, static_argnums=3)
    inputs, length, logits = model.init_memory(params, 2).inputs, 0, []
    for i in range(3):
        y, inputs = jitted(params, tokens[:, 4 * i : 4 * i + 4], inputs, length)
        length = min(length + 4, 6)
        logits.append(library.to_numpy(y))
    np.testing.assert_allclose(np.concatenate(logits, axis=1), wanted, rtol=1e-9, atol=1e-9)
    for a, b in zip(inputs, last.inputs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


# ---- Decoding ----


@pytest.mark.parametrize("memory_len", [None, T])
def test_decoding_is_the_whole_text(library: Backend, memory_len: int | None) -> None:
    model, params = model_of(memory_len)
    params, tokens = tree.map(library.asarray, params), texts(library)[0]
    whole, _ = model.forward(params, tokens)
    state = model.init_state()
    logits, state = model.decode(params, tokens[:, :5], state, all_logits=True)
    parts = [library.to_numpy(logits)]
    for i in range(5, T):
        y, state = model.decode(params, tokens[:, i : i + 1], state)
        parts.append(library.to_numpy(y)[:, None, :])
    np.testing.assert_allclose(np.concatenate(parts, axis=1), library.to_numpy(whole), **EXACT)


@pytest.mark.parametrize("memory_len", [0, 1, 5])
def test_decoding_after_a_short_memory_is_that_of_segments(memory_len: int) -> None:
    """The KV cache keeps as many tokens as the memory: each call is a segment."""
    model, params = model_of(memory_len)
    sizes = [4, 1, 1, 1, 3, 1, 1]
    wanted, _ = in_segments(model, params, texts()[0], sizes)
    state, start, parts = model.init_state(), 0, []
    for size in sizes:
        tokens = texts()[0][:, start : start + size]
        y, state = model.decode(params, tokens, state, all_logits=True)
        parts.append(y)
        start += size
    np.testing.assert_allclose(np.concatenate(parts, axis=1), wanted, **EXACT)
    assert (state.length, state.kv_cache[0].length) == (T, memory_len + 1)


def test_padding_on_the_left() -> None:
    """Each row is what it would be alone, also after a short memory."""
    for memory_len in (None, 3):
        model, params = model_of(memory_len)
        tokens, keep = texts()[0], np.ones((2, T), bool)
        keep[1, :2] = False
        state, alone = model.init_state(), model.init_state()
        for start, end in ((0, 5), (5, 6), (6, 9), (9, T)):
            part, mask = tokens[:, start:end], keep[:, start:end]
            y, state = model.decode(params, part, state, mask=mask, all_logits=True)
            row, alone = model.decode(params, part[1:, 2 - min(start, 2) :], alone, all_logits=True)
            np.testing.assert_allclose(y[1:, -row.shape[1] :], row, **EXACT)


def test_truncate() -> None:
    model, params = model_of(3)
    tokens, _ = texts()
    _, state = model.decode(params, tokens[:, :6], model.init_state())
    _, longer = model.decode(params, tokens[:, 6:8], state)
    wanted, _ = model.decode(params, tokens[:, 8:9], state)
    got, _ = model.decode(params, tokens[:, 8:9], model.truncate(longer, 2))
    np.testing.assert_allclose(got, wanted, **EXACT)
    with pytest.raises(ValueError, match=r"truncate: without the last 5 tokens 3 earlier keys"):
        model.truncate(longer, 5)


def test_generating_a_text_longer_than_max_len() -> None:
    """max_len = 4 does not limit it. The numbers are those of forward for the whole text."""
    model, params = model_of(None)
    ids = generation.generate(model, params, [[1, 2, 3]], max_new_tokens=9)[0]
    text = [1, 2, 3]
    for _ in range(9):
        logits, _ = model.forward(params, np.asarray([text]))
        text.append(int(logits[0, -1].argmax()))
    assert text[3:] == ids
    with pytest.warns(RuntimeWarning, match=r"Transformer-XL's relative positions depend on the"):
        generation.generate(model, params, [[1]], max_new_tokens=2, compiled=True)
    prefix = generation.prefill(model, params, [[1, 2]])
    with pytest.raises(ValueError, match="its layers depend on distances between tokens"):
        generation.prefill(model, params, [[3, 4], [5]], after=prefix)


# ---- Bad input ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": (2, 0)}, "attention: xl excludes window"),
        ({"sinks": True, "softcap": 2.0}, "attention: xl excludes sinks, softcap"),
        ({"shaw_max_distance": 0}, "attention: xl excludes shaw_max_distance"),
    ],
)
def test_bad_attention_configs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layers.AttentionConfig(8, 2, xl=True, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": False}, "attn.xl needs causal attention"),
        ({"rotary": layers.RopeConfig(4)}, "attn.xl excludes rotary"),
        ({"alibi": True}, "attn.xl excludes alibi"),
        ({"relative_bias": layers.RelativeConfig(3)}, "attn.xl excludes relative_bias"),
        (
            {"embed": layers.EmbedConfig(V, 12, 12, max_len=9)},
            "attn.xl excludes positions in the embedding",
        ),
        ({"memory_len": -1}, "memory_len must be an int of at least 0, got -1"),
        ({"memory_len": 2.0}, "memory_len must be an int of at least 0, got 2.0"),
    ],
)
def test_bad_models(options: dict[str, Any], message: str) -> None:
    network, _ = model_of()
    with pytest.raises(ValueError, match=f"^LanguageModel: {re.escape(message)}$"):
        dataclasses.replace(network, **options)


def test_bad_gpts() -> None:
    message = "^LanguageModel: memory_len needs attn.xl in all blocks$"
    with pytest.raises(ValueError, match=message):
        GPT(**GPT_SIZES, memory_len=4)
    with pytest.raises(ValueError, match=r"^GPT: positions .xl. need position_mode .*, got .qkv.$"):
        GPT(**GPT_SIZES, positions="xl", position_mode="qkv")


def test_bad_attention_calls() -> None:
    attn = layers.AttentionConfig(6, 2, xl=True)
    params = attn.init(NUMPY.generator(0, "float64"), layers.NormConfig())
    x, plain_attn = np.ones((2, 4, 6)), layers.AttentionConfig(6, 2, window=(1, 0), softcap=2.0)

    def refused(
        message: str, *side: Any, params: Any = params, config: Any = attn, **context: Any
    ) -> None:
        called = layers.Context(**{"causal": True} | context)
        with pytest.raises(ValueError, match=f"^attention: {re.escape(message)}$"):
            layers.attention(x, params, layers.SideInputs(*side), config=config, context=called)

    refused("params.xl needs causal self-attention, got causal = False", causal=False)
    refused("params.xl needs causal self-attention, got a memory", x)
    refused("params.xl excludes window, softcap", config=plain_attn)
    refused("params.xl excludes bias", None, np.ones((4, 4)))
    refused("params.xl excludes pos", None, None, np.ones((4, 3)))
    tables = layers.rope_tables(layers.RopeConfig(2), like=x, length=4)
    refused("params.xl excludes rotary", rotary=tables)
    shape = "segment_memory must be (B, N, D) with B = 2, D = 6 (from x), got shape"
    refused(f"{shape} (2, 3, 5)", segment_memory=np.ones((2, 3, 5)))
    refused(f"{shape} (1, 3, 6)", segment_memory=np.ones((1, 3, 6)))
    refused(f"{shape} (3, 6)", segment_memory=np.ones((3, 6)))
    both = {"segment_memory": x, "kv_cache": layers.KVCache()}
    refused("segment_memory and kv_cache exclude each other, got both", **both)
    plain = params._replace(xl=None)
    refused("segment_memory needs params.xl, got None", params=plain, segment_memory=x)
    with pytest.raises(
        TypeError, match=r"^attention: segment_memory must be float64, got float32$"
    ):
        context = layers.Context(causal=True, segment_memory=x.astype("float32"))
        layers.attention(x, params, config=attn, context=context)


def test_bad_segments() -> None:
    model, params = model_of(3)
    tokens, targets = texts(n=4)
    memory = model.init_memory(params, 2)
    unlimited, _ = model_of(None)
    with pytest.raises(ValueError, match=r"^init_memory: the model must have a memory_len, got N"):
        unlimited.init_memory(params, 2)
    with pytest.raises(ValueError, match=r"^segment: the model must have a memory_len, got None$"):
        unlimited.segment(params, tokens, memory)
    with pytest.raises(ValueError, match=r"^init_memory: batch_size must be an int of at least 0"):
        model.init_memory(params, -1)
    fewer = memory._replace(inputs=memory.inputs[:2])
    with pytest.raises(ValueError, match=r"^segment: memory must be of 3 layers, got 2$"):
        model.segment(params, tokens, fewer)
    longer = dataclasses.replace(model, memory_len=5)
    for capacity, other in ((3, longer), (5, model)):
        message = f"segment: memory must have memory_len = {other.memory_len} positions, got "
        with pytest.raises(ValueError, match=f"^{message}{capacity}; init_memory returns an empty"):
            other.segment(params, tokens, {3: model, 5: longer}[capacity].init_memory(params, 2))
    with pytest.raises(ValueError, match=r"^blocks: segment_memory must have an array for each of"):
        layers.blocks(
            np.ones((2, 4, 12)),
            params.stack.blocks,
            configs=model.blocks,
            context=layers.Context(causal=True, segment_memory=fewer.inputs),
        )
    with pytest.raises(ValueError, match=r"^attention: segment_memory must be .* B = 1, D = 12"):
        model.segment_loss(params, tokens[:1], targets[:1], memory)
    _, state = model.decode(params, tokens, model.init_state())
    with pytest.raises(ValueError, match=r"a static KV cache needs no params\.xl, which depends"):
        model.decode(params, tokens[:, :1], state.preallocate(9))


def test_pieces_of_a_text_are_refused() -> None:
    """The logits would depend on where a piece ends."""
    model, params = model_of(3)
    prompt = [[1, 2, 3, 4]]
    message = "a model with memory_len must read a text in one piece, got memory_len = 3"
    with pytest.raises(ValueError, match=f"prefill in pieces: {message}"):
        generation.prefill(model, params, prompt, chunk=2)
    prefix = generation.prefill(model, params, prompt)
    with pytest.raises(ValueError, match=f"prefill in pieces: {message}"):
        generation.prefill(model, params, prompt, after=prefix)
    with pytest.raises(ValueError, match=f"speculative: {message}"):
        generation.speculative(model, params, model, params, [1], k=2, max_new_tokens=3)


def test_biases_are_vectors() -> None:
    """So weight decay and Muon, which are for matrices, leave them alone."""
    _, params = model_of(3)
    biases = [leaf for name, leaf in tree.flatten(params).items() if name.endswith("_bias")]
    assert {leaf.ndim for leaf in biases} == {1}
    assert len(biases) == 2 * len(params.stack.blocks)


def test_layers_with_and_without_are_refused_together() -> None:
    xl, plain = (block_config(8, 2, 16, xl=has) for has in (True, False))
    embed = layers.EmbedConfig(11, 8, 8, positions="none")
    with pytest.raises(ValueError, match=r"attn\.xl must be that of all blocks, or of none"):
        LanguageModel(embed, (xl, plain))
    with pytest.raises(ValueError, match=r"EncoderDecoder: attn\.xl is for decoder-only models"):
        EncoderDecoder((plain,), (xl,))


def test_saved_bytes_are_those_of_the_distances() -> None:
    """Not of the larger table that they are taken from."""
    p = distances(37, 8, like=np.ones(1))
    assert (p.base is None or p.base.shape == (37, 8)) and p.shape == (37, 8)
