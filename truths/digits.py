"""A vision transformer (arXiv:2010.11929) on scikit-learn's handwritten digits.

An image of 8 by 8 pixels is 4 patches of 4 by 4; each goes through a linear map, gets a learned
position, and a stack of layers reads them all at once; the mean of what comes out is classified.
The forward and the backward are written here from the library's layers. In a checkout:

    pip install -e '.[truths]' && python truths/digits.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from needed import require_package

from xformer import backends, ops, optim
from xformer.initializers import xavier_uniform
from xformer.layers import (
    AttentionConfig,
    BlockConfig,
    Context,
    FeedForwardConfig,
    StackParams,
    pool,
    stack,
)
from xformer.layers.linear import LinearParams, linear

SIDE, PATCH, N_CLASSES = 8, 4, 10
N_PATCHES = (SIDE // PATCH) ** 2
N_TEST = 360  # a fifth of the images
EPOCHS, BATCH, LR = 30, 64, 2e-3
BLOCK = BlockConfig(AttentionConfig(64, 4, dropout=0.1), FeedForwardConfig(128), dropout=0.1)
CONFIGS = (BLOCK,) * 2


class Params(NamedTuple):
    """Of the classifier."""

    patches: LinearParams  # (16, D)
    positions: np.ndarray  # (4, D)
    stack: StackParams
    head: LinearParams  # (D, 10)


class Cache(NamedTuple):
    """What `loss` keeps for its backward."""

    patches: Any
    stack: Any
    pool: Any
    head: Any
    loss: Any

    def backward(self) -> Params:
        """Gradients of params."""
        dlogits = self.loss.backward(np.ones((), np.float32))
        dx, dhead = self.head.backward(dlogits)
        dx, dstack, *_ = self.stack.backward(self.pool.backward(dx))
        _, dpatches = self.patches.backward(dx)
        return Params(dpatches, dx.sum(axis=0), dstack, dhead)


def main() -> int:
    """Train, and print the share of the test images that are classified rightly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and dropout")
    args = parser.parse_args()
    require_package("sklearn", "truths")
    data = split()
    start = time.perf_counter()
    for epoch, params in enumerate(train(*data[:2], args.epochs, args.seed), 1):
        if epoch % 5 == 0 or epoch == args.epochs:
            right, seconds = accuracy(params, *data[2:]), time.perf_counter() - start
            print(f"epoch {epoch:3}  test accuracy {right:.2%}  {seconds:.0f} s", flush=True)
    return 0 if right > 0.97 else 1


def split() -> tuple[np.ndarray, ...]:
    """Patches (N, 4, 16) and classes (N,) to train on, and the same to test on, in one order."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, classes = load_digits(return_X_y=True)
    n = SIDE // PATCH
    grid = (images / 8 - 1).astype(np.float32).reshape(-1, n, PATCH, n, PATCH)
    patches = grid.transpose(0, 1, 3, 2, 4).reshape(-1, N_PATCHES, PATCH**2)
    options: Any = {"test_size": N_TEST, "random_state": 0, "stratify": classes}
    train, test, train_classes, test_classes = train_test_split(patches, classes, **options)
    return train, train_classes, test, test_classes


def initial(seed: int) -> Params:
    """Xavier uniform maps, small positions."""
    rng = backends.get("numpy").generator(seed)
    width = BLOCK.d_model

    def dense(shape: tuple[int, int]) -> LinearParams:
        return LinearParams.init(rng, shape, draw=xavier_uniform, bias=True)

    patches, positions = dense((PATCH**2, width)), rng.normal((N_PATCHES, width), std=0.02)
    encoder = StackParams.init(rng, CONFIGS)
    return Params(patches, positions, encoder, dense((width, N_CLASSES)))


def logits_of(
    params: Params, patches: np.ndarray, key: ops.RandomKey | None = None
) -> tuple[np.ndarray, tuple[Any, ...]]:
    """patches: (B, 4, 16)   logits: (B, 10)."""
    x, patch_cache = linear(patches, params.patches)
    x, context = x + params.positions, Context(dropout_key=key)
    x, stack_cache = stack(x, params.stack, configs=CONFIGS, context=context)
    x, pool_cache = pool(x)
    logits, head_cache = linear(x, params.head)
    return logits, (patch_cache, stack_cache, pool_cache, head_cache)


def loss(
    params: Params, patches: np.ndarray, classes: np.ndarray, key: ops.RandomKey
) -> tuple[np.ndarray, Cache]:
    """Mean cross-entropy in nats."""
    logits, caches = logits_of(params, patches, key)
    value, loss_cache = ops.cross_entropy(logits, targets=classes, label_smoothing=0.1)
    return value, Cache(*caches, loss_cache)


def train(patches: np.ndarray, classes: np.ndarray, epochs: int, seed: int) -> Iterator[Params]:
    """The parameters after each epoch."""
    params = initial(seed)
    optimiser = optim.grouped(*optim.decay_matrices("adamw", 0.05))
    state = optimiser.init(params)
    rng = np.random.default_rng(seed)
    per_epoch = len(patches) // BATCH
    n_steps = epochs * per_epoch
    rise = n_steps // 10
    cosine = optim.schedules.cosine(LR, n_steps - rise)
    schedule = optim.schedules.warmup(cosine, rise)
    step = 0
    for _ in range(epochs):
        order = rng.permutation(len(patches))[: per_epoch * BATCH]
        for rows in order.reshape(per_epoch, BATCH):
            step += 1
            _, cache = loss(params, patches[rows], classes[rows], ops.RandomKey(seed, step=step))
            grads, _ = optim.clip_by_global_norm(cache.backward(), max_norm=1.0)
            params, state = optimiser.step(params, grads, state, lr=schedule(step))
        yield params


def accuracy(params: Params, patches: np.ndarray, classes: np.ndarray) -> float:
    """The share of images whose likeliest class is theirs."""
    logits, _ = logits_of(params, patches)
    return float(np.mean(np.argmax(logits, axis=-1) == classes))


if __name__ == "__main__":
    raise SystemExit(main())
