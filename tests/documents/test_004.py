"""Document 004, an article with C++: a post-LN block with an output projection, trained by SGD.

The document gives sizes and ranges, no figures; its own training loop never computes a loss and
feeds random gradients. Here the same block learns its target.
"""

from __future__ import annotations

import numpy as np

from xformer import backends, layers, ops, optim, tree

T, D, F, H = 4, 8, 16, 2
CONFIG = layers.BlockConfig(
    layers.AttentionConfig(D, H, bias=False),
    layers.FeedForwardConfig(F),
    layers.NormConfig(eps=1e-6),
    norm_placement="post",
)
LR, MAX_STEPS = 0.2, 5000


def start(seed: int) -> tuple[layers.BlockParams, np.ndarray, np.ndarray]:
    """Xavier weights, biases in the feed-forward network alone; input and target (1, T, D)."""
    rng = backends.get("numpy").generator(seed, "float64")
    params = CONFIG.init(rng)
    x = rng.uniform((1, T, D), low=-0.5, high=0.5)
    target = rng.uniform((1, T, D), low=-0.1, high=0.1)
    return params, x, target


def loss_and_gradients(
    params: layers.BlockParams, x: np.ndarray, target: np.ndarray
) -> tuple[float, layers.BlockParams]:
    y, block_cache = layers.block(x, params, config=CONFIG, context=layers.Context(causal=True))
    loss, loss_cache = ops.mse(y, target)
    dy, _ = loss_cache.backward(np.ones(()))
    return float(loss), block_cache.backward(dy)[1]


def test_shapes() -> None:
    params, x, target = start(0)
    shapes = {name: leaf.shape for name, leaf in tree.flatten(params).items()}
    assert shapes == {
        "attn_norm.w": (D,),
        "attn_norm.b": (D,),
        "attn.q.w": (D, D),
        "attn.kv.k.w": (D, D),
        "attn.kv.v.w": (D, D),
        "attn.o.w": (D, D),
        "ffn_norm.w": (D,),
        "ffn_norm.b": (D,),
        "ffn.up.w": (D, F),
        "ffn.up.b": (F,),
        "ffn.down.w": (F, D),
        "ffn.down.b": (D,),
    }
    _, grads = loss_and_gradients(params, x, target)
    assert {name: g.shape for name, g in tree.flatten(grads).items()} == shapes


def test_training_fits_the_target() -> None:
    params, x, target = start(0)
    state = optim.sgd_init(params)
    losses: list[float] = []
    while len(losses) < MAX_STEPS and not (losses and losses[-1] < 1e-3 * losses[0]):
        loss, grads = loss_and_gradients(params, x, target)
        params, state = optim.sgd(params, grads, state, lr=LR)
        losses.append(loss)
    assert losses[-1] < 1e-3 * losses[0], f"{losses[0]} -> {losses[-1]} in {len(losses)} steps"
    # Tokens are told apart: one vector for all of them, which beta alone could be, is worse.
    assert losses[-1] < np.mean((target - np.mean(target, axis=1, keepdims=True)) ** 2)


def test_the_documents_training_loop_does_not_train() -> None:
    """Its 100 steps of 0.001 along the gradients of a random output gradient."""
    params, x, target = start(0)
    rng = np.random.default_rng(0)
    state = optim.sgd_init(params)
    before, _ = loss_and_gradients(params, x, target)
    for _ in range(100):
        y, cache = layers.block(x, params, config=CONFIG, context=layers.Context(causal=True))
        _, grads, *_ = cache.backward(rng.uniform(-0.1, 0.1, y.shape))
        params, state = optim.sgd(params, grads, state, lr=0.001)
    after, _ = loss_and_gradients(params, x, target)
    assert abs(after / before - 1) < 0.01
