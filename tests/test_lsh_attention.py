"""LSH attention against loops over rounds, chunks and pairs, full attention, and transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import only

from xformer import RandomKey, backends, ops, tree
from xformer.backends import Backend
from xformer.ops.lsh_attention import lsh_buckets

KEY = RandomKey(3, site=7)
B, H, T, K, M = 2, 3, 24, 5, 4


def example(library: Backend, length: int = T, dtype: str = "float64") -> tuple[Any, Any]:
    rng = library.generator(0, dtype)
    return rng.normal((B, H, length, K)), rng.normal((B, H, length, M))


def by_loops(
    qk: Any, v: Any, buckets: Any, chunk_len: int, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """ctx, and the number of keys of each query: the softmax over a set of keys, query by query."""
    ctx, sizes = np.zeros_like(v), np.zeros(qk.shape[:3], int)
    length = qk.shape[2]
    n = length // chunk_len
    for b, h in np.ndindex(*qk.shape[:2]):
        for i in range(length):
            keys: set[int] = set()
            for of_round in buckets[b, h]:
                order = sorted(range(length), key=lambda t: (of_round[t], t))
                chunk = order.index(i) // chunk_len
                for c in (chunk, (chunk - 1) % n):
                    keys |= set(order[c * chunk_len : (c + 1) * chunk_len])
            allowed = [j for j in sorted(keys) if j != i and not (causal and j > i)] or [i]
            query = qk[b, h, i]
            scores = [query @ qk[b, h, j] / np.linalg.norm(qk[b, h, j]) for j in allowed]
            e = np.exp(np.asarray(scores) - max(scores))
            ctx[b, h, i] = e / e.sum() @ v[b, h, allowed]
            sizes[b, h, i] = len(allowed)
    return ctx, sizes


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("n_rounds", "chunk_len"), [(1, 4), (3, 4), (2, 12), (2, 24), (4, 1), (2, 3)]
)
def test_loops_over_rounds_and_pairs(
    library: Backend, n_rounds: int, chunk_len: int, causal: bool
) -> None:
    """A key of several rounds counts once; a token counts for itself only if it is alone."""
    qk, v = example(library)
    options: Any = {"key": KEY, "n_buckets": 6, "n_rounds": n_rounds}
    ctx, _ = ops.lsh_attention(qk, v, chunk_len=chunk_len, causal=causal, **options)
    buckets = library.to_numpy(lsh_buckets(qk, **options))
    host = (library.to_numpy(a) for a in (qk, v))
    wanted, sizes = by_loops(*host, buckets, chunk_len, causal)
    np.testing.assert_allclose(library.to_numpy(ctx), wanted, rtol=1e-11, atol=1e-12)
    assert sizes.min() >= 1 and (sizes.max() < T - 1 or 2 * chunk_len >= T or n_rounds > 2)


@only("numpy")
@pytest.mark.parametrize("causal", [False, True])
def test_lone_tokens_in_float32(library: Backend, causal: bool) -> None:
    """The first token of a causal text is v itself, though its score is -1e5 in four rounds."""
    qk, v = example(library, dtype="float32")
    options: Any = {"key": KEY, "n_buckets": 4, "n_rounds": 4, "chunk_len": 6}
    ctx, _ = ops.lsh_attention(qk, v, causal=causal, **options)
    close = np.allclose(ctx[:, :, 0], v[:, :, 0], rtol=1e-6)
    assert close == causal


@pytest.mark.parametrize("chunk_len", [T, T // 2])
def test_all_keys_are_full_attention(library: Backend, chunk_len: int) -> None:
    """With one chunk, or two that attend to each other: sdpa with shared queries and keys."""
    qk, v = example(library)
    options: Any = {"key": KEY, "n_buckets": 2, "chunk_len": chunk_len, "n_rounds": 2}
    ctx, cache = ops.lsh_attention(qk, v, causal=False, **options)
    k, norm = ops.l2_normalize(qk)
    mask = library.asarray(~np.eye(T, dtype=bool))
    wanted, full = ops.sdpa(qk, k, v, mask=mask, scale=1.0)
    dqk, dv = cache.backward(v)
    dq, dk, wanted_dv, _, _ = full.backward(v)
    for got, right in ((ctx, wanted), (dqk, dq + norm.backward(dk)), (dv, wanted_dv)):
        np.testing.assert_allclose(
            library.to_numpy(got), library.to_numpy(right), rtol=1e-10, atol=1e-12
        )


@only("numpy")
def test_many_rounds_approach_full_attention(library: Backend) -> None:
    qk, v = example(library)
    k, _ = ops.l2_normalize(qk)
    full, _ = ops.sdpa(qk, k, v, mask=~np.eye(T, dtype=bool), scale=1.0)
    off = []
    for n_rounds in (1, 4, 40):
        options: Any = {"key": KEY, "n_buckets": 6, "chunk_len": 4, "n_rounds": n_rounds}
        off.append(np.abs(ops.lsh_attention(qk, v, **options)[0] - full).max())
    assert off[0] > 2 * off[1] > 20 * off[2]


# ---- The hash ----


def test_buckets_are_the_same_everywhere(library: Backend) -> None:
    qk, _ = example(library)
    options: Any = {"key": KEY, "n_buckets": 8, "n_rounds": 3}
    got = library.to_numpy(lsh_buckets(qk, **options))
    host = library.to_numpy(qk)
    assert np.array_equal(got, lsh_buckets(host, **options))
    assert got.shape == (B, H, 3, T) and set(np.unique(got)) == set(range(8))
    other = lsh_buckets(host, **options | {"key": KEY.at(1)})
    assert (other != got).mean() > 0.5


@only("numpy")
def test_like_vectors_share_buckets(library: Backend) -> None:
    """Opposite ones are half of the buckets apart; the length does not matter."""
    qk, _ = example(library)
    options: Any = {"key": KEY, "n_buckets": 8, "n_rounds": 3}
    buckets = lsh_buckets(qk, **options)
    assert np.array_equal(lsh_buckets(3 * qk, **options), buckets)
    assert np.array_equal(lsh_buckets(-qk, **options), (buckets + 4) % 8)
    near = lsh_buckets(qk + 0.01 * np.roll(qk, 1, axis=2), **options)
    assert (near == buckets).mean() > 0.95


@only("numpy")
def test_rotations_are_normal(library: Backend) -> None:
    """Buckets of many vectors are equally likely."""
    x = library.generator(5, "float64").normal((1, 4, 20_000, 6))
    buckets = lsh_buckets(x, key=KEY, n_buckets=6, n_rounds=50)
    shares = np.bincount(buckets.reshape(-1), minlength=6) / buckets.size
    assert np.abs(shares - 1 / 6).max() < 0.01


# ---- transformers' Reformer ----


@pytest.mark.parametrize("chunk_len", [4, 12])
def test_transformers(chunk_len: int) -> None:
    """One round of its decoder layer, which is given our buckets (it draws other rotations)."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    reformer = pytest.importorskip(
        "transformers.models.reformer.modeling_reformer", reason="transformers is not installed"
    )
    from transformers import ReformerConfig

    config = ReformerConfig(
        attention_head_size=K,
        num_attention_heads=H,
        hidden_size=H * K,
        lsh_attn_chunk_length=chunk_len,
        num_buckets=6,
        num_hashes=1,
        is_decoder=True,
        attn_layers=["lsh"],
        lsh_attention_probs_dropout_prob=0.0,
    )
    theirs = reformer.LSHSelfAttention(config, layer_idx=0).double().eval()
    x = torch.randn(B, T, H * K, dtype=torch.float64, generator=torch.manual_seed(0))
    x.requires_grad_()

    def heads(y: Any) -> np.ndarray:
        return y.detach().reshape(B, T, H, K).permute(0, 2, 1, 3).numpy().copy()

    qk, v = heads(theirs.query_key(x)), heads(theirs.value(x))
    options: Any = {"key": KEY, "n_buckets": 6, "n_rounds": 1}
    buckets = torch.tensor(lsh_buckets(qk, **options))
    ctx, cache = ops.lsh_attention(qk, v, chunk_len=chunk_len, causal=True, **options)
    y = theirs(x, buckets=buckets).hidden_states
    wanted = heads(y)
    # Its norm of keys has eps 1e-6.
    np.testing.assert_allclose(ctx, wanted, rtol=1e-4, atol=1e-5)
    dy = torch.randn(y.shape, dtype=torch.float64, generator=torch.manual_seed(1))
    (dx,) = torch.autograd.grad(y, x, dy)
    dqk, dv = (a.transpose(0, 2, 1, 3).reshape(B, T, H * K) for a in cache.backward(heads(dy)))
    w_qk, w_v = (m.weight.detach().numpy() for m in (theirs.query_key, theirs.value))
    np.testing.assert_allclose(dqk @ w_qk + dv @ w_v, dx.numpy(), rtol=1e-3, atol=1e-4)


# ---- What is saved, and bad input ----


@only("numpy")
def test_what_is_saved_grows_with_the_length(library: Backend) -> None:
    """No scores: twice the tokens, twice the bytes."""
    options: Any = {"key": KEY, "n_buckets": 6, "chunk_len": 4, "n_rounds": 2}
    one, two = (
        tree.nbytes(ops.lsh_attention(*example(library, n), **options)[1]) for n in (T, 2 * T)
    )
    assert two == 2 * one


def test_bad_input() -> None:
    qk, v = example(backends.get("numpy"))
    good: dict[str, Any] = {"key": KEY, "n_buckets": 4, "chunk_len": 4}
    for options, error, message in (
        ({"chunk_len": 5}, ValueError, r"chunk_len must divide T = 24, got 5"),
        ({"chunk_len": 0}, ValueError, r"chunk_len must be an int of at least 1, got 0"),
        ({"n_buckets": 3}, ValueError, r"n_buckets must be even, got 3"),
        ({"n_rounds": 0}, ValueError, r"n_rounds must be an int of at least 1, got 0"),
        ({"key": None}, TypeError, r"key must be an xformer.RandomKey, got None"),
    ):
        with pytest.raises(error, match=rf"^lsh_attention: {message}"):
            ops.lsh_attention(qk, v, **good | options)
    with pytest.raises(ValueError, match=r"^lsh_attention: v must be \(B, H, T, M\)"):
        ops.lsh_attention(qk, v[:, :, :4], **good)
    _, cache = ops.lsh_attention(qk, v, **good)
    with pytest.raises(ValueError, match=r"^lsh_attention: dctx must have shape"):
        cache.backward(v[:, :1])
