"""`shaw` against loops, and what it shares with `sdpa`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from libraries import only

from xformer import RandomKey, backends, ops
from xformer.backends import Backend
from xformer.ops.shaw import gather, spread

KEY = RandomKey(5, 2)
NUMPY = backends.get("numpy")


def inputs(
    library: Backend, t: int = 5, s: int = 7, furthest: int = 2, *, heads: int = 4, groups: int = 2
) -> list[Any]:
    """q, k, v, rel_k, rel_v: B = 2, K = 3, M = 6, L = furthest."""
    rng = library.generator(3, "float64")
    n = 2 * furthest + 1
    shapes = (2, heads, t, 3), (2, groups, s, 3), (2, groups, s, 6), (n, 3), (n, 6)
    return [rng.normal(shape) for shape in shapes]


def looped(arrays: list[Any], seen: np.ndarray, keep: np.ndarray, scale: float) -> np.ndarray:
    """ctx by the definition, one query at a time."""
    q, k, v, rel_k, rel_v = arrays
    furthest = rel_k.shape[0] // 2
    n_batch, n_heads, n_queries, n_keys = seen.shape
    ctx = np.zeros((n_batch, n_heads, n_queries, v.shape[3]))
    for b, h, i in itertools.product(range(n_batch), range(n_heads), range(n_queries)):
        g = h // (n_heads // k.shape[1])
        weights, values = {}, {}
        for j in range(n_keys):
            distance = j - (i + n_keys - n_queries)
            c = furthest + min(max(distance, -furthest), furthest)
            if seen[b, h, i, j]:
                weights[j] = math.exp(scale * float(q[b, h, i] @ (k[b, g, j] + rel_k[c])))
            values[j] = v[b, g, j] + (0 if rel_v is None else rel_v[c])
        for j, weight in weights.items():
            ctx[b, h, i] += weight / sum(weights.values()) * keep[b, h, i, j] * values[j]
    return ctx


@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 5), (1, 7), (6, 6)])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (2, 1)])
@only("numpy")
def test_loops(library: Backend, t: int, s: int, heads: tuple[int, int]) -> None:
    shape = (2, heads[0], t, s)
    mask = np.random.default_rng(1).random((2, 1, t, s)) < 0.8
    mask[1, :, -1] = False  # a query that may attend to nothing
    drawn, _ = ops.dropout(np.ones(shape), rate=0.3, key=KEY)
    for furthest, causal, values, rate in itertools.product(
        (0, 1, 2, 9), (False, True), (False, True), (0.0, 0.3)
    ):
        arrays = inputs(library, t, s, furthest, heads=heads[0], groups=heads[1])
        arrays[4] = arrays[4] if values else None
        seen = np.broadcast_to(mask & (np.tri(t, s, s - t, dtype=bool) | (not causal)), shape)
        wanted = looped(arrays, seen, drawn if rate else np.ones(shape), 0.6)
        options = {"mask": mask, "causal": causal, "scale": 0.6}
        ctx, _ = ops.shaw(*arrays, **options, dropout_rate=rate, dropout_key=KEY)
        assert np.allclose(ctx, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 5), (1, 7), (6, 1)])
@pytest.mark.parametrize("n_rows", [1, 3, 5, 17])
@only("numpy")
def test_gather_is_the_transpose_of_spread(library: Backend, t: int, s: int, n_rows: int) -> None:
    rng = library.generator(0, "float64")
    x, y = rng.normal((2, 3, t, n_rows)), rng.normal((2, 3, t, s))
    assert np.isclose(np.sum(spread(x, s) * y), np.sum(x * gather(y, n_rows)), rtol=1e-12)


def test_tables_of_zeros_give_sdpa(library: Backend) -> None:
    q, k, v, *tables = inputs(library)
    zeros = [library.xp.zeros_like(table) for table in tables]
    for tables in (zeros, zeros[:1]):
        ctx, cache = ops.shaw(q, k, v, *tables, causal=True)
        wanted, other = ops.sdpa(q, k, v, causal=True)
        pairs = zip(
            (ctx, *cache.backward(ctx)[:3]), (wanted, *other.backward(ctx)[:3]), strict=True
        )
        for a, b in pairs:
            assert np.allclose(library.to_numpy(a), library.to_numpy(b), rtol=1e-12, atol=1e-14)


def test_the_last_query_alone(library: Backend) -> None:
    """As when decoding: distances are counted from the end."""
    q, *rest = inputs(library)
    whole, _ = ops.shaw(q, *rest, causal=True)
    last, _ = ops.shaw(q[:, :, -1:, :], *rest, causal=True)
    whole, last = library.to_numpy(whole), library.to_numpy(last)
    assert np.allclose(whole[:, :, -1:], last, rtol=1e-12, atol=1e-14)


def test_bad_tables() -> None:
    q, k, v, rel_k, rel_v = inputs(NUMPY)
    for rows in (0, 4):
        message = rf"^shaw: rel_k must have an odd number of rows.*, got shape \({rows}, 3\)$"
        with pytest.raises(ValueError, match=message):
            ops.shaw(q, k, v, rel_k[:rows])
    message = (
        r"^shaw: rel_v must be \(2L\+1, M\) with 2L\+1 = 5 \(from rel_k\), M = 6 \(from v\), g"
    )
    with pytest.raises(ValueError, match=message):
        ops.shaw(q, k, v, rel_k, rel_v[:3])
    with pytest.raises(
        ValueError, match=r"^shaw: rel_k must be \(2L\+1, K\) with K = 3 \(from q\)"
    ):
        ops.shaw(q, k, v, rel_v)
    with pytest.raises(ValueError, match=r"^shaw: the 2 heads of k must divide the 3 heads of q$"):
        ops.shaw(q[:, :3], k, v, rel_k)


def test_bad_masks() -> None:
    q, k, v, rel_k, _ = inputs(NUMPY)
    with pytest.raises(TypeError, match=r"^shaw: mask must be boolean"):
        ops.shaw(q, k, v, rel_k, mask=np.ones((5, 7)))
    message = r"^shaw: mask must broadcast to \(B, H, T, S\) = \(2, 4, 5, 7\), got shape \(7, 5\)$"
    with pytest.raises(ValueError, match=message):
        ops.shaw(q, k, v, rel_k, mask=np.ones((7, 5), bool))
