"""`additive_attention` against loops, against torch's autograd, and in blocks of queries."""

from __future__ import annotations

import importlib
import itertools
import math
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from judges import AUTOGRAD, require_close
from libraries import only

import xformer as xf
from xformer import backends, ops, tree
from xformer.backends import Backend
from xformer.ops import additive_attention

MODULE = importlib.import_module("xformer.ops.additive_attention")  # `ops` has the op by this name
NUMPY = backends.get("numpy")
NAMES = "q", "k", "v", "w"
ONE_QUERY, ALL_QUERIES = 1, 2**30  # sizes of a block


def inputs(
    library: Backend, t: int = 5, s: int = 7, *, heads: int = 4, groups: int = 2, width: int = 3
) -> list[Any]:
    """q, k, v, w: B = 2, A = width, M = 6."""
    rng = library.generator(3, "float64")
    shapes = (2, heads, t, width), (2, groups, s, width), (2, groups, s, 6), (heads, width)
    return [rng.normal(shape) for shape in shapes]


def masks(t: int, s: int) -> np.ndarray:
    """(2, 1, T, S), with a query that may attend to nothing."""
    mask = np.random.default_rng(1).random((2, 1, t, s)) < 0.8
    mask[1, :, -1] = False
    return mask


def looped(arrays: list[np.ndarray], seen: np.ndarray) -> np.ndarray:
    """ctx by the definition, number by number."""
    q, k, v, w = arrays
    n_batch, n_heads, n_queries, n_keys = seen.shape
    ctx = np.zeros((n_batch, n_heads, n_queries, v.shape[3]))
    for b, h, i in itertools.product(range(n_batch), range(n_heads), range(n_queries)):
        g = h // (n_heads // k.shape[1])
        powers = {}
        for j in range(n_keys):
            if seen[b, h, i, j]:
                pairs = zip(q[b, h, i], k[b, g, j], w[h], strict=True)
                powers[j] = math.exp(sum(c * math.tanh(x + y) for x, y, c in pairs))
        for j, power in powers.items():
            ctx[b, h, i] += power / sum(powers.values()) * v[b, g, j]
    return ctx


def everywhere(mask: np.ndarray | None, causal: bool, shape: tuple[int, ...]) -> np.ndarray:
    """Mask and causality together, (B, H, T, S)."""
    t, s = shape[2:]
    allowed = np.tri(t, s, s - t, dtype=bool) | (not causal)
    return np.broadcast_to(allowed if mask is None else allowed & mask, shape)


@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 5), (1, 7), (6, 6), (3, 0)])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (2, 1)])
@pytest.mark.parametrize("block", [ONE_QUERY, 2 * 3 * 7 * 3 * 2, ALL_QUERIES])
def test_loops(
    t: int, s: int, heads: tuple[int, int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "BLOCK", block)
    arrays = inputs(NUMPY, t, s, heads=heads[0], groups=heads[1])
    for mask, causal in itertools.product((None, masks(t, s)), (False, True)):
        seen = everywhere(mask, causal, (2, heads[0], t, s))
        ctx, _ = additive_attention(*arrays, mask=mask, causal=causal)
        assert np.allclose(ctx, looped(arrays, seen), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 5), (1, 7)])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (3, 1)])
@pytest.mark.parametrize("block", [ONE_QUERY, ALL_QUERIES])
def test_gradients_are_those_of_the_plain_formula(
    t: int, s: int, heads: tuple[int, int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's autograd, of all (B, H, T, S, A) at once, with keys and values repeated."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(MODULE, "BLOCK", block)
    arrays = inputs(NUMPY, t, s, heads=heads[0], groups=heads[1])
    dctx = np.random.default_rng(2).normal(size=(2, heads[0], t, 6))
    for mask, causal in itertools.product((None, masks(t, s)), (False, True)):
        q, k, v, w = leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
        keys, values = (torch.repeat_interleave(a, heads[0] // heads[1], dim=1) for a in (k, v))
        hidden = torch.tanh(q[:, :, :, None, :] + keys[:, :, None, :, :])
        seen = torch.tensor(everywhere(mask, causal, (2, heads[0], t, s)))
        powers = torch.exp(torch.sum(w[:, None, None, :] * hidden, dim=-1)) * seen
        total = torch.sum(powers, dim=-1, keepdim=True)
        wanted = (powers / torch.where(total == 0, 1.0, total)) @ values
        grads = torch.autograd.grad(wanted, leaves, torch.tensor(dctx))
        ctx, cache = additive_attention(*arrays, mask=mask, causal=causal)
        got = dict(zip(("ctx", *NAMES), (ctx, *cache.backward(dctx)), strict=True))
        judged = (a.detach().numpy() for a in (wanted, *grads))
        require_close(got, dict(zip(("ctx", *NAMES), judged, strict=True)), AUTOGRAD)


def test_the_papers_alignment_model() -> None:
    """One step of its decoder: s attends to annotations h_j through W_a, U_a and v_a."""
    rng = np.random.default_rng(4)
    s, h = rng.normal(size=3), rng.normal(size=(7, 6))
    w_a, u_a, v_a = rng.normal(size=(5, 3)), rng.normal(size=(5, 6)), rng.normal(size=5)
    e = np.array([v_a @ np.tanh(w_a @ s + u_a @ h_j) for h_j in h])
    wanted = np.exp(e) / np.exp(e).sum() @ h
    zeros = np.zeros(5)
    q, _ = ops.linear(s[None, None, None], w_a.T, zeros)
    k, _ = ops.linear(h[None, None], u_a.T, zeros)
    ctx, _ = additive_attention(q, k, h[None, None], v_a[None])
    assert np.allclose(ctx[0, 0, 0], wanted, rtol=1e-13)


def test_the_size_of_a_block_changes_nothing(
    library: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = inputs(library)
    results = []
    for block in (ALL_QUERIES, 2 * 4 * 7 * 3 * 2):  # 5 queries, then 2, 2 and 1
        monkeypatch.setattr(MODULE, "BLOCK", block)
        ctx, cache = additive_attention(*arrays, causal=True)
        results.append([library.to_numpy(a) for a in (ctx, *cache.backward(ctx))])
    for a, b in zip(*results, strict=True):
        assert np.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `hidden` would take 34 MB here. Only inputs and probs, 0.7 MB, are saved."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) for shape in ((1, 1, 128, 256), (1, 1, 128, 256))]
    arrays += [rng.normal(size=(1, 1, 128, 3)), rng.normal(size=(1, 256))]
    full = 8 * 128 * 128 * 256

    def peak() -> int:
        tracemalloc.start()
        ctx, cache = additive_attention(*arrays)
        cache.backward(ctx)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        n_bytes = sum(a.nbytes for a in arrays)
        assert tree.nbytes(cache) == n_bytes + 8 * 128 * 128
        return most

    assert peak() < full / 4
    monkeypatch.setattr(MODULE, "BLOCK", ALL_QUERIES)
    assert peak() > full


@pytest.mark.parametrize("causal", [False, True])
def test_rows_with_nothing_to_attend_to(library: Backend, causal: bool) -> None:
    """They give 0, and no gradient to anything."""
    arrays = inputs(library)
    for mask, rows in ((np.zeros((5, 7), bool), slice(None)), (np.arange(5)[:, None] != 2, 2)):
        ctx, cache = additive_attention(*arrays, mask=library.asarray(mask), causal=causal)
        assert not library.to_numpy(ctx)[:, :, rows].any()
        dctx = np.zeros((2, 4, 5, 6))
        dctx[:, :, rows] = 1.0
        for grad in cache.backward(library.asarray(dctx)):
            assert not library.to_numpy(grad).any()


def test_forbidden_keys_do_not_matter() -> None:
    q, k, v, w = inputs(NUMPY)
    wanted, _ = additive_attention(q, k[:, :, 2:], v[:, :, 2:], w)
    mask = np.arange(7) >= 2
    ctx, _ = additive_attention(q, np.where(mask[:, None], k, np.nan), v, w, mask=mask)
    assert np.allclose(ctx, wanted, rtol=1e-13)


def test_without_a_choice_the_values_are_averaged(library: Backend) -> None:
    q, k, v, w = inputs(library)
    mean = library.to_numpy(v).repeat(2, axis=1).mean(axis=2, keepdims=True)
    for arrays in ((q, k, v, w * 0), (q[..., :0], k[..., :0], v, w[:, :0])):
        ctx, _ = additive_attention(*arrays)
        assert np.allclose(library.to_numpy(ctx), mean + np.zeros((5, 1)), rtol=1e-13)


def test_saturation() -> None:
    """Scores stay within the sum of |w|, and what rounds to 1 has no slope."""
    q, k, v, w = inputs(NUMPY)
    ctx, cache = additive_attention(q * 0 + 1e30, k, v, w)
    dq, dk, dv, dw = cache.backward(ctx)
    assert not dq.any() and not dk.any()
    assert np.isfinite(dv).all() and np.allclose(dw, 0, atol=1e-14)
    assert np.allclose(ctx, v.repeat(2, axis=1).mean(axis=2, keepdims=True), rtol=1e-13)


def test_the_last_query_alone(library: Backend) -> None:
    """As when decoding: causality is aligned to the end."""
    q, *rest = inputs(library)
    whole, _ = additive_attention(q, *rest, causal=True)
    last, _ = additive_attention(q[:, :, -1:, :], *rest, causal=True)
    whole, last = library.to_numpy(whole), library.to_numpy(last)
    assert np.allclose(whole[:, :, -1:], last, rtol=1e-12, atol=1e-14)


def changed(**others: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(NAMES, inputs(NUMPY), strict=True)) | others


Q, K, V, W = inputs(NUMPY)


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"q": Q[0]}, ValueError, "q must be (B, H, T, A), got shape (4, 5, 3)"),
        (
            {"k": K[..., :2]},
            ValueError,
            "k must be (B, G, S, A) with B = 2 (from q), A = 3 (from q), got shape (2, 2, 7, 2)",
        ),
        (
            {"v": V[:, :, :6]},
            ValueError,
            "v must be (B, G, S, M) with B = 2 (from q), G = 2 (from k), S = 7 (from k), "
            "got shape (2, 2, 6, 6)",
        ),
        (
            {"w": W[0]},
            ValueError,
            "w must be (H, A) with H = 4 (from q), A = 3 (from q), got shape (3,)",
        ),
        (
            {"w": W[:2]},
            ValueError,
            "w must be (H, A) with H = 4 (from q), A = 3 (from q), got shape (2, 3)",
        ),
        ({"w": None}, TypeError, "w must be an array, got None"),
        ({"w": W.astype("float32")}, TypeError, "w must be float64 like q, got float32"),
        ({"q": Q.astype("int64")}, TypeError, "q must be float32 or float64, got int64"),
        (
            {"q": Q[:, :3], "w": W[:3]},
            ValueError,
            "the 2 heads of k must divide the 3 heads of q",
        ),
        (
            {"k": K[:, :0], "v": V[:, :0]},
            ValueError,
            "k must have at least one head, got shape (2, 0, 7, 3)",
        ),
    ],
)
def test_bad_arrays(arrays: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^additive_attention: {re.escape(message)}$"):
        additive_attention(**changed(**arrays))


def test_bad_masks_and_gradients() -> None:
    with pytest.raises(TypeError, match=r"^additive_attention: mask must be boolean .* float64"):
        additive_attention(Q, K, V, W, mask=np.ones((5, 7)))
    wanted = r"mask must broadcast to \(B, H, T, S\) = \(2, 4, 5, 7\), got shape \(7, 5\)$"
    with pytest.raises(ValueError, match=f"^additive_attention: {wanted}"):
        additive_attention(Q, K, V, W, mask=np.ones((7, 5), bool))
    ctx, cache = additive_attention(Q, K, V, W)
    wanted = r"dctx must have shape \(2, 4, 5, 6\), got \(2, 4, 5, 5\)$"
    with pytest.raises(ValueError, match=f"^additive_attention: {wanted}"):
        cache.backward(ctx[..., :5])
    with pytest.raises(TypeError, match=r"^additive_attention: dctx must be float64, got float32$"):
        cache.backward(ctx.astype("float32"))


@pytest.mark.parametrize("block", [2 * 4 * 7 * 3 * 2, ALL_QUERIES])
@only("numba")
def test_a_program_of_it(library: Backend, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded like any reference. No instruction runs as Python."""
    from programs import judged, names

    monkeypatch.setattr(MODULE, "BLOCK", block)
    arrays = [a.astype("float32") for a in inputs(NUMPY)]
    dctx = np.random.default_rng(2).normal(size=(2, 4, 5, 6)).astype("float32")
    arrays += [dctx, masks(5, 7)]

    def both(q: Any, k: Any, v: Any, w: Any, dctx: Any, mask: Any) -> list[Any]:
        ctx, cache = additive_attention(q, k, v, w, mask=mask, causal=True)
        return [ctx, *cache.backward(dctx)]

    run = judged(both, arrays)
    assert names(run).count("tanh") == (2 if block == ALL_QUERIES else 6)
    compiled = xf.compile(both)
    compiled(*arrays)
    assert "; 0 run as Python" in compiled.explain()
