"""`sdpa` against loops, against other people's attention, and its options against one another."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from libraries import only

from xformer import RandomKey, ops, reference_only
from xformer.backends import Backend

KEY = RandomKey(5, 2)


def inputs(
    library: Backend, t: int = 5, s: int = 7, *, heads: int = 4, groups: int = 2
) -> dict[str, Any]:
    """q, k, v, bias, sinks and dctx: B = 2, K = 3, M = 6."""
    rng = library.generator(3, "float64")
    return {
        "q": rng.normal((2, heads, t, 3)),
        "k": rng.normal((2, groups, s, 3)),
        "v": rng.normal((2, groups, s, 6)),
        "bias": rng.normal((heads, 1, s)),
        "sinks": rng.normal((heads,)),
        "dctx": rng.normal((2, heads, t, 6)),
    }


def equal(library: Backend, a: Any, b: Any) -> bool:
    return np.array_equal(library.to_numpy(a), library.to_numpy(b))


def results(library: Backend, given: dict[str, Any], **options: Any) -> list[np.ndarray]:
    """ctx, dq, dk, dv and the gradients of the bias and sinks that are given."""
    *arrays, dctx = given.values()
    ctx, cache = ops.sdpa(*arrays, **options)
    return [library.to_numpy(a) for a in (ctx, *cache.backward(dctx)) if a is not None]


# ---- Loops ----


def looped(
    given: dict[str, Any],
    seen: np.ndarray,
    keep: np.ndarray,
    *,
    scale: float,
    softcap: float | None,
) -> np.ndarray:
    """ctx by the definition, one query at a time."""
    q, k, v, bias, sinks, dctx = given.values()
    ctx = np.zeros_like(dctx)
    n_batch, n_heads, n_queries, n_keys = seen.shape
    for b, h, i in itertools.product(range(n_batch), range(n_heads), range(n_queries)):
        g = h // (n_heads // k.shape[1])
        weights = {}
        for j in range(n_keys):
            if seen[b, h, i, j]:
                score = scale * sum(q[b, h, i, c] * k[b, g, j, c] for c in range(q.shape[3]))
                if softcap is not None:
                    score = softcap * math.tanh(score / softcap)
                weights[j] = math.exp(score + (0 if bias is None else bias[h, 0, j]))
        total = sum(weights.values()) + (0 if sinks is None else math.exp(sinks[h]))
        for j, weight in weights.items():
            ctx[b, h, i] += weight / total * keep[b, h, i, j] * v[b, g, j]
    return ctx


WINDOWS = (None, (2, None), (None, 1), (1, 2), (0, 0))


@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 5), (1, 7)])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (2, 1)])
@only("numpy")
def test_loops(library: Backend, t: int, s: int, heads: tuple[int, int]) -> None:
    full = inputs(library, t, s, heads=heads[0], groups=heads[1])
    shape = (2, heads[0], t, s)
    mask = np.random.default_rng(1).random((2, 1, t, s)) < 0.8
    mask[1, :, -1] = False  # a query that may attend to nothing
    drawn, _ = ops.dropout(np.ones(shape), rate=0.3, key=KEY)
    for window, causal, softcap, extras, rate in itertools.product(
        WINDOWS, (False, True), (None, 0.7), (False, True), (0.0, 0.3)
    ):
        given = full if extras else full | {"bias": None, "sinks": None}
        i, j = np.arange(t)[:, None] + s - t, np.arange(s)
        left, right = window or (None, None)
        seen = np.broadcast_to(mask, shape).copy()
        seen &= (left is None or j >= i - left) & (right is None or j <= i + right)
        seen &= (not causal) | (j <= i)
        keep = drawn if rate else np.ones(shape)
        wanted = looped(given, seen, keep, scale=0.6, softcap=softcap)
        options = {"mask": mask, "causal": causal, "window": window, "softcap": softcap}
        drop = {"dropout_rate": rate, "dropout_key": KEY}
        ctx = results(library, given, scale=0.6, **options, **drop)[0]
        assert np.allclose(ctx, wanted, rtol=1e-12, atol=1e-14), (options, extras, rate)


# ---- Windows ----


@pytest.mark.parametrize("window", WINDOWS[1:])
@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 5)])
def test_a_window_is_a_mask(library: Backend, t: int, s: int, window: Any) -> None:
    given = inputs(library, t, s)
    i, j = np.arange(t)[:, None] + s - t, np.arange(s)
    left, right = window
    seen = np.ones((t, s), bool)
    seen &= (left is None or j >= i - left) & (right is None or j <= i + right)
    mask = library.asarray(seen)
    windowed, masked = (
        results(library, given, **own) for own in ({"window": window}, {"mask": mask})
    )
    for a, b in zip(windowed, masked, strict=True):
        # A kernel leaves keys that no query sees out of its products: OpenBLAS's Haswell kernels
        # then round otherwise.
        np.testing.assert_allclose(a, b, rtol=0, atol=4 * np.finfo(np.float64).eps)
    with reference_only():
        windowed, masked = (
            results(library, given, **own) for own in ({"window": window}, {"mask": mask})
        )
    assert all(map(np.array_equal, windowed, masked))


@only("numpy")
def test_windows_at_the_edge(library: Backend) -> None:
    given = inputs(library)

    def same(one: dict[str, Any], other: dict[str, Any]) -> None:
        pairs = zip(results(library, given, **one), results(library, given, **other), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)

    same({"window": (None, None)}, {})
    same({"window": (10**30, 10**30)}, {})
    same({"window": (6, 4)}, {})  # S - 1 and T - 1 bound nothing
    same({"window": (None, 0)}, {"causal": True})
    same({"window": (2, 3), "causal": True}, {"window": [2, 0]})


def test_a_window_behind_counts_the_query_itself() -> None:
    """Mistral's sliding_window w: w keys in all."""
    x = np.ones((1, 1, 6, 2))
    _, cache = ops.sdpa.reference(x, x, x, causal=True, window=(4 - 1, 0))
    assert (cache.probs[0, 0] > 0).sum(axis=1).tolist() == [1, 2, 3, 4, 4, 4]


# ---- Sinks ----


def test_a_sink_is_a_key_without_a_value(library: Backend) -> None:
    """A key more, of score `sink` and value 0, gives the same, gradients included."""
    given = inputs(library)
    xp, zeros = library.xp, library.generator(0, "float64").full
    more = {
        "k": xp.concat([given["k"], zeros((2, 2, 1, 3), 0.0)], axis=2),
        "v": xp.concat([given["v"], zeros((2, 2, 1, 6), 0.0)], axis=2),
        "bias": xp.concat([given["bias"], given["sinks"][:, None, None]], axis=2),
        "sinks": None,
    }
    ctx, dq, dk, dv, dbias, dsinks = results(library, given)
    wanted = results(library, given | more)
    got = [ctx, dq, dk, dv, np.concatenate([dbias, dsinks[:, None, None]], axis=2)]
    wanted[2], wanted[3] = wanted[2][:, :, :7], wanted[3][:, :, :7]
    for a, b in zip(got, wanted, strict=True):
        assert np.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_sinks_of_minus_infinity_are_none(library: Backend) -> None:
    given = inputs(library)
    nothing = library.generator(0, "float64").full((4,), -math.inf)
    mask = np.ones((5, 7), bool)
    mask[2] = False
    options = {"mask": library.asarray(mask)}
    *got, dsinks = results(library, given | {"sinks": nothing}, **options)
    assert not dsinks.any()
    for a, b in zip(got, results(library, given | {"sinks": None}, **options), strict=True):
        assert np.array_equal(a, b)


def test_a_sink_takes_it_all_from_a_query_without_keys(library: Backend) -> None:
    given = inputs(library)
    nothing = library.asarray(np.zeros((5, 7), bool))
    assert not any(a.any() for a in results(library, given, mask=nothing))
    *arrays, _ = given.values()
    _, cache = ops.sdpa.reference(*arrays)
    total = library.xp.sum(cache.probs, axis=-1, keepdims=True) + cache.shares
    assert np.allclose(library.to_numpy(total), 1, rtol=1e-14)


@only("numpy")
def test_large_sinks_do_not_overflow(library: Backend) -> None:
    given = inputs(library)
    for sign in (-1, 1):
        arrays = given | {"sinks": np.full(4, sign * 1e4)}
        assert all(np.isfinite(a).all() for a in results(library, arrays))


# ---- Other people's attention ----


def eager(name: str) -> Any:
    """`eager_attention_forward` of a family of transformers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import importlib

    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return module.eager_attention_forward


def by_autograd(given: dict[str, Any], function: Any, mask: np.ndarray) -> list[np.ndarray]:
    """What `results` gives, from a function of transformers."""
    import torch

    *arrays, dctx = given.values()
    leaves = [x.requires_grad_() for x in arrays if x is not None]
    groups = given["q"].shape[1] // given["k"].shape[1]
    module = SimpleNamespace(num_key_value_groups=groups, training=False, sinks=given["sinks"])
    additive = torch.where(torch.asarray(mask), 0.0, -torch.inf).to(torch.float64)
    ctx = function(module, *leaves[:3], additive)[0].transpose(1, 2)
    return [a.detach().numpy() for a in (ctx, *torch.autograd.grad(ctx, leaves, dctx))]


@only("torch")
def test_sinks_as_gpt_oss_has_them(library: Backend) -> None:
    function = eager("gpt_oss")
    given = inputs(library) | {"bias": None}
    mask = np.tri(5, 7, 2, dtype=bool) & ~np.tri(5, 7, -1, dtype=bool)  # at most 3 keys
    got = results(library, given, causal=True, window=(2, None), scale=0.6)
    wanted = by_autograd(given, lambda *a: function(*a, scaling=0.6), mask)
    for a, b in zip(got, wanted, strict=True):
        assert np.allclose(a, b, rtol=1e-12, atol=1e-14)


@only("torch")
def test_softcap_as_gemma_2_has_it(library: Backend) -> None:
    function = eager("gemma2")
    given = inputs(library) | {"bias": None, "sinks": None}
    mask = np.tri(5, 7, 2, dtype=bool)
    got = results(library, given, causal=True, softcap=0.7, scale=0.6)
    wanted = by_autograd(given, lambda *a: function(*a, scaling=0.6, softcap=0.7), mask)
    for a, b in zip(got, wanted, strict=True):
        # That softmax is taken in float32, whatever the type of its input.
        assert np.allclose(a, b, rtol=1e-5, atol=1e-6)


# ---- Bad input ----


@pytest.mark.parametrize(
    "window",
    [3, (1,), (1, 2, 3), (-1, 0), (0, -1), (True, 0), (0, False), (1.0, 0), ("1", 0), "12", {1, 2}],
    ids=str,
)
def test_bad_windows(window: Any) -> None:
    x = np.ones((1, 1, 2, 3))
    message = r"^sdpa: window must be \(left, right\), each an int of at least 0 or None, got "
    with pytest.raises(ValueError, match=message):
        ops.sdpa(x, x, x, window=window)


@pytest.mark.parametrize("softcap", [0, -1.0, math.inf, -math.inf])
def test_bad_softcaps(softcap: Any) -> None:
    x = np.ones((1, 1, 2, 3))
    with pytest.raises(ValueError, match=r"^sdpa: softcap must be positive and finite, got "):
        ops.sdpa(x, x, x, softcap=softcap)


def test_softcaps_that_are_no_number() -> None:
    x = np.ones((1, 1, 2, 3))
    with pytest.raises(TypeError, match=r"^sdpa: softcap must be a number, got str$"):
        ops.sdpa(x, x, x, softcap="50")
    with pytest.raises(ValueError, match=r"^sdpa: softcap must lie in .*, got nan$"):
        ops.sdpa(x, x, x, softcap=math.nan)


def test_bad_sinks() -> None:
    x = np.ones((1, 4, 2, 3))
    for shape in ((3,), (1, 4), ()):
        with pytest.raises(ValueError, match=r"^sdpa: sinks must be \(H,\).*, got shape"):
            ops.sdpa(x, x, x, None, np.ones(shape))
    with pytest.raises(TypeError, match=r"^sdpa: sinks must be float64 like q, got float32$"):
        ops.sdpa(x, x, x, sinks=np.ones(4, np.float32))
