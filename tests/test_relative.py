"""T5's relative bias: its buckets, their places, and the gradient of its table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import only

from xformer.backends import Backend
from xformer.layers import RelativeConfig, relative_bias

SIZES = [(32, 128), (32, 64), (16, 20), (8, 50), (32, 8192), (64, 100), (6, 4), (4, 3)]


def t5_attention() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    return T5Attention


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), SIZES)
def test_buckets_are_those_of_transformers(n_buckets: int, max_distance: int, both: bool) -> None:
    attention = t5_attention()
    import torch

    config = RelativeConfig(1, n_buckets, max_distance, both)
    distances = torch.arange(-9000, 9001)
    sizes = {"num_buckets": n_buckets, "max_distance": max_distance}
    wanted = attention._relative_position_bucket(distances, bidirectional=both, **sizes)
    assert [config.bucket(d) for d in distances.tolist()] == wanted.tolist()


def test_where_t5s_buckets_begin() -> None:
    """Exact up to n_exact, then by the factor 128/n_exact in as many steps as there are left."""
    both, one = RelativeConfig(1), RelativeConfig(1, bidirectional=False)

    def begins(config: RelativeConfig, sign: int) -> list[int]:
        buckets = [config.bucket(sign * d) for d in range(200)]
        return [d for d in range(1, 200) if buckets[d] != buckets[d - 1]]

    assert begins(both, -1) == [*range(1, 9), 12, 16, 23, 32, 46, 64, 91]
    assert begins(both, 1) == begins(both, -1)
    assert both.bucket(1) == 17 and both.bucket(-1) == 1 and both.bucket(199) == 31
    assert begins(one, 1) == [] and one.bucket(5) == 0
    wide = [19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert begins(one, -1) == [*range(1, 17), *wide]


@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 5), (1, 7), (4, 0), (0, 4)])
@pytest.mark.parametrize("both", [True, False])
def test_bias_and_gradient_by_loops(library: Backend, t: int, s: int, both: bool) -> None:
    config = RelativeConfig(2, 8, 5, both)
    rng = library.generator(0, "float64")
    table, dbias = rng.normal((8, 2)), rng.normal((1, 2, t, s))
    bias, cache = relative_bias(table, n_queries=t, n_keys=s, config=config)
    assert tuple(bias.shape) == (1, 2, t, s) and bias.dtype == table.dtype
    host, bias, out = (library.to_numpy(a) for a in (table, bias, dbias))
    dtable = np.zeros_like(host)
    for i in range(t):
        for j in range(s):
            bucket = config.bucket(j - (i + s - t))
            assert (bias[0, :, i, j] == host[bucket]).all()
            dtable[bucket] += out[0, :, i, j]
    assert np.allclose(library.to_numpy(cache.backward(dbias)), dtable, rtol=1e-12, atol=1e-14)


@only("torch")
def test_bias_is_that_of_transformers(library: Backend) -> None:
    attention = t5_attention()
    from transformers import T5Config

    model = attention(T5Config(num_heads=3, is_decoder=True), has_relative_attention_bias=True)
    table = model.relative_attention_bias.weight.detach()
    config = RelativeConfig(3, bidirectional=False)
    bias, _ = relative_bias(table, n_queries=2, n_keys=301, config=config)
    wanted = model.compute_bias(2, 301, past_seen_tokens=299)
    assert np.array_equal(library.to_numpy(bias), library.to_numpy(wanted.detach()))


@only("numpy")
def test_initial_tables(library: Backend) -> None:
    rng = library.generator(0)
    assert RelativeConfig(3).init(rng).shape == (32, 3)
    ones = RelativeConfig(2, 8).init(rng, draw=lambda rng, shape: rng.full(shape, 1.0))
    assert ones.tolist() == [[1.0, 1.0]] * 8


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"n_heads": 0}, "n_heads must be an int of at least 1, got 0"),
        ({"n_buckets": 3}, "n_buckets must be an int of at least 4, got 3"),
        ({"n_buckets": 32.0}, "n_buckets must be an int of at least 4, got 32.0"),
        ({"n_buckets": 1, "bidirectional": False}, "n_buckets must be an int of at least 2, got 1"),
        ({"max_distance": 8}, "max_distance must be an int of at least 9, got 8"),
    ],
)
def test_bad_configurations(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^relative_bias: {message}$"):
        RelativeConfig(**{"n_heads": 2} | sizes)


def test_bad_tables_and_sizes() -> None:
    config = RelativeConfig(2)
    for shape in ((32, 3), (31, 2), (2, 32), (32,)):
        with pytest.raises(ValueError, match=r"^relative_bias: table must have shape \(32, 2\)"):
            relative_bias(np.ones(shape), n_queries=2, n_keys=2, config=config)
    with pytest.raises(TypeError, match=r"^relative_bias: table must be an array, got list$"):
        relative_bias([[1.0]], n_queries=2, n_keys=2, config=config)
    with pytest.raises(ValueError, match=r"^relative_bias: n_keys must be an int of at least 0"):
        relative_bias(np.ones((32, 2)), n_queries=2, n_keys=-1, config=config)
    _, cache = relative_bias(np.ones((32, 2)), n_queries=2, n_keys=3, config=config)
    with pytest.raises(ValueError, match=r"^relative_bias: dbias must have shape \(1, 2, 2, 3\)"):
        cache.backward(np.ones((2, 2, 3)))
