"""`xl_attention` against loops, torch's autograd and XLNet, and what it shares with `sdpa`."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from judges import AUTOGRAD, require_close
from libraries import only

import xformer as xf
from xformer import RandomKey, backends, ops
from xformer.backends import Backend
from xformer.ops import xl_attention as op
from xformer.ops.xl_attention import shift, unshift

KEY = RandomKey(5, 2)
NUMPY = backends.get("numpy")
NAMES = "q", "k", "v", "r", "content_bias", "position_bias"


def inputs(
    library: Backend,
    t: int = 5,
    s: int = 7,
    *,
    causal: bool = False,
    heads: int = 4,
    groups: int = 2,
) -> list[Any]:
    """q, k, v, r, content_bias, position_bias: B = 2, K = 3, M = 6."""
    rng = library.generator(3, "float64")
    n = s if causal else s + t - 1
    shapes = (2, heads, t, 3), (2, groups, s, 3), (2, groups, s, 6), (groups, n, 3)
    return [rng.normal(shape) for shape in (*shapes, (heads, 3), (heads, 3))]


def masks(t: int, s: int) -> np.ndarray:
    """(2, 1, T, S), with a query that may attend to nothing."""
    mask = np.random.default_rng(1).random((2, 1, t, s)) < 0.8
    mask[1, :, -1] = False
    return mask


def looped(
    leaves: list[Any], seen: np.ndarray, keep: np.ndarray, scale: float, zeros: Any, exp: Any
) -> Any:
    """The rows (B, H, T) of ctx by the definition, one query and one key at a time."""
    q, k, v, r, content, position = leaves
    n_batch, n_heads, n_queries, n_keys = seen.shape
    rows = {}
    for b, h, i in itertools.product(range(n_batch), range(n_heads), range(n_queries)):
        g = h // (n_heads // k.shape[1])
        weights = {}
        for j in range(n_keys):
            if seen[b, h, i, j]:
                distance = i + n_keys - n_queries - j
                of_content = (q[b, h, i] + content[h]) @ k[b, g, j]
                of_position = (q[b, h, i] + position[h]) @ r[g, n_keys - 1 - distance]
                weights[j] = exp(scale * (of_content + of_position))
        total = sum(weights.values())
        parts = [w / total * float(keep[b, h, i, j]) * v[b, g, j] for j, w in weights.items()]
        rows[b, h, i] = sum(parts, start=zeros)
    return rows


@pytest.mark.parametrize(("t", "s"), [(3, 5), (4, 3), (1, 5), (4, 4)])
@pytest.mark.parametrize("heads", [(2, 2), (2, 1)])
def test_loops_and_their_gradients_by_autograd(t: int, s: int, heads: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    shape = (2, heads[0], t, s)
    drawn, _ = ops.dropout(np.ones(shape), rate=0.3, key=KEY)
    dctx = np.random.default_rng(2).normal(size=(*shape[:3], 6))
    for causal, mask, rate in itertools.product((False, True), (None, masks(t, s)), (0.0, 0.3)):
        arrays = inputs(NUMPY, t, s, causal=causal, heads=heads[0], groups=heads[1])
        seen = np.tri(t, s, s - t, dtype=bool) | (not causal)
        seen = np.broadcast_to(seen if mask is None else seen & mask, shape)
        leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
        keep = drawn if rate else np.ones(shape)
        zeros = torch.zeros(6, dtype=torch.float64) + 0 * sum(a.sum() for a in leaves)
        rows = looped(leaves, seen, keep, 0.6, zeros, torch.exp)
        wanted = torch.stack(list(rows.values())).reshape(dctx.shape)
        judged = [wanted, *torch.autograd.grad(wanted, leaves, torch.tensor(dctx))]
        options: Any = {"dropout_rate": rate, "dropout_key": KEY if rate else None}
        ctx, cache = op(*arrays, mask=mask, causal=causal, scale=0.6, **options)
        got = dict(zip(("ctx", *NAMES), (ctx, *cache.backward(dctx)), strict=True))
        by_torch = (a.detach().numpy() for a in judged)
        require_close(got, dict(zip(("ctx", *NAMES), by_torch, strict=True)), AUTOGRAD)


@pytest.mark.parametrize("n_earlier", [0, 3, 8])
def test_xlnet(n_earlier: int) -> None:
    """The attention of XLNet, which took it from Transformer-XL, with and without a memory."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind = transformers.models.xlnet.modeling_xlnet.XLNetRelativeAttention
    config = transformers.XLNetConfig(vocab_size=7, d_model=12, n_head=4, n_layer=1, dropout=0.0)
    judge = kind(config).double()
    t, s = 5, 5 + n_earlier
    q, k, v, r, content, position = inputs(NUMPY, t, s, heads=4, groups=4)
    leaves = [torch.tensor(a, requires_grad=True) for a in (q, k, v, r, content, position)]
    judge.r_w_bias, judge.r_r_bias = (torch.nn.Parameter(a.detach()) for a in leaves[4:])
    first = torch.zeros((1, 4, 3), dtype=torch.float64)  # of the distance S, which it cuts off
    by_position = torch.cat([first, leaves[3].permute(1, 0, 2)])[:, None].expand(-1, 2, -1, -1)
    heads = (a.permute(2, 0, 1, 3) for a in leaves[:3])
    allowed = np.tri(t, s, s - t)
    forbidden = torch.tensor(1 - allowed)[:, :, None, None]
    wanted = judge.rel_attn_core(*heads, by_position, attn_mask=forbidden).permute(1, 2, 0, 3)
    dctx = np.random.default_rng(2).normal(size=(2, 4, t, 6))
    biases = [judge.r_w_bias, judge.r_r_bias]
    grads = torch.autograd.grad(wanted, [*leaves[:4], *biases], torch.tensor(dctx))
    judged = {"ctx": wanted, **dict(zip(NAMES, grads, strict=True))}
    by_torch = {name: a.detach().numpy() for name, a in judged.items()}
    ctx, cache = op(q, k, v, r, content, position, mask=allowed > 0)
    require_close(dict(zip(judged, (ctx, *cache.backward(dctx)), strict=True)), by_torch, AUTOGRAD)
    ctx, cache = op(q, k, v, r[:, :s], content, position, causal=True)
    got = dict(zip(judged, (ctx, *cache.backward(dctx)), strict=True))
    by_torch["r"] = by_torch["r"][:, :s]  # a causal query meets no negative distance
    require_close(got, by_torch, AUTOGRAD)


@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 5), (1, 7), (6, 1), (4, 0), (0, 4), (0, 0)])
def test_shift(t: int, s: int) -> None:
    """It looks up T - 1 - i + j, and `unshift` is its transpose."""
    for n in (s, s + t - 1) if t else (s,):
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(2, 3, t, n)), rng.normal(size=(2, 3, t, s))
        got = shift(x, s)
        assert got.shape == y.shape
        for i, j in itertools.product(range(t), range(s)):
            c = t - 1 - i + j
            assert np.array_equal(got[:, :, i, j], x[:, :, i, c] if c < n else np.zeros((2, 3)))
        back = unshift(y, n)
        assert back.shape == x.shape
        assert np.isclose(np.sum(got * y), np.sum(x * back), rtol=1e-12)


def test_without_positions_and_biases_it_is_sdpa(library: Backend) -> None:
    q, k, v, *rest = inputs(library, causal=True)
    zeros = [library.xp.zeros_like(a) for a in rest]
    ctx, cache = op(q, k, v, *zeros, causal=True)
    wanted, other = ops.sdpa(q, k, v, causal=True)
    pairs = zip((ctx, *cache.backward(ctx)[:3]), (wanted, *other.backward(ctx)[:3]), strict=True)
    for a, b in pairs:
        assert np.allclose(library.to_numpy(a), library.to_numpy(b), rtol=1e-12, atol=1e-14)


def test_only_the_distance_matters(library: Backend) -> None:
    """Keys without content: the scores of all queries are the same function of the distance."""
    _, k, v, r, content, position = inputs(library, 7, 7, causal=True)
    q = library.xp.zeros((2, 4, 7, 3), dtype=k.dtype, device=k.device)
    _, cache = op(q, k * 0, v, r, content, position, causal=True)
    probs = library.to_numpy(cache.probs)
    for i in range(1, 7):  # the ratio of the distances 0 and 1 is the same in each row
        ratio = probs[:, :, i, i] / probs[:, :, i, i - 1]
        assert np.allclose(ratio, probs[:, :, 1, 1] / probs[:, :, 1, 0], rtol=1e-12)


def test_the_last_queries_alone(library: Backend) -> None:
    """As in decoding, and as for a segment after its memory: distances count from the end."""
    q, *rest = inputs(library, causal=True)
    whole, _ = op(q, *rest, causal=True)
    for n in (1, 2, 3):
        last, _ = op(q[:, :, 5 - n :, :], *rest, causal=True)
        whole_, last_ = library.to_numpy(whole), library.to_numpy(last)
        assert np.allclose(whole_[:, :, 5 - n :], last_, rtol=1e-12, atol=1e-14)


def test_rows_with_nothing_to_attend_to(library: Backend) -> None:
    """They give 0, and no gradient to anything."""
    arrays = inputs(library)
    ctx, cache = op(*arrays, mask=library.asarray(np.arange(5)[:, None] != 2))
    assert not library.to_numpy(ctx)[:, :, 2].any() and library.to_numpy(ctx)[:, :, 1].all()
    dctx = np.zeros((2, 4, 5, 6))
    dctx[:, :, 2] = 1.0
    for grad in cache.backward(library.asarray(dctx)):
        assert not library.to_numpy(grad).any()


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (
            {"r": np.ones((2, 7, 3))},
            {},
            ValueError,
            "r must be (G, N, K) with N = 11, a row for each distance, got shape (2, 7, 3)",
        ),
        (
            {},
            {"causal": True},
            ValueError,
            "r must be (G, N, K) with N = 7, a row for each distance of at least 0, "
            "got shape (2, 11, 3)",
        ),
        (
            {"r": np.ones((4, 11, 3))},
            {},
            ValueError,
            "r must be (G, N, K) with G = 2 (from k), K = 3 (from q), got shape (4, 11, 3)",
        ),
        (
            {"position_bias": np.ones((2, 3))},
            {},
            ValueError,
            "position_bias must be (H, K) with H = 4 (from q), K = 3 (from q), got shape (2, 3)",
        ),
        ({"content_bias": None}, {}, TypeError, "content_bias must be an array, got None"),
        (
            {"q": np.ones((2, 3, 5, 3)), "content_bias": np.ones((3, 3))},
            {},
            ValueError,
            "position_bias must be (H, K) with H = 3 (from q), K = 3 (from q), got shape (4, 3)",
        ),
        (
            {},
            {"mask": np.ones((7, 5), bool)},
            ValueError,
            "mask must broadcast to (B, H, T, S) = (2, 4, 5, 7), got shape (7, 5)",
        ),
        (
            {},
            {"dropout_rate": 0.5},
            TypeError,
            "dropout_key must be an xformer.RandomKey, got None",
        ),
    ],
)
def test_bad_arguments(change: Any, options: Any, error: type[Exception], message: str) -> None:
    arrays = dict(zip(NAMES, inputs(NUMPY), strict=True)) | change
    with pytest.raises(error, match=f"^xl_attention: {re.escape(message)}$"):
        op(**arrays, **options)


@only("numba")
def test_a_program_of_it(library: Backend) -> None:
    """It is recorded like any reference. No instruction runs as Python."""
    from programs import judged

    arrays = [a.astype("float32") for a in inputs(NUMPY, causal=True)]
    arrays += [np.random.default_rng(2).normal(size=(2, 4, 5, 6)).astype("float32"), masks(5, 7)]

    def both(*args: Any) -> list[Any]:
        *arrays, dctx, mask = args
        ctx, cache = op(*arrays, mask=mask, causal=True)
        return [ctx, *cache.backward(dctx)]

    judged(both, arrays)
    compiled = xf.compile(both)
    compiled(*arrays)
    assert "; 0 run as Python" in compiled.explain()
