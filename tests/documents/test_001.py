"""Document 001, a notebook: norm with eps outside the root, softmax, two heads on (T, D) input."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from printed import Printed

from xformer import layers, ops, reference_only

PRINTED = Printed("001")
T, D, K = 4, 6, 3
EPS = 1e-9


@functools.cache
@reference_only()
def arrays() -> dict[str, np.ndarray]:
    """Every array the document prints, by this library's ops."""
    rng = np.random.default_rng(1000)
    x, gamma, beta = rng.random((T, D)), rng.random(D), rng.random(D)
    w = {name: rng.random((D, K)) for name in ("k1", "q1", "v1", "k2", "q2", "v2")}

    config = layers.NormConfig(eps=EPS, eps_inside=False)
    norm, cache = layers.norm(x, layers.NormParams(gamma, beta), config=config)
    norm_cache = cache.norm
    # The document takes keys, queries and values from x, not from its norm.
    p = {name: ops.linear(x, weight)[0] for name, weight in w.items()}
    out = {"x": x, "gamma": gamma, "beta": beta, "norm": norm}
    out |= {"norm_of_function": norm, "norm_copied": norm}
    out |= {"mean": norm_cache.mean, "std": 1 / norm_cache.rstd - EPS}
    out |= {name: p[name] for name in ("k1", "q1", "v1")}

    out["scores1"] = ops.linear(p["q1"], p["k1"].T)[0] * K**-0.5
    out["scores1_max"] = np.max(out["scores1"], axis=-1, keepdims=True)
    log_probs, _ = ops.log_softmax(out["scores1"])
    out["shifted1"] = log_probs - np.max(log_probs, axis=-1, keepdims=True)
    out["softmax1"] = ops.softmax(out["scores1"])[0]
    for head in ("1", "2"):
        q, k, v = (p[name + head][None, None] for name in "qkv")
        ctx, cache = ops.sdpa(q, k, v)
        out["probs" + head], out["ctx" + head] = cache.probs[0, 0], ctx[0, 0]

    def joined(name: str) -> layers.LinearParams:
        return layers.LinearParams(np.concat([w[name + "1"], w[name + "2"]], axis=1), None)

    params = layers.AttentionParams(
        joined("q"), layers.KeyValueParams(joined("k"), joined("v")), None
    )
    out["merged"], _ = layers.attention(x, params, config=layers.AttentionConfig(x.shape[-1], 2))

    # exp(x - 1000) of a row whose largest element is 1000, and of one far below it.
    far, near = np.array([980.0, 990.0, 1000.0]), np.array([1.0, 2.0, 3.0])
    log_far, _ = ops.log_softmax(far)
    out["exp_far"] = np.exp(log_far - log_far[-1])
    both, _ = ops.softmax(np.concat([near, far]))
    out["exp_near"] = both[:3] / both[-1]
    return out


def test_every_printed_array_has_its_test() -> None:
    assert sorted(PRINTED.names) == sorted(arrays())


@pytest.mark.parametrize("name", PRINTED.names)
def test_forward(name: str) -> None:
    PRINTED.check(name, arrays()[name])
