"""What the ops promise beyond their gradients, which test_gradients.py checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from judges import by_hand
from libraries import LIBRARIES, only
from xformer.backends import Backend, Generator

from xformer import Key, ops, tree
from xformer.catalogue import Case, cases

# ---- What sdpa promises exactly ----


def attention_inputs(backend: Backend, t: int = 5, s: int = 7) -> tuple[Any, ...]:
    """q, k, v, a bias and dctx."""
    rng = backend.generator(2, "float64")
    shapes = (2, 3, t, 11), (2, 3, s, 11), (2, 3, s, 13), (2, 3, t, s), (2, 3, t, 13)
    return tuple(rng.normal(shape) for shape in shapes)


def test_a_query_with_no_key_gives_zero_and_gradient_zero(library: Backend) -> None:
    *inputs, dctx = attention_inputs(library)
    mask = np.ones((2, 1, 5, 7), dtype=bool)
    mask[:, :, 3], mask[1] = False, False  # one query, and a whole sequence
    ctx, cache = ops.sdpa(*inputs, mask=library.asarray(mask))
    dq, dk, dv, dbias = map(library.to_numpy, cache.backward(dctx)[:4])
    for rows in (library.to_numpy(ctx), dq, dbias):
        assert not rows[:, :, 3].any() and not rows[1].any()
        assert rows[0].any(axis=(0, -1)).tolist() == [True, True, True, False, True]
    assert not dk[1].any() and not dv[1].any() and dk[0].any() and dv[0].any()


@pytest.mark.parametrize(("t", "s"), [(5, 7), (5, 5), (7, 5), (1, 7)])
def test_causal_is_aligned_to_the_last_query(library: Backend, t: int, s: int) -> None:
    *inputs, dctx = attention_inputs(library, t, s)
    seen = np.tri(t, s, s - t, dtype=bool)  # the last query sees every key
    assert seen[-1].all()
    causal, causal_cache = ops.sdpa(*inputs, causal=True)
    masked, masked_cache = ops.sdpa(*inputs, mask=library.asarray(seen))
    pairs = zip(causal_cache.backward(dctx)[:4], masked_cache.backward(dctx)[:4], strict=True)
    for a, b in ((causal, masked), *pairs):
        assert np.array_equal(library.to_numpy(a), library.to_numpy(b))


def test_what_is_masked_does_not_matter(library: Backend) -> None:
    q, k, v, _, dctx = attention_inputs(library)
    mask = library.asarray([True, False, True, True, False, True, False])
    other = library.asarray([[0.0], [1e30], [0.0], [0.0], [-1e30], [0.0], [1e30]], "float64")
    ctx, cache = ops.sdpa(q, k, v, mask=mask)
    ctx2, cache2 = ops.sdpa(q, k + other, v + other, mask=mask)
    assert np.array_equal(library.to_numpy(ctx), library.to_numpy(ctx2))
    for a, b in zip(cache.backward(dctx)[:3], cache2.backward(dctx)[:3], strict=True):
        assert np.array_equal(library.to_numpy(a), library.to_numpy(b))


# ---- Numbers at the edge ----


@pytest.mark.parametrize("case", [c for c in cases() if c.room == "ops"], ids=lambda c: c.name)
@only(*(name for name in LIBRARIES if name != "jax"))  # which compiles all anew, for long
def test_large_inputs_stay_finite(case: Case, library: Backend) -> None:
    def make(rng: Generator, backend: Backend) -> Any:
        fn, args = case.make(rng, backend)
        return fn, tree.map(lambda a: a * 1000, args)

    for name, a in by_hand(replace(case, make=make), library, "float32").items():
        assert np.isfinite(a).all(), name


def test_dropout_drops_the_same_everywhere(library: Backend) -> None:
    key, shape = Key(seed=2**40 + 1, step=5, site=3), (7, 11, 13)
    options = {"rate": 0.3, "key": key}
    y, _ = ops.dropout(library.generator(0, "float64").full(shape, 1.0), **options)
    host, _ = ops.dropout(np.ones(shape), **options)
    assert np.array_equal(library.to_numpy(y), host)
    kept = host != 0
    assert (host[kept] == 1 / (1 - 0.3)).all()
    assert abs(kept.mean() - 0.7) < 4 * np.sqrt(0.3 * 0.7 / kept.size)
