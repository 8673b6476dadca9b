"""`scale` by its formula; blocks with residual scales against ReZero's layer in plain torch."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import xformer as xf
from xformer import layers, optim, tree
from xformer.backends import Backend
from xformer.models import LanguageModel
from xformer.ops import scale

RNG = np.random.default_rng(0)
X, DY = RNG.normal(size=(2, 3, 5)), RNG.normal(size=(2, 3, 5))


def test_the_gradient_of_alpha_is_a_sum_over_all_elements(library: Backend) -> None:
    y, cache = scale(library.asarray(X), library.asarray(np.array([-0.7])))
    dx, dalpha = cache.backward(library.asarray(DY))
    assert np.array_equal(library.to_numpy(y), -0.7 * X)
    assert np.array_equal(library.to_numpy(dx), -0.7 * DY)
    wanted = sum(a * b for a, b in zip(X.reshape(-1), DY.reshape(-1), strict=True))
    np.testing.assert_allclose(library.to_numpy(dalpha), [wanted], rtol=1e-13)


@pytest.mark.parametrize("shape", [(), (2,), (1, 1), (5,)])
def test_alpha_is_one_number(shape: tuple[int, ...]) -> None:
    message = f"scale: alpha must have shape (1,), got {shape}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        scale(X, np.ones(shape))


def test_bad_gradients() -> None:
    _, cache = scale(X, np.ones(1))
    with pytest.raises(ValueError, match=r"^scale: dy must have shape \(2, 3, 5\), got \(2, 3\)$"):
        cache.backward(X[..., 0])
    with pytest.raises(TypeError, match=r"^scale: dy must be float64, got float32$"):
        cache.backward(X.astype(np.float32))


CONFIG = layers.BlockConfig(
    layers.AttentionConfig(6, 2),
    layers.FeedForwardConfig(11, "relu"),
    norm_placement="none",
    residual_scale=0.0,
)


def test_a_block_is_rezeros_layer() -> None:
    """x + alpha attn(x), then x + alpha ffn(x) (section 5), with torch's layers and autograd."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = xf.backends.get().generator(0, "float64")
    params = tree.map(lambda p: rng.normal(p.shape), CONFIG.init(rng))
    attn = torch.nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)
    up, down = (torch.nn.Linear(*sizes, dtype=torch.float64) for sizes in ((6, 11), (11, 6)))
    maps = (params.attn.q, params.attn.kv.k, params.attn.kv.v)
    with torch.no_grad():
        attn.in_proj_weight.copy_(torch.tensor(np.concatenate([m.w.T for m in maps])))
        attn.in_proj_bias.copy_(torch.tensor(np.concatenate([m.b for m in maps])))
        pairs = (attn.out_proj, params.attn.o), (up, params.ffn.up), (down, params.ffn.down)
        for theirs, ours in pairs:
            theirs.weight.copy_(torch.tensor(ours.w.T.copy()))
            theirs.bias.copy_(torch.tensor(ours.b))
    x, alpha, beta = (
        torch.tensor(a, requires_grad=True) for a in (X6, params.attn_scale, params.ffn_scale)
    )
    hidden = x + alpha * attn(x, x, x)[0]
    wanted = hidden + beta * down(torch.relu(up(hidden)))
    wanted.backward(torch.tensor(DY6))

    y, cache = layers.block(X6, params, config=CONFIG)
    dx, dparams, *_ = cache.backward(DY6)
    pairs = [(y, wanted.detach()), (dx, x.grad)]
    pairs += [(dparams.attn_scale, alpha.grad), (dparams.ffn_scale, beta.grad)]
    pairs += [(dparams.ffn.up.w, up.weight.grad.T), (dparams.attn.o.b, attn.out_proj.bias.grad)]
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_fixed_multiplier(parallel: bool) -> None:
    """It multiplies what sublayers add: of two in parallel both, of two in sequence each."""
    config = replace(CONFIG, residual_scale=None, parallel=parallel)
    params = config.init(xf.backends.get().generator(0, "float64"))
    y, _ = layers.block(X6, params, config=replace(config, residual_multiplier=-0.3))
    attn, _ = layers.attention(X6, params.attn, config=layers.AttentionConfig(X6.shape[-1], 2))
    between = X6 if parallel else X6 - 0.3 * attn
    ffn, _ = layers.feed_forward(between, params.ffn, activation="relu")
    np.testing.assert_allclose(y, X6 - 0.3 * attn - 0.3 * ffn, rtol=1e-12, atol=1e-14)


X6, DY6 = RNG.normal(size=(2, 4, 6)), RNG.normal(size=(2, 4, 6))
MODELS: dict[str, Any] = {
    "GPT": xf.GPT(11, 3, 6, 2, 7, norm_placement="none", residual_scale=0.0),
    "parallel": LanguageModel(
        layers.EmbedConfig(11, 6, 6, max_len=7),
        (
            layers.BlockConfig(
                CONFIG.attn, CONFIG.ffn, norm_placement="none", parallel=True, residual_scale=0.0
            ),
        )
        * 3,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_rezero_starts_as_the_identity(library: Backend, name: str) -> None:
    """Hidden states are the embedded tokens, and only the numbers of the blocks have a gradient."""
    network = MODELS[name]
    params = network.init_from(library.generator(0, "float64"))
    tokens = library.asarray(np.array([[1, 0, 10, 4], [4, 4, 2, 7]]))
    hidden, _ = network.hidden(params, tokens)
    (embedded, _), _ = layers.embed(params.embed, ids=tokens, config=network.embed)
    assert np.array_equal(library.to_numpy(hidden), library.to_numpy(embedded))
    grads = tree.flatten(network.loss(params, tokens, tokens)[1].backward().stack)
    moving = {n for n, g in grads.items() if np.any(library.to_numpy(g))}
    assert moving == {n for n in grads if n.endswith("_scale")} and len(moving) == 6


def test_an_encoder_decoder_starts_as_the_identity() -> None:
    model = xf.Transformer(11, 13, 6, 2, 2, 3, 7, norm_placement="none", residual_scale=0.0)
    params = model.init(seed=0, dtype="float64")
    src, tgt = np.array([[1, 5, 10, 4]]), np.array([[3, 12, 7]])
    (memory, _), _ = model.encode(params, src)
    (embedded, _), _ = layers.embed(params.src_embed, ids=src, config=model.src_embed)
    assert np.array_equal(memory, embedded)
    logits, _ = model.forward(params, src, tgt)
    (embedded, _), _ = layers.embed(params.tgt_embed, ids=tgt, config=model.tgt_embed)
    assert np.array_equal(logits, embedded @ params.head.w + params.head.b)
    assert params.encoder.norm is None and params.decoder.norm is None
    assert sum(name.endswith("_scale") for name in tree.flatten(params)) == 2 * 2 + 3 * 3


def test_the_numbers_do_not_decay() -> None:
    params = MODELS["GPT"].init(seed=0)
    step = optim.grouped(*optim.decay_matrices("adamw", 0.5))
    grads = tree.map(np.zeros_like, params)
    params = tree.map(lambda p: p + 1, params)
    stepped, _ = step.step(params, grads, step.init(params), lr=0.1)
    block = stepped.stack.blocks[0]
    assert block.attn_scale == block.ffn_scale == 1
    assert (block.attn.q.w != params.stack.blocks[0].attn.q.w).all()


def test_a_frozen_number_has_no_gradient() -> None:
    params = tree.freeze(MODELS["GPT"].init(seed=0), "*.attn_scale")
    tokens = np.array([[1, 0, 10, 4]])
    grads = MODELS["GPT"].loss(params, tokens, tokens)[1].backward().stack.blocks[1]
    assert grads.attn_scale is None and grads.ffn_scale.shape == (1,)
