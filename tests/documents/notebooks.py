"""The blocks that documents 000 and 002 compute, by this library's ops, with their random draws.

Both are one causal block without an output projection. 000 has no norm before attention; 002 has
one, adds a bias to the merged heads, and adds the *normalised* input to them.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np

from xformer import backends, layers, ops, reference_only, tree
from xformer.layers.attention import merge_heads, split_heads

B, T, D, H, F = 2, 4, 6, 2, 24
SEED = 4000


@functools.cache
@reference_only()
def block_000() -> SimpleNamespace:
    """Weights, intermediate arrays and caches of document 000."""
    rng = np.random.default_rng(SEED)
    s = SimpleNamespace(x=rng.random((B, T, D)))
    s.w_k, s.w_q, s.w_v = (rng.random((D, D)) for _ in range(3))
    s.w_up, s.b_up = rng.random((D, F)), rng.random(F)
    s.gamma, s.beta = rng.random(D), rng.random(D)
    s.w_down, s.b_down = rng.random((F, D)), rng.random(D)
    _attend(s, s.x)
    s.merged = merge_heads(s.ctx)
    s.y = s.x + s.merged
    _feed(s)
    return s


@functools.cache
@reference_only()
def block_002() -> SimpleNamespace:
    """Weights, intermediate arrays and caches of document 002."""
    rng = np.random.default_rng(SEED)
    s = SimpleNamespace(x=rng.random((B, T, D)))
    s.attn_gamma, s.attn_beta = rng.random(D), rng.random(D)
    s.w_k, s.w_q, s.w_v = (rng.random((D, D)) for _ in range(3))
    s.merge_bias = rng.random(D) * 2 - 1
    s.w_up, s.b_up = rng.random((D, F)), rng.random(F)
    s.gamma, s.beta = rng.random(D), rng.random(D)
    s.w_down, s.b_down = rng.random((F, D)), rng.random(D)
    s.x_norm, s.attn_norm_cache = ops.layer_norm(s.x, s.attn_gamma, s.attn_beta)
    _attend(s, s.x_norm)
    s.merged = merge_heads(s.ctx) + s.merge_bias
    s.y = s.x_norm + s.merged
    _feed(s)
    return s


def _attend(s: SimpleNamespace, x: np.ndarray) -> None:
    s.queries, s.q_cache = ops.linear(x, s.w_q)
    s.keys, s.k_cache = ops.linear(x, s.w_k)
    s.values, s.v_cache = ops.linear(x, s.w_v)
    heads = (split_heads(a, H) for a in (s.queries, s.keys, s.values))
    s.ctx, s.sdpa_cache = ops.sdpa(*heads, causal=True)
    s.probs = s.sdpa_cache.probs


def _feed(s: SimpleNamespace) -> None:
    s.y_norm, s.norm_cache = ops.layer_norm(s.y, s.gamma, s.beta)
    s.pre, s.up_cache = ops.linear(s.y_norm, s.w_up, s.b_up)
    s.hidden, s.relu_cache = ops.relu(s.pre)
    s.ffn, s.down_cache = ops.linear(s.hidden, s.w_down, s.b_down)
    s.out = s.ffn + s.y


def block(s: SimpleNamespace, **attn: Any) -> tuple[layers.BlockConfig, layers.BlockParams]:
    """The block after its first norm, as a configuration and the document's weights.

    attn: further options of the attention
    """
    config = layers.BlockConfig(
        layers.AttentionConfig(D, H, bias=False, **attn),
        layers.FeedForwardConfig(F),
        attn_norm=False,
    )
    like = config.init(backends.get("numpy").generator(0, "float64"))
    weights = {
        "attn.q.w": s.w_q,
        "attn.kv.k.w": s.w_k,
        "attn.kv.v.w": s.w_v,
        "ffn_norm.w": s.gamma,
        "ffn_norm.b": s.beta,
        "ffn.up.w": s.w_up,
        "ffn.up.b": s.b_up,
        "ffn.down.w": s.w_down,
        "ffn.down.b": s.b_down,
    }
    if config.attn.output == "bias":
        weights["attn.o.b"] = s.merge_bias
    assert weights.keys() == tree.flatten(like).keys()
    return config, tree.unflatten(like, weights)


def attention_gradients(s: SimpleNamespace, dmerged: np.ndarray) -> dict[str, Any]:
    """Gradients of everything in attention, by the gradient of its merged heads (B, T, D)."""
    dq, dk, dv, *_ = s.sdpa_cache.backward(split_heads(dmerged, H))
    grads = {"dv": dv}
    for name, cache, dheads in (("q", s.q_cache, dq), ("k", s.k_cache, dk), ("v", s.v_cache, dv)):
        grads[f"dx_{name}"], grads[f"dw_{name}"], _ = cache.backward(merge_heads(dheads))
    grads["dx"] = grads["dx_k"] + grads["dx_v"] + grads["dx_q"]
    return grads
