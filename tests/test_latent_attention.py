"""`latent_attention` against the paper's formulas, its short way to decode, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from block_configs import block_config
from libraries import only

from xformer import backends, distributed, inference, layers, tree, unfused
from xformer.backends import Backend
from xformer.distributed.world import Alone
from xformer.finetune import lora
from xformer.hooks.node_names import named
from xformer.inspection import measure
from xformer.layers import KVCache, LatentAttentionConfig, latent_attention
from xformer.models import EncoderDecoder, LanguageModel
from xformer.models.precision import require_reducible

NUMPY = backends.get("numpy")
CONFIG = LatentAttentionConfig(6, 3, kv_rank=5, d_nope=4, d_rope=2, d_value=7, q_rank=8, bias=True)
DIRECT = replace(CONFIG, q_rank=None, bias=False, scale=0.3)
ROPE = layers.RopeConfig(2, theta=30.0, interleaved=True)
B, T = 2, 5
EXACT: Any = {"rtol": 1e-12, "atol": 1e-13}


def drawn(library: Backend, config: LatentAttentionConfig, dtype: str = "float64") -> Any:
    """Random parameters: all of them, also biases and norms."""
    rng = library.generator(2, dtype)
    params = config.init(rng, config.norm)
    return tree.map(lambda a: rng.normal(a.shape, mean=0.3, std=0.7), params)


def inputs(library: Backend, dtype: str = "float64") -> tuple[Any, Any]:
    """x, and RoPE tables for it."""
    x = library.generator(5, dtype).normal((B, T, 6))
    return x, layers.rope_tables(ROPE, like=x, length=T)


def rms_norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / math.sqrt(float(np.mean(x**2)) + 1e-6) * w


def by_the_paper(x: np.ndarray, params: Any, config: LatentAttentionConfig) -> np.ndarray:
    """arXiv:2405.04434, eq. 9 to 19, for one causal sequence: one token and one head at a time."""
    n, r, m = config.d_nope, config.d_rope, config.d_value
    scale = (n + r) ** -0.5 if config.scale is None else config.scale

    def linear(y: np.ndarray, p: Any) -> np.ndarray:
        return y @ p.w + (0.0 if p.b is None else p.b)

    def turn(pair: np.ndarray, t: int) -> np.ndarray:  # one pair of channels, of frequency 1
        a, b = pair
        return np.array([a * math.cos(t) - b * math.sin(t), b * math.cos(t) + a * math.sin(t)])

    def head(y: np.ndarray, i: int, width: int) -> np.ndarray:
        return y[i * width : (i + 1) * width]

    rows = []
    keys: list[Any] = []
    for t, h in enumerate(x):
        q = linear(h, params.q) if config.q_rank is None else None
        if q is None:
            q = linear(rms_norm(linear(h, params.q.down), params.q.norm.w), params.q.up)
        joint = linear(h, params.kv.down)
        kv = linear(rms_norm(joint[: config.kv_rank], params.kv.norm.w), params.kv.up)
        keys.append((kv, turn(joint[config.kv_rank :], t)))
        outputs = []
        for i in range(config.n_heads):
            own = head(q, i, n + r)
            q_rope = turn(own[n:], t)
            scores = [own[:n] @ head(kv, i, n + m)[:n] + q_rope @ shared for kv, shared in keys]
            probs = np.exp(scale * np.array(scores))
            values = [head(kv, i, n + m)[n:] for kv, _ in keys]
            outputs.append(probs / probs.sum() @ np.array(values))
        rows.append(linear(np.concatenate(outputs), params.o))
    return np.array(rows)


@pytest.mark.parametrize("config", [CONFIG, DIRECT], ids=["latent queries", "direct queries"])
def test_the_formulas_of_the_paper(library: Backend, config: LatentAttentionConfig) -> None:
    x, rotary = inputs(library)
    params = drawn(library, config)
    y, _ = latent_attention(
        x, params, config=config, context=layers.Context(causal=True, rotary=rotary)
    )
    on_host = tree.map(library.to_numpy, params)
    for got, row in zip(library.to_numpy(y), library.to_numpy(x), strict=True):
        np.testing.assert_allclose(got, by_the_paper(row, on_host, config), **EXACT)


@pytest.mark.parametrize("config", [CONFIG, DIRECT], ids=["latent queries", "direct queries"])
@pytest.mark.parametrize("n_first", [1, 3])
def test_decoding_without_the_keys_of_heads(
    library: Backend, config: LatentAttentionConfig, n_first: int
) -> None:
    """The rest of a text from its latent vectors, with a bias, as when all is read at once."""
    x, rotary = inputs(library)
    params = drawn(library, config)
    bias = library.generator(7, "float64").normal((3, T, T))
    y, cache = latent_attention(
        x,
        params,
        layers.SideInputs(bias=bias),
        config=config,
        context=layers.Context(causal=True, rotary=rotary, kv_cache=KVCache()),
    )
    first, last = (
        layers.RopeTables(rotary.cos[part, :], rotary.sin[part, :], rotary.interleaved)
        for part in (slice(n_first), slice(n_first, T))
    )
    one, so_far = latent_attention(
        x[:, :n_first, :],
        params,
        layers.SideInputs(bias=bias[:, :n_first, :n_first]),
        config=config,
        context=layers.Context(causal=True, rotary=first, kv_cache=KVCache()),
    )
    two, after = latent_attention(
        x[:, n_first:, :],
        params,
        layers.SideInputs(bias=bias[:, n_first:, :]),
        config=config,
        context=layers.Context(causal=True, rotary=last, kv_cache=so_far.kv_cache),
    )
    assert after.core is None and so_far.core is not None
    both = library.to_numpy(library.xp.concat([one, two], axis=1))
    np.testing.assert_allclose(both, library.to_numpy(y), **EXACT)
    for a, b in zip(after.kv_cache[:2], cache.kv_cache[:2], strict=True):
        np.testing.assert_allclose(library.to_numpy(a), library.to_numpy(b), **EXACT)
    assert [a.shape for a in after.kv_cache[:2]] == [(B, 1, T, 2), (B, 1, T, 5)]
    for saved in (so_far, after):
        with pytest.raises(ValueError, match=r"^latent_attention: with a KV cache nothing is sav"):
            saved.backward(y)


@only("numpy")
@pytest.mark.parametrize("what", ["adapter", "bias"])
def test_the_whole_map_of_the_latent_vector_is_used_in_decoding(
    library: Backend, what: str
) -> None:
    params = drawn(NUMPY, CONFIG)
    if what == "adapter":
        params = lora.attach(params, 2, 4.0, ["kv.up"])
        params = tree.map(lambda a: a + 0.1, params)
    else:
        up = params.kv.up._replace(b=NUMPY.generator(9, "float64").normal((3 * (4 + 7),)))
        params = params._replace(kv=params.kv._replace(up=up))
    x, _ = inputs(NUMPY)
    y, _ = latent_attention(x, params, config=CONFIG, context=layers.Context(causal=True))
    with inference():
        _, cache = latent_attention(
            x[:, :4], params, config=CONFIG, context=layers.Context(causal=True, kv_cache=KVCache())
        )
        last, _ = latent_attention(
            x[:, 4:],
            params,
            config=CONFIG,
            context=layers.Context(causal=True, kv_cache=cache.kv_cache),
        )
    np.testing.assert_allclose(last[:, 0], y[:, 4], **EXACT)


def model(attn: Any = CONFIG, **options: Any) -> LanguageModel:
    embed = layers.EmbedConfig(11, 6, 6, positions="none")
    block = replace(block_config(6, 3, 8), attn=attn)
    return LanguageModel(embed, (block,) * 2, rotary=ROPE, **options)


def test_sizes() -> None:
    """The KV cache of a token in each layer: C + R numbers, instead of H (N + R + M)."""
    assert CONFIG.cached_width == 5 + 2
    assert measure.key_values(model(), 3, 10) == (2 * 7, 3 * 10 * 2 * 7)
    pairs = 10 * 11 // 2
    assert measure.attention_flops(model(), 10) == 2 * 2 * pairs * 3 * (4 + 2 + 7)


def test_nodes_have_the_names_of_parameters() -> None:
    tokens = np.arange(8).reshape(2, 4)
    for config in (CONFIG, DIRECT):
        network = model(config)
        params = network.init()
        with unfused():
            _, cache = network.loss(params, tokens, tokens)
        nodes = named(cache)
        leaves = [name for name in tree.flatten(params) if ".attn." in name]
        assert leaves and all(name.rpartition(".")[0] in nodes for name in leaves)
        assert "stack.blocks.0.attn.core" in nodes


TOKENS = np.zeros((1, 2), dtype=np.int64)
X = np.ones((2, 4, 6))
PARAMS = drawn(NUMPY, CONFIG)
BLOCK = model().blocks[0]
USUAL = block_config(6, 3, 8)


def run(params: Any = PARAMS, **context: Any) -> Any:
    return latent_attention(X, params, config=CONFIG, context=layers.Context(**context))


def block(params: Any = None, pos: Any = None, **context: Any) -> Any:
    rng = NUMPY.generator(0, "float64")
    params = BLOCK.init(rng) if params is None else params
    side = layers.SideInputs(pos=pos)
    return layers.block(X, params, side, config=BLOCK, context=layers.Context(**context))


def wide(**parts: int) -> Any:
    """Parameters whose q.up, kv.down or kv.up have too many columns."""
    q, kv, o = PARAMS
    more = {
        n: layers.LinearParams(np.ones((i, parts[n])), None) for n, i in ROWS.items() if n in parts
    }
    q = q._replace(up=more.get("q_up", q.up))
    kv = kv._replace(down=more.get("kv_down", kv.down), up=more.get("kv_up", kv.up))
    return layers.LatentAttentionParams(q, kv, o)


ROWS = {"q_up": 8, "kv_down": 6, "kv_up": 5}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "kv_rank": (lambda: replace(CONFIG, kv_rank=0), "kv_rank must be an int of at least 1"),
    "q_rank": (lambda: replace(CONFIG, q_rank=0), "q_rank must be an int of at least 1"),
    "eps": (lambda: replace(CONFIG, eps=-1.0), "eps must lie in [0, inf], got -1.0"),
    "dropout": (lambda: replace(CONFIG, dropout=1.5), "dropout must lie in [0, 1], got 1.5"),
    "q columns": (
        lambda: run(wide(q_up=19)),
        "latent_attention: q.up.w must have H (N + R) = 18 columns, got 19",
    ),
    "kv.down columns": (
        lambda: run(wide(kv_down=8)),
        "latent_attention: kv.down.w must have C + R = 7 columns, got 8",
    ),
    "kv.up columns": (
        lambda: run(wide(kv_up=34)),
        "latent_attention: kv.up.w must have H (N + M) = 33 columns, got 34",
    ),
    "static cache without a mask": (
        lambda: run(kv_cache=KVCache(write_index=np.asarray(0))),
        "latent_attention: a static KV cache needs a mask",
    ),
    "cross-attention": (
        lambda: BLOCK.init(NUMPY.generator(0, "float64"), cross=True),
        "block: cross-attention needs an AttentionConfig",
    ),
    "cross-attention in a block": (
        lambda: layers.block(
            X,
            USUAL.init(NUMPY.generator(0, "float64"), cross=True),
            layers.SideInputs(X),
            config=BLOCK,
        ),
        "block: cross-attention needs an AttentionConfig",
    ),
    "shared memory": (
        lambda: layers.StackParams.init(
            NUMPY.generator(0, "float64"), (BLOCK,), shared_memory=True
        ),
        "block: cross-attention needs an AttentionConfig",
    ),
    "a decoder with a memory": (
        lambda: EncoderDecoder((BLOCK,), (BLOCK,)),
        "EncoderDecoder: a decoder's attn must be an AttentionConfig",
    ),
    "positions": (
        lambda: block(pos=np.ones((4, 6))),
        "latent_attention: pos must be None, which this layer cannot follow",
    ),
    "segment memory": (
        lambda: block(segment_memory=X),
        "latent_attention: segment_memory must be None, which this layer cannot follow",
    ),
    "parameters of another attention": (
        lambda: block(USUAL.init(NUMPY.generator(0, "float64"))),
        "block: params.attn must be LatentAttentionParams by config, got AttentionParams",
    ),
    "tensor parallelism": (
        lambda: distributed.tensor_parallel(model(), Alone()),
        "parallel: attn must be an AttentionConfig, got LatentAttentionConfig",
    ),
    "two bytes": (
        lambda: require_reducible("train", model(), "bfloat16"),
        "train: precision bfloat16 excludes latent attention: backward would add gradients",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^latent_attention: bias must be True or False, got 1$"):
        replace(CONFIG, bias=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^block: attn must have init, forward, d_model, got "):
        replace(BLOCK, attn=BLOCK.ffn)  # type: ignore[arg-type]
