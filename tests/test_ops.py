"""What the ops promise beyond their gradients, which test_gradients.py checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from judges import by_hand
from libraries import LIBRARIES, STAND_IN, only

from xformer import RandomKey, ops, tree
from xformer.backends import Backend, Generator
from xformer.proofs.catalogue import Case, cases

EVERYWHERE = only(*LIBRARIES, STAND_IN)

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


SEEN: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "left": {"window": (2, None)},
    "right": {"window": (None, 1)},
    "mask": {"mask": np.tri(20, 24, 4, dtype=bool)},
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("length", [(20, 24), (3, 24)], ids=str)
@EVERYWHERE
def test_keys_that_a_query_does_not_see_may_be_anything(
    seen: str, length: tuple[int, int], library: Backend
) -> None:
    """Their scores are replaced: -inf added to NaN, or 0 times it, would be NaN."""
    rng, (t, s) = np.random.default_rng(0), length
    q, k, v = (rng.normal(size=(2, 3, n, 8)) for n in (t, s, s))
    options = {
        name: library.asarray(value[-t:]) if name == "mask" else value
        for name, value in SEEN[seen].items()
    }
    at = 1 if seen == "left" else s - 1
    sees = np.arange(t) + s - t + {"left": -2, "right": 1}.get(seen, 0)
    sees = sees <= at if seen == "left" else sees >= at

    def ctx(what: float) -> Any:
        keys = k.copy()
        keys[:, :, at] = what
        with np.errstate(invalid="ignore"):
            own = (library.asarray(x, "float32") for x in (q, keys, v))
            return library.to_numpy(ops.sdpa(*own, **options)[0])

    wanted, unseen = ctx(0.0), ~sees
    assert unseen.any() and np.isfinite(wanted).all()
    for what in (np.nan, np.inf, -np.inf):
        got = ctx(what)
        np.testing.assert_allclose(got[:, :, unseen], wanted[:, :, unseen], rtol=1e-5, atol=1e-6)
        assert what == -np.inf or np.isnan(got[:, :, sees]).all()


@pytest.mark.parametrize("length", [(20, 24), (3, 24)], ids=str)
@EVERYWHERE
def test_a_bias_is_data_however_far_below_zero(length: tuple[int, int], library: Backend) -> None:
    """A row of finfo.min, as transformers masks, is the mean of v as in torch; of -inf it is 0.

    Torch's flash kernel on CPUs has the same ctx, but in backward its probs are exp(scores - lse).
    """
    torch = pytest.importorskip("torch")
    attention = pytest.importorskip("torch.nn.attention")
    rng, (t, s) = np.random.default_rng(0), length
    arrays = [rng.normal(size=(2, 3, n, 8)).astype("float32") for n in (t, s, s)]
    lowest = np.finfo("float32").min
    for size in (-1e9, -1e30, 0.5 * lowest, 0.7 * lowest, lowest):
        bias = np.where(rng.random((2, 1, t, s)) < 0.4, size, 0).astype("float32")
        bias[0, :, 1], bias[1, :, 2] = size, -np.inf
        judged = [torch.tensor(x, requires_grad=True) for x in arrays]
        finite = torch.tensor(np.where(bias == -np.inf, 0, bias))
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            wanted = torch.nn.functional.scaled_dot_product_attention(*judged, attn_mask=finite)
        kept = np.ones((2, 1, t, 1), "float32")
        kept[1, :, 2] = 0
        wanted = wanted * torch.tensor(kept)
        dctx = rng.normal(size=(2, 3, t, 8)).astype("float32")
        wanted.backward(torch.tensor(dctx))
        assert np.allclose(wanted[0, :, 1].detach(), arrays[2][0].mean(axis=1), atol=1e-6)
        ctx, cache = ops.sdpa(*map(library.asarray, (*arrays, bias)))
        grads = cache.backward(library.asarray(dctx))[:3]
        for got, x in zip((ctx, *grads), (wanted.detach(), *(x.grad for x in judged)), strict=True):
            np.testing.assert_allclose(library.to_numpy(got), x, rtol=1e-4, atol=1e-5)


# ---- Numbers at the edge ----


N_TOKENS, N_CLASSES = 6, 4100  # so many classes that every library takes its kernel for them
TARGETS = np.asarray([0, 1, 2, 4099, 1, 2])
LOSSES: tuple[dict[str, Any], ...] = (
    {},
    {"label_smoothing": 0.25, "reduction": "sum"},
    {"label_smoothing": 1.0},
    {"ignore_index": 1, "label_smoothing": 0.25},
    {"z_loss": 2.0**-27},
)


def far_logits() -> Any:
    """Multiples of 8 of which many are equal: around 1e8 float32 still has them all."""
    return 8 * np.random.default_rng(0).integers(-2, 1, (N_TOKENS, N_CLASSES)).astype(float)


def exact_loss(logits: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Loss and dlogits in float64, the largest logit taken off first."""
    a, z = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    kept = options.get("ignore_index") != TARGETS
    top = logits.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    log_probs, lse = logits - top - log_sum, log_sum + top
    wanted = (1 - a) * np.eye(N_CLASSES)[TARGETS] + a / N_CLASSES
    weight = kept[:, None] / (1 if options.get("reduction") == "sum" else kept.sum())
    loss = weight * (z * lse**2 - (wanted * log_probs).sum(axis=-1, keepdims=True))
    return loss.sum(), weight * (np.exp(log_probs) * (1 + 2 * z * lse) - wanted)


@pytest.mark.parametrize("shift", [0.0, 1e4, 1e8])
@pytest.mark.parametrize("options", LOSSES, ids=lambda options: " ".join(options) or "plain")
@EVERYWHERE
def test_a_constant_of_all_logits_is_taken_off(
    options: dict[str, Any], shift: float, library: Backend
) -> None:
    """float32 has no place for log(sum) behind 1e8: lse - x would be 0, and exp(x - lse) 1."""
    wanted, dwanted = exact_loss(far_logits() + shift, options)
    x, w = library.asarray(np.eye(N_TOKENS), "float32"), library.asarray(far_logits(), "float32")
    b = library.asarray(np.full(N_CLASSES, shift), "float32")
    one, options = library.asarray(1.0, "float32"), {"targets": library.asarray(TARGETS), **options}
    loss, cache = ops.cross_entropy(w + b, **options)
    head_loss, head_cache = ops.linear_cross_entropy(x, w, b, **options)
    for value in (loss, head_loss):
        np.testing.assert_allclose(library.to_numpy(value), wanted, rtol=1e-6)
    for grad in (cache.backward(one), head_cache.backward(one)[1]):
        np.testing.assert_allclose(library.to_numpy(grad), dwanted, rtol=2e-5, atol=1e-6)


@EVERYWHERE
def test_equal_large_logits_are_equally_probable(library: Backend) -> None:
    targets = library.asarray([3])
    for size in (1e4, 1e8, -1e8, 1e30, float(np.finfo(np.float32).min)):
        logits = library.asarray(np.full((1, 10), size), "float32")
        loss, cache = ops.cross_entropy(logits, targets=targets)
        np.testing.assert_allclose(library.to_numpy(loss), np.log(10), rtol=1e-6)
        probs = library.to_numpy(cache.backward(library.asarray(1.0, "float32")))
        np.testing.assert_allclose(probs + np.eye(10)[[3]], np.full((1, 10), 0.1), rtol=1e-6)


@pytest.mark.parametrize("width", [7, 384, 768, 5000])
@EVERYWHERE
def test_layer_norm_of_a_row_of_equal_numbers_is_b(width: int, library: Backend) -> None:
    """The rounded mean is not that number, and rstd would divide the rest by itself."""
    values = np.asarray([100.0, 0.1, -1e8, 3e4 / 7, 0.0, 1e15], "float32")
    rng = np.random.default_rng(0)
    x = np.repeat(values[:, None], width, axis=1)
    w, b, dy = (rng.normal(size=n).astype("float32") for n in (width, width, x.shape))
    for options in ({"eps": 1e-12}, {"eps": 1e-5}, {"eps": 1e-6, "eps_inside": False}):
        y, cache = ops.layer_norm(*map(library.asarray, (x, w, b)), **options)
        assert np.array_equal(library.to_numpy(y), np.broadcast_to(b, x.shape)), options
        dx, dw, _ = map(library.to_numpy, cache.backward(library.asarray(dy)))
        eps = options["eps"]
        dxhat = dy.astype(float) * w
        wanted = dxhat - dxhat.mean(axis=-1, keepdims=True)
        wanted = wanted / (eps if "eps_inside" in options else np.sqrt(eps))
        np.testing.assert_allclose(dx, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
        assert not dw.any()


@EVERYWHERE
def test_layer_norm_of_rows_far_from_zero_is_as_exact_as_they_are_known(library: Backend) -> None:
    means = np.asarray([[10], [1e2], [1e3], [-1e4], [1e5]])
    x = (np.random.default_rng(0).normal(size=(5, 700)) + means).astype("float32")
    exact = (x - x.mean(axis=-1, keepdims=True, dtype=float)) / x.std(
        axis=-1, keepdims=True, dtype=float
    )
    ones, zeros = (library.asarray(np.full(700, n), "float32") for n in (1, 0))
    y, _ = ops.layer_norm(library.asarray(x), ones, zeros, eps=1e-12)
    off = np.abs(library.to_numpy(y) - exact).max(axis=-1)
    assert (off < 1e-6 + np.finfo("float32").eps * np.abs(x).max(axis=-1)).all()


@pytest.mark.parametrize("case", [c for c in cases() if c.group == "ops"], ids=lambda c: c.name)
@only(*(name for name in LIBRARIES if name != "jax"))  # which compiles all anew, for long
def test_large_inputs_stay_finite(case: Case, library: Backend) -> None:
    def make(rng: Generator, backend: Backend) -> Any:
        fn, args = case.make(rng, backend)
        return fn, tree.map(lambda a: a * 1000, args)

    for name, a in by_hand(replace(case, make=make), library, "float32").items():
        assert np.isfinite(a).all(), name


def test_dropout_drops_the_same_everywhere(library: Backend) -> None:
    key, shape = RandomKey(seed=2**40 + 1, step=5, site=3), (7, 11, 13)
    options = {"rate": 0.3, "key": key}
    y, _ = ops.dropout(library.generator(0, "float64").full(shape, 1.0), **options)
    host, _ = ops.dropout(np.ones(shape), **options)
    assert np.array_equal(library.to_numpy(y), host)
    kept = host != 0
    assert (host[kept] == 1 / (1 - 0.3)).all()
    assert abs(kept.mean() - 0.7) < 4 * np.sqrt(0.3 * 0.7 / kept.size)
