"""What the layers promise beyond their gradients, which test_gradients.py checks."""

from __future__ import annotations

import numpy as np
from xformer.backends import Backend

from xformer import layers


def test_causal_blocks_do_not_look_ahead(library: Backend) -> None:
    rng = library.generator(0, "float64")
    config = layers.BlockConfig(d_model=6, n_heads=2, d_ff=11)
    params = layers.StackParams.init(rng, (config,) * 2)
    host = np.array(library.to_numpy(rng.normal((2, 5, 6))))
    before, _ = layers.stack(library.asarray(host), params, configs=(config,) * 2, causal=True)
    host[:, 3] += 1
    after, _ = layers.stack(library.asarray(host), params, configs=(config,) * 2, causal=True)
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
    y, _ = layers.attention(x, params, memory, n_heads=4, n_kv_heads=2)
    x, memory, w_q, w_k, w_v, y = map(library.to_numpy, (x, memory, w_q, w_k, w_v, y))
    for b in range(2):
        for h in range(4):
            g = h // 2  # two query heads share one of keys and values
            q, k = x[b] @ w_q[:, 3 * h : 3 * h + 3], memory[b] @ w_k[:, 3 * g : 3 * g + 3]
            e = np.exp(q @ k.T / 3**0.5)
            wanted = e / e.sum(axis=1, keepdims=True) @ memory[b] @ w_v[:, 2 * g : 2 * g + 2]
            assert np.allclose(y[b, :, 2 * h : 2 * h + 2], wanted, rtol=1e-12, atol=1e-14)
