"""What a model keeps and computes, against real forwards, to the byte and the product."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from block_configs import block_config

from xformer import dispatch, ops, tree
from xformer.backends.numpy.stand_in import Tally, is_stand_in, stand_in
from xformer.inspection.measure import attention_flops, key_values, measured, pairs
from xformer.layers import (
    BlockConfig,
    EmbedConfig,
    ExpertsConfig,
    NormConfig,
    RelativeConfig,
    RopeConfig,
)
from xformer.models import (
    GPT,
    Classifier,
    Discriminator,
    EncoderDecoder,
    LanguageModel,
    LMHead,
    MaskedLMHead,
    Pooler,
    TokenClassifier,
    Transformer,
)
from xformer.ops import RandomKey
from xformer.ops._attention import forbid


def blocks(n: int = 2, **options: Any) -> tuple[BlockConfig, ...]:
    return (block_config(**{"d_model": 12, "n_heads": 4, "d_ff": 17} | options),) * n


def embed(width: int = 12, **options: Any) -> EmbedConfig:
    return EmbedConfig(**{"vocab_size": 19, "width": width, "d_model": 12, "max_len": 64} | options)


LLAMA: dict[str, Any] = {
    "norm": "rms",
    "bias": False,
    "gated": True,
    "activation": "silu",
    "n_kv_heads": 2,
    "d_head": 4,
}
PLAIN = embed(positions="none", max_len=None)
TURNED: dict[str, Any] = {"rotary": RopeConfig(4), "head": LMHead(tied=False)}
BERT: dict[str, Any] = {
    "embed": embed(positions="learned", norm=NormConfig(), n_types=3, dropout=0.1),
    "blocks": blocks(norm_placement="post", activation="gelu", dropout=0.1),
    "causal": False,
}
EXPERTS = ExpertsConfig(n_experts=5, top_k=2, d_ff=11)
T5 = blocks(norm="rms", bias=False, scale=1.0, dropout=0.1, hidden_dropout=0.1)
RELATIVE = RelativeConfig(4, n_buckets=8, max_distance=6)

MODELS = {
    "GPT": GPT(vocab_size=19, n_layers=2, d_model=12, n_heads=4, max_len=64, dropout=0.1),
    "GPT, large vocabulary": GPT(5003, 1, 12, 4, 64),
    "GPT, untied, post-norm": GPT(
        19, 1, 12, 4, 64, tied=False, norm_placement="post", position_mode="qkv"
    ),
    "Llama, windows": LanguageModel(
        PLAIN, blocks(1, **LLAMA) + blocks(1, window=(3, None), **LLAMA), **TURNED
    ),
    "Gemma 2": LanguageModel(
        PLAIN,
        blocks(norm_placement="sandwich", norm_offset=1.0, softcap=5.0, qk_norm="head", **LLAMA),
        rotary=RopeConfig(4),
        head=LMHead(softcap=3.0),
    ),
    "experts": LanguageModel(
        PLAIN,
        blocks(experts=EXPERTS, **LLAMA),
        load_balancing_weight=0.1,
        router_z_weight=0.1,
        **TURNED,
    ),
    "parallel, alibi": LanguageModel(PLAIN, blocks(parallel=True, sinks=True), alibi=True),
    "BERT": LanguageModel(head=MaskedLMHead(), **BERT),
    "BERT, large vocabulary": LanguageModel(
        embed(vocab_size=5003, positions="none"),
        blocks(1),
        causal=False,
        head=MaskedLMHead(tied=False),
    ),
    "BERT, classes": LanguageModel(head=Classifier(3, dropout=0.2), **BERT),
    "BERT, labels of tokens": LanguageModel(head=TokenClassifier(3, dropout=0.2), **BERT),
    "BERT, replaced tokens": LanguageModel(head=Discriminator(), **BERT),
    "BERT, pooler": LanguageModel(head=Pooler(), **BERT),
    "ALBERT": LanguageModel(
        **BERT | {"embed": embed(5, positions="learned", project_bias=True)},
        n_shared_layer_groups=1,
        head=MaskedLMHead(),
    ),
    "vectors": LanguageModel(None, blocks(), causal=False, head=None),
    "T5": EncoderDecoder(
        T5,
        T5,
        src_embed=PLAIN,
        shared_embed=True,
        encoder_relative_bias=RELATIVE,
        decoder_relative_bias=RelativeConfig(4, n_buckets=8, max_distance=6, bidirectional=False),
        head=LMHead(scale=0.4),
        out_dropout=0.1,
    ),
    "two vectors": EncoderDecoder(blocks(), blocks(), shared_memory=True),
    "Transformer": Transformer(19, 23, 12, 4, 2, 1, max_len=64, dropout=0.1),
}
NO_LOSS = ("BERT, pooler", "vectors", "two vectors")


def inputs(name: str, batch: int, length: int, seed: int = 0) -> list[tuple[Any, ...]]:
    """Arguments of forward, then of loss where there is one."""
    rng = np.random.default_rng(seed)
    x, y = rng.integers(1, 19, (2, batch, length))
    if name in ("T5", "Transformer"):
        return [(x, y), (x, y, y)]
    if "vectors" in name:
        vectors = rng.normal(size=(2, batch, length, 12)).astype(np.float32)
        return [tuple(vectors[: 2 if name == "two vectors" else 1])]
    if name == "BERT, classes":
        return [(x,), (x, rng.integers(0, 3, (batch,)))]
    if name in ("BERT, labels of tokens", "BERT, replaced tokens"):
        y = y % MODELS[name].id_sizes[1]
    return [(x,), (x, y)] if name not in NO_LOSS else [(x,)]


def new_bytes(kept: Any, *known: Any) -> int:
    """Of all memory that arrays lie in, without that of arrays that are known."""
    old = [a for a in tree.flatten(known).values()]
    arrays = [a for a in tree.flatten(kept).values() if isinstance(a, np.ndarray)]
    new = [a for a in arrays if not any(np.may_share_memory(a, b) for b in old)]
    spans = {np.lib.array_utils.byte_bounds(whole(a)) for a in new}
    scalars = [a for a in tree.flatten(kept).values() if isinstance(a, np.generic)]
    return sum(stop - start for start, stop in spans) + tree.nbytes(scalars)


def whole(array: np.ndarray) -> np.ndarray:
    return array if array.base is None else whole(array.base)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 2), (3, 3), (2, 11), (5, 4), (1, 37)])
def test_bytes_are_those_of_real_caches(name: str, batch: int, length: int) -> None:
    model = MODELS[name]
    params = model.init(seed=1)
    given, *examples = inputs(name, batch, length)
    forward = model.forward(params, *given)
    saved, known = forward[1], given
    for example in examples:
        (_, saved), known = model.loss(params, *example, dropout_key=RandomKey(5)), example
    found = measured(model, batch, length, "float32")
    assert found.forward == new_bytes(forward, params, given)
    assert found.saved == new_bytes(saved, params, known)


def test_bytes_of_float64() -> None:
    model = MODELS["GPT"]
    params = model.init(dtype="float64")
    ((x,), _) = inputs("GPT", 2, 9)
    found = measured(model, 2, 9, "float64")
    assert found.forward == new_bytes(model.forward(params, x), params, x)


def test_bytes_are_those_that_are_allocated() -> None:
    gpt = GPT(500, 2, 128, 4, 256)
    params = gpt.init()
    tokens = np.random.default_rng(0).integers(0, 500, (2, 256))
    gpt.forward(params, tokens)  # what is made once only
    tracemalloc.start()
    try:
        kept = gpt.forward(params, tokens)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    found = measured(gpt, 2, 256, "float32").forward
    assert 0 <= held - found < 100_000  # objects around the arrays
    assert new_bytes(kept, params, tokens) == found


def test_experts_keep_as_much_however_they_are_chosen() -> None:
    model = MODELS["experts"]
    found = measured(model, 3, 7, "float32")
    for seed in range(3):
        params = model.init(seed=seed)
        ((x,), _) = inputs("experts", 3, 7, seed)
        assert new_bytes(model.forward(params, x), params, x) == found.forward


class Counted(np.ndarray):
    """An array that counts the FLOPs of all products with it, and of what it is made into."""

    __module__ = "xformer"  # whose own subclasses are not refused
    flops = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **options: Any) -> Any:
        if "out" in options:
            options["out"] = tuple(map(plain, options["out"]))
        y = getattr(ufunc, method)(*map(plain, args), **options)
        if ufunc is np.matmul:
            Counted.flops += 2 * y.size * args[0].shape[-1]
        return counted(y)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return counted(function(*plain(args), **plain(options)))


def plain(x: Any) -> Any:
    if isinstance(x, Counted):
        return np.asarray(x)
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    return type(x)(map(plain, x)) if type(x) in (tuple, list) else x


def counted(y: Any) -> Any:
    return y.view(Counted) if isinstance(y, np.ndarray) else y


@pytest.mark.parametrize("name", [n for n in MODELS if n != "BERT, classes"])
def test_flops_are_those_of_all_products_that_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of T^2 pairs in each attention: by the reference, what is masked is computed too.

    Experts are NumPy's, which see their own rows alone.
    """
    for op in dispatch.ops():
        if op is not ops.experts:
            op.import_kernels("numpy")
            monkeypatch.setitem(op.kernels, "numpy", [])
    batch, length = 2, 7
    model = MODELS[name]
    params = tree.map(counted, model.init())
    Counted.flops = 0
    model.forward(params, *map(counted, inputs(name, batch, length)[0]))
    configs = (*model.blocks, *getattr(model, "decoder", ()))  # which attends twice
    heads = sum(c.attn.n_heads * (c.attn.head_width + c.attn.value_width) for c in configs)
    attention = 2 * heads * batch * length**2
    assert measured(model, batch, length, "float32").flops + attention == Counted.flops


@pytest.mark.parametrize("length", [1, 2, 5, 12])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, None), (3, None), (None, 2), (4, 1), (99, 99)])
def test_pairs_are_those_that_the_op_allows(length: int, causal: bool, window: Any) -> None:
    scores = forbid(np.zeros((length, length)), None, causal, window or (None, None))
    assert pairs(length, window, causal) == np.count_nonzero(scores == 0)


def test_attention_flops() -> None:
    causal, width = 12 * 13 // 2, 2 * 4 * (3 + 3)  # pairs; for each of them, H heads of K = M = 3
    assert attention_flops(MODELS["GPT"], 12) == 2 * width * causal
    assert attention_flops(MODELS["BERT"], 12) == 2 * width * 12**2
    assert attention_flops(MODELS["T5"], 12) == 2 * width * (12**2 + causal + 12**2)
    windowed = 1 + 2 + 3 + 9 * 4
    assert attention_flops(MODELS["Llama, windows"], 12) == 2 * 4 * 8 * (causal + windowed)


def test_key_values() -> None:
    assert key_values(MODELS["GPT"], 3, 10) == (2 * 2 * 12, 3 * 10 * 2 * 2 * 12)
    # 2 heads of 4 for keys, as many for values; the second layer keeps 4 tokens.
    assert key_values(MODELS["Llama, windows"], 3, 10) == (2 * 16, 3 * 16 * (10 + 4))
    assert key_values(MODELS["BERT"], 3, 10) is None
    assert key_values(MODELS["T5"], 3, 10) == (2 * 2 * 24, 3 * 10 * 2 * 2 * 24)
    assert key_values(MODELS["two vectors"], 1, 10) == (2 * 24 + 24, 10 * (2 * 24 + 24))


def test_a_stand_in_has_no_memory_and_computes_nothing() -> None:
    tally = Tally()
    w = stand_in((50_000, 1_000_000), "float32", tally)
    assert w.strides == (0, 0) and is_stand_in(w) and is_stand_in(w.T) and is_stand_in(w[3:, :])
    y = np.ones((3, 50_000), np.float32) @ w
    assert y.shape == (3, 1_000_000) and y.dtype == np.float32 and type(y) is np.ndarray
    assert tally.flops == 2 * 3 * 50_000 * 1_000_000
    assert (np.ones((2, 1_000_000), np.float32) @ w.T).shape == (2, 50_000)
    assert np.take(w, np.zeros((2, 3), np.int64), axis=0).shape == (2, 3, 1_000_000)
    assert (np.ones((1, 2), np.float32) @ np.reshape(w, (2, -1))[:, :3]).shape == (1, 3)
    assert is_stand_in(np.reshape(w, (2, -1)))
    for array in (w[:2, :3] + 1.0, np.sum(w[:2, :3]), np.concatenate([w[:2, :3], w[:1, :3]])):
        assert not is_stand_in(array) and array.dtype == np.float32
        assert not isinstance(array, type(w))
