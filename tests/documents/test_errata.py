"""The mistakes listed in docs/errata.md that concern a computation.

A wrong gradient, put in the place of the library's own, fails `xformer.gradcheck` for the inputs it
is wrong for and for no other; the library's own passes. A wrong forward formula gives another
result than the right one. The page names a test here for each, and a test here reads the page.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import test_003
from notebooks import attention_gradients, block_000, block_002
from printed import Printed

import xformer
from xformer import initializers, layers, ops
from xformer.layers.attention import merge_heads, split_heads

PAGE = Path(__file__).parents[2] / "docs" / "errata.md"


class Plugged(NamedTuple):
    """A cache with another backward, rule(cache, y, dy)."""

    cache: Any
    y: Any
    rule: Callable[..., Any]

    def backward(self, dy: np.ndarray) -> Any:
        return self.rule(self.cache, self.y, dy)


def plug(op: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """`op` with the backward `rule` in the place of its own."""

    @functools.wraps(op)
    def run(*args: Any) -> Any:
        y, cache = op(*args)
        return y, Plugged(cache, y, rule)

    return run


class WrongBackward(NamedTuple):
    """A wrong backward, the op it belongs to, and the inputs whose gradients it gets wrong."""

    op: Callable[..., Any]
    rule: Callable[..., Any]
    args: tuple[Any, ...]
    fails: frozenset[str] = frozenset()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def mean(x: np.ndarray) -> np.ndarray:
    return np.mean(x, axis=-1, keepdims=True)


def rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])


def failing_inputs(report: Any) -> set[str]:
    """The inputs whose gradients disagree, each alone."""
    names = {row.name.partition(",")[0] for row in report.failures}
    return names - {"all inputs together"}


# --- layer normalisation (000, 002) -----------------------------------------------------------

NORM_ARGS = (normal(5, 7), normal(7), normal(7, seed=1))


def norm_case(dx: Callable[..., np.ndarray]) -> WrongBackward:
    """dx(cache, xhat, y, dxhat, dy) in the place of the right one; dw and db stay right."""

    def rule(cache: Any, y: np.ndarray, dy: np.ndarray) -> Any:
        xhat = (cache.x - cache.mean) * cache.rstd
        return dx(cache, xhat, y, dy * cache.w, dy), *cache.backward(dy)[1:]

    return WrongBackward(ops.layer_norm, rule, NORM_ARGS, frozenset({"x"}))


def norm_right(c: Any, xhat: Any, y: Any, g: Any, dy: Any) -> np.ndarray:
    """Through sums, as 000 and 002 write it: (D g - sum(g) - xhat sum(g xhat)) / (D std)."""
    width = xhat.shape[-1]
    total, slope = np.sum(g, -1, keepdims=True), np.sum(g * xhat, -1, keepdims=True)
    return (width * g - total - xhat * slope) * c.rstd / width


def norm_as_printed(c: Any, xhat: Any, y: Any, g: Any, dy: Any) -> np.ndarray:
    return printed_norm_backward(y, dy)[-1]


def printed_norm_backward(y: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, ...]:
    """What 000 and 002 compute, all mistakes together: its sum, product, factor, and dx."""
    width = y.shape[-1]
    total = np.sum(dy, axis=-1, keepdims=True)
    product = y * total
    factor = 1 / (width * (np.var(y, axis=-1, keepdims=True) + 1e-5))
    return total, product, factor, factor * (width * dy - total - product)


# --- the feed-forward network (000, 002) ------------------------------------------------------

FFN_X, FFN_KEYS = normal(2, 3, 5), normal(2, 3, 5, seed=1)
FFN_PARAMS = layers.FeedForwardParams(
    layers.LinearParams(normal(5, 7), normal(7)), layers.LinearParams(normal(7, 5), normal(5))
)
UP = frozenset({"x", "params.up.w", "params.up.b"})
DOWN = frozenset({"params.down.w", "params.down.b"})


def ffn_case(rule: Callable[..., Any], fails: frozenset[str]) -> WrongBackward:
    return WrongBackward(layers.feed_forward, rule, (FFN_X, FFN_PARAMS), fails)


def second_max(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
    return c.backward(np.where(y > 0, dy, 0))


def mask_by_keys(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
    _, ddown = c.down.backward(dy)
    dhidden, *_ = c.down.backward(dy * (FFN_KEYS > 0))
    dx, dup = c.up.backward(dhidden)
    return dx, layers.FeedForwardParams(dup, ddown)


def no_mask(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
    dhidden, ddown = c.down.backward(dy)
    dx, dup = c.up.backward(dhidden)
    return dx, layers.FeedForwardParams(dup, ddown)


def relu_before(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
    dx, dparams = c.backward(dy)
    x = c.up.op.x
    dhidden, *_ = c.down.backward(dy)
    dw = rows(np.maximum(x, 0)).T @ rows(c.act.backward(dhidden))
    return dx * (x > 0), dparams._replace(up=dparams.up._replace(w=dw))


# --- attention on the normalised input, plus that input (002) ---------------------------------


class SublayerCache(NamedTuple):
    x: np.ndarray
    norm: Any
    attn: Any

    def backward(self, dy: np.ndarray) -> Any:
        dx_norm, dattn, *_ = self.attn.backward(dy)
        dx, *dnorm = self.norm.backward(dy + dx_norm)
        return dx, layers.NormParams(*dnorm), dattn


def sublayer(x: np.ndarray, norm: Any, attn: Any) -> tuple[np.ndarray, SublayerCache]:
    """y = x_norm + attention(x_norm), as 002 computes it."""
    x_norm, norm_cache = ops.layer_norm(x, *norm)
    y, attn_cache = layers.attention(
        x_norm,
        attn,
        config=layers.AttentionConfig(x_norm.shape[-1], 2),
        context=layers.Context(causal=True),
    )
    return x_norm + y, SublayerCache(x, norm_cache, attn_cache)


def attention_params(d_model: int, width: int, *, out: bool = True) -> layers.AttentionParams:
    q, k, v = (layers.LinearParams(normal(d_model, width, seed=i), None) for i in (1, 2, 3))
    o = (
        layers.LinearParams(normal(width, d_model, seed=4), normal(d_model, seed=5))
        if out
        else None
    )
    return layers.AttentionParams(q, layers.KeyValueParams(k, v), o)


SUBLAYER_ARGS = (
    normal(2, 5, 6),
    layers.NormParams(normal(6), normal(6, seed=1)),
    attention_params(6, 6),
)
PROJECTIONS = frozenset({"attn.q.w", "attn.kv.k.w", "attn.kv.v.w"})


def head_gradients(c: Any, dy: np.ndarray) -> list[np.ndarray]:
    """dq, dk, dv as (B, T, width), from an `AttentionCache`."""
    dmerged = dy if c.o is None else c.o.backward(dy)[0]
    dheads = c.core.backward(split_heads(dmerged, c.q.n_heads))[:3]
    return [merge_heads(d) for d in dheads]


def with_weights(dattn: Any, dw_q: Any, dw_k: Any, dw_v: Any) -> Any:
    k, v, _ = dattn.kv
    kv = layers.KeyValueParams(k._replace(w=dw_k), v._replace(w=dw_v))
    return dattn._replace(q=dattn.q._replace(w=dw_q), kv=kv)


def weights_by_x(c: SublayerCache, y: np.ndarray, dy: np.ndarray) -> Any:
    dx, dnorm, dattn = c.backward(dy)
    return (
        dx,
        dnorm,
        with_weights(dattn, *(rows(c.x).T @ rows(d) for d in head_gradients(c.attn, dy))),
    )


def residual_left_out(c: SublayerCache, y: np.ndarray, dy: np.ndarray) -> Any:
    dx_norm, dattn, *_ = c.attn.backward(dy)
    dx, *dnorm = c.norm.backward(dx_norm)
    return dx, layers.NormParams(*dnorm), dattn


def first_norm_left_out(c: SublayerCache, y: np.ndarray, dy: np.ndarray) -> Any:
    _, dnorm, dattn = c.backward(dy)
    return dy + c.attn.backward(dy)[0], dnorm, dattn


# --- attention (003, 004) ---------------------------------------------------------------------


def causal_attention(x: np.ndarray, params: Any) -> Any:
    return layers.attention(
        x,
        params,
        config=layers.AttentionConfig(x.shape[-1], 2),
        context=layers.Context(causal=True),
    )


ATTENTION_ARGS = (normal(2, 5, 8), attention_params(8, 8))


def through_heads(c: Any, dy: np.ndarray, dq: np.ndarray, dk: np.ndarray, dv: np.ndarray) -> Any:
    """Gradients of x and params if those of queries, keys and values (B, T, width) are these."""
    _, dparams, *_ = c.backward(dy)
    dx, back = c.maps.backward(dq, dk, dv)
    return dx, with_weights(dparams, *(d.w for d in back))


def unscaled(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
    dq, dk, dv = head_gradients(c, dy)
    return through_heads(c, dy, dq / c.core.scale, dk / c.core.scale, dv)


def weights_by_dk(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
    dx, dparams, *_ = c.backward(dy)
    dw = dparams.kv.k.w
    return dx, with_weights(dparams, dw, dw, dw)


def output_weights_dropped(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
    dx, dparams, *_ = c.backward(dy)
    return dx, dparams._replace(o=dparams.o._replace(w=np.zeros_like(dparams.o.w)))


def keys_transposed(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
    _, dk, dv = head_gradients(c, dy)
    s = c.core
    dctx = split_heads(c.o.backward(dy)[0], c.q.n_heads)
    dprobs = dctx @ s.v.mT
    dscores = s.probs * (dprobs - np.sum(dprobs * s.probs, axis=-1, keepdims=True))
    dq = dscores @ s.k.mT * s.scale  # the right one: dscores @ k
    return through_heads(c, dy, merge_heads(dq), dk, dv)


class ScoresCache(NamedTuple):
    x: np.ndarray
    a: np.ndarray

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, a = self
        return dy @ x @ a.T + dy.T @ x @ a, x.T @ dy @ x


def scores(x: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, ScoresCache]:
    """y = x a x^T, the scores of self-attention with a = w_q w_k^T (003's proof)."""
    return x @ a @ x.T, ScoresCache(x, a)


def diagonal_alone(c: ScoresCache, y: np.ndarray, dy: np.ndarray) -> Any:
    return np.diag(dy)[:, None] * (c.x @ c.a.T + c.x @ c.a), c.backward(dy)[1]


# --- linear maps (004) ------------------------------------------------------------------------

LINEAR_ARGS = (normal(5, 3), normal(3, 7), normal(7))


def divided_by_rows(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
    dx, dw, db = c.backward(dy)
    n = len(dy)
    return dx, dw / n, db / n


def column_number(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> Any:
    """Adds the number of the column in the place of the bias; keeps the backward of a bias."""
    _, cache = ops.linear(x, w, b)
    return ops.linear(x, w)[0] + np.arange(len(b)), cache


WRONG = {
    "000-second-max": ffn_case(second_max, UP | DOWN),
    "000-mask-by-keys": ffn_case(mask_by_keys, UP),
    "000-no-relu": ffn_case(no_mask, UP),
    "000-relu-before": ffn_case(relu_before, frozenset({"x", "params.up.w"})),
    "000-norm-xhat": norm_case(lambda c, xhat, y, g, dy: c.rstd * (g - mean(g) - y * mean(g * y))),
    "000-norm-gamma": norm_case(
        lambda c, xhat, y, g, dy: c.rstd * (dy - mean(dy) - xhat * mean(dy * xhat))
    ),
    "000-norm-sum": norm_case(lambda c, xhat, y, g, dy: c.rstd * (g - mean(g) - xhat * mean(g))),
    "000-norm-root": norm_case(
        lambda c, xhat, y, g, dy: c.rstd**2 * (g - mean(g) - xhat * mean(g * xhat))
    ),
    "000-norm-rows": norm_case(
        lambda c, xhat, y, g, dy: (
            (g - mean(g) - xhat * mean(g * xhat)) / np.sqrt(np.var(y, -1, keepdims=True) + 1e-5)
        )
    ),
    "000-norm-as-printed": norm_case(norm_as_printed),
    "002-weights-by-x": WrongBackward(sublayer, weights_by_x, SUBLAYER_ARGS, PROJECTIONS),
    "002-residual-left-out": WrongBackward(
        sublayer, residual_left_out, SUBLAYER_ARGS, frozenset({"x", "norm.w", "norm.b"})
    ),
    "002-first-norm-left-out": WrongBackward(
        sublayer, first_norm_left_out, SUBLAYER_ARGS, frozenset({"x"})
    ),
    "003-unscaled": WrongBackward(
        causal_attention,
        unscaled,
        ATTENTION_ARGS,
        frozenset({"x", "params.q.w", "params.kv.k.w"}),
    ),
    "003-row-or-column": WrongBackward(
        scores, diagonal_alone, (normal(5, 3), normal(3, 3)), frozenset({"x"})
    ),
    "004-weights-by-dk": WrongBackward(
        causal_attention,
        weights_by_dk,
        ATTENTION_ARGS,
        frozenset({"params.q.w", "params.kv.v.w"}),
    ),
    "004-output-weights-dropped": WrongBackward(
        causal_attention, output_weights_dropped, ATTENTION_ARGS, frozenset({"params.o.w"})
    ),
    # 4 tokens and heads of width 4, as in the document: the shapes fit by accident.
    "004-keys-transposed": WrongBackward(
        causal_attention,
        keys_transposed,
        (normal(2, 4, 8), attention_params(8, 8)),
        frozenset({"x", "params.q.w"}),
    ),
    "004-divided-by-rows": WrongBackward(
        ops.linear, divided_by_rows, LINEAR_ARGS, frozenset({"w", "b"})
    ),
    "004-column-number": WrongBackward(
        column_number, lambda c, y, dy: c.backward(dy), LINEAR_ARGS, frozenset({"b"})
    ),
}


def jacobian(c: Any, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """003's way: a matrix diag(y) - y y^T for each row."""
    y_rows = rows(y)
    matrices = y_rows[:, :, None] * np.eye(y.shape[-1]) - y_rows[:, :, None] * y_rows[:, None, :]
    return (rows(dy)[:, None, :] @ matrices)[:, 0, :].reshape(y.shape)


def delta(c: Any, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """004's way: dx_j = sum over k of dy_k y_k ([j = k] - y_j), which is y_j (dy_j - dy . y)."""
    n = y.shape[-1]
    return np.stack(
        [np.sum(dy * y * ((np.arange(n) == j) - y[..., j : j + 1]), -1) for j in range(n)], axis=-1
    )


def dprobs_masked(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
    """003's way: the gradient of the probabilities is masked too, where they are 0 anyway."""
    s = c.core
    dctx = split_heads(c.o.backward(dy)[0], c.q.n_heads)
    dprobs = dctx @ s.v.mT * np.tri(dy.shape[1])
    dscores = s.probs * (dprobs - np.sum(dprobs * s.probs, axis=-1, keepdims=True)) * s.scale
    dheads = (dscores @ s.k, dscores.mT @ s.q, s.probs.mT @ dctx)
    return through_heads(c, dy, *(merge_heads(d) for d in dheads))


RIGHT = {
    "003-dprobs-masked": WrongBackward(causal_attention, dprobs_masked, ATTENTION_ARGS),
    "000-norm-through-sums": norm_case(norm_right),
    "003-softmax-jacobian": WrongBackward(ops.softmax, jacobian, (normal(5, 7),)),
    "004-softmax-delta": WrongBackward(ops.softmax, delta, (normal(5, 7),)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradient_fails(name: str) -> None:
    case = WRONG[name]
    report = xformer.gradcheck(plug(case.op, case.rule), *case.args)
    assert not report.ok
    assert failing_inputs(report) == case.fails


@pytest.mark.parametrize("name", WRONG)
def test_right_gradient_passes(name: str) -> None:
    case = WRONG[name]
    op = ops.linear if case.op is column_number else case.op
    xformer.gradcheck(op, *case.args).require()


@pytest.mark.parametrize("name", RIGHT)
def test_suspected_formula_is_right(name: str) -> None:
    case = RIGHT[name]
    xformer.gradcheck(plug(case.op, case.rule), *case.args).require()


# --- 000, 002 ---------------------------------------------------------------------------------


def test_mask_before_the_product_does_not_fit() -> None:
    """dout is (B, T, D), the mask of the hidden layer (B, T, F)."""
    s = block_000()
    with pytest.raises(ValueError, match="broadcast"):
        Printed("000")["dout"] * (s.pre > 0)


def test_a_missing_gradient_is_refused() -> None:
    """000 and 002 give none for gamma and beta, 002 none for the bias after the heads."""

    def norm(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
        return c.backward(dy)[0], None, None

    with pytest.raises(ValueError, match=r"gradient of w .* got none"):
        xformer.gradcheck(plug(ops.layer_norm, norm), *NORM_ARGS)

    def bias(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
        return *c.backward(dy)[:2], None

    with pytest.raises(ValueError, match=r"gradient of b .* got none"):
        xformer.gradcheck(plug(ops.linear, bias), *LINEAR_ARGS)


def printed_backward(s: SimpleNamespace, dout: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays that 000 and 002 print on the way to attention, by their wrong formulas."""
    dhidden = (dout * (s.keys > 0)) @ s.w_down.T
    total, product, factor, dln = printed_norm_backward(s.y_norm, dhidden @ s.w_up.T)
    return {
        "dhidden_1": dhidden[1],
        "dffn_b_up": np.sum(dhidden, axis=(0, 1), keepdims=True),
        "ln_sum": total,
        "ln_product": product,
        "ln_factor": factor,
        "dln": dln,
        "dy": dout + dln,
    }


@pytest.mark.parametrize("document", ["000", "002"])
def test_wrong_formulas_give_the_printed_backward_figures(document: str) -> None:
    """So the mistakes are these and no others; and 002's figures belong to its own run."""
    printed, s = Printed(document), block_000() if document == "000" else block_002()
    gradients = printed_backward(s, printed["dout"])
    for name, array in gradients.items():
        printed.check(name, array)
    attention = attention_gradients(s, gradients["dy"])
    for name in ("dv", "dx_v"):
        printed.check(name, attention[name])
    if document == "000":
        printed.check("dw_v", attention["dw_v"][None])
        return
    for name in ("dx_k", "dx_q", "dx"):
        printed.check(name, attention[name])
    # The input of attention was x_norm; these weight gradients are taken with x.
    _, dk, dv, *_ = s.sdpa_cache.backward(split_heads(gradients["dy"], 2))
    for name, dheads in (("dw_k", dk), ("dw_v", dv)):
        printed.check(name, (rows(s.x).T @ rows(merge_heads(dheads)))[None])
        assert np.max(np.abs(attention[name] - printed[name][0])) > 0.1


@pytest.mark.parametrize("document", ["000", "002"])
def test_right_formulas_give_other_figures(document: str) -> None:
    """The gradient that enters attention, by the library's backward of the same forward pass."""
    printed, s = Printed(document), block_000() if document == "000" else block_002()
    dout = printed["dout"]
    dhidden, *_ = s.down_cache.backward(dout)
    dy_norm, *_ = s.up_cache.backward(s.relu_cache.backward(dhidden))
    dy = dout + s.norm_cache.backward(dy_norm)[0]
    assert np.max(np.abs(dy - printed["dy"])) > 1


def test_002_adds_the_normalised_input() -> None:
    s = block_002()
    printed = Printed("002")
    merged = s.merged
    printed.check("y", s.x_norm + merged)
    assert np.max(np.abs(s.x + merged - printed["y"])) > 0.5


# --- 001 --------------------------------------------------------------------------------------


def test_001_eps_outside_the_root_is_another_norm() -> None:
    """Each place has its own gradient; the one of the other place is wrong."""
    x, w, b = NORM_ARGS

    def inside(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> Any:
        return ops.layer_norm(x, w, b, eps=0.1)

    def outside(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> Any:
        return ops.layer_norm(x, w, b, eps=0.1, eps_inside=False)

    def as_if_inside(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
        return c._replace(eps_outside=0.0).backward(dy)

    assert np.max(np.abs(inside(x, w, b)[0] - outside(x, w, b)[0])) > 1e-2
    for norm in (inside, outside):
        xformer.gradcheck(norm, x, w, b).require()
    report = xformer.gradcheck(plug(outside, as_if_inside), x, w, b)
    assert failing_inputs(report) == {"x"}


def test_001_keys_are_taken_from_the_input() -> None:
    printed = Printed("001")
    rng = np.random.default_rng(1000)
    x, gamma, beta, w_k = rng.random((4, 6)), rng.random(6), rng.random(6), rng.random((6, 3))
    printed.check("k1", x @ w_k)
    norm, _ = ops.layer_norm(x, gamma, beta, eps=1e-9, eps_inside=False)
    assert np.max(np.abs(norm @ w_k - printed["k1"])) > 0.5


def test_001_one_maximum_for_all_rows_divides_zero_by_zero() -> None:
    x = np.array([[980.0, 990.0, 1000.0], [1.0, 2.0, 3.0]])
    e = np.exp(x - np.max(x))
    with np.errstate(invalid="ignore"):
        wrong = e / np.sum(e, axis=-1, keepdims=True)
    assert np.all(np.isnan(wrong[1]))
    right, _ = ops.softmax(x)
    assert np.allclose(right[1], np.exp([-2, -1, 0]) / np.sum(np.exp([-2, -1, 0])), rtol=1e-15)


def test_001_softmax_runs_over_the_keys() -> None:
    printed = Printed("001")
    over_keys, _ = ops.softmax(printed["scores1"], axis=-1)
    assert np.allclose(over_keys, printed["probs1"], atol=1e-7)
    over_queries, _ = ops.softmax(printed["scores1"], axis=-2)
    assert np.max(np.abs(np.sum(over_queries, axis=-1) - 1)) > 0.1


# --- 003 --------------------------------------------------------------------------------------


def attend_003(
    stand_in: float = -1e20, *, scale: float = 3**-0.5, allowed: np.ndarray | None = None
) -> np.ndarray:
    """z of document 003, from its scores, with `stand_in` added where a key is not allowed."""
    s = test_003.draws()
    logits = s.x @ s.w_q @ (s.x @ s.w_k).T * scale
    if allowed is not None:
        logits = logits + np.where(allowed, 0, stand_in)
    return ops.softmax(logits)[0] @ (s.x @ s.w_v)


def test_003_the_constant_of_the_text_masks_nothing() -> None:
    printed, allowed = Printed("003"), test_003.draws().allowed
    printed.check("z_masked", np.stack([attend_003(-1e20, allowed=allowed)] * 3))
    tiny = attend_003(-1e-20, allowed=allowed)
    assert np.array_equal(tiny, attend_003())
    assert np.max(np.abs(tiny - printed["z_masked"][0])) > 0.5


def test_003_a_finite_stand_in_attends_where_nothing_is_allowed() -> None:
    s = test_003.draws()
    nothing = np.zeros((2, 2), dtype=bool)
    values = s.x @ s.w_v
    hidden = attend_003(-1e20, allowed=nothing)
    assert np.allclose(hidden, np.mean(values, axis=0), rtol=1e-14)
    z, _ = layers.attention(
        s.x[None],
        test_003.params(1, None),
        config=test_003.heads(1),
        context=layers.Context(mask=nothing),
    )
    assert np.array_equal(z, np.zeros_like(z))


def test_003_keys_of_cross_attention() -> None:
    s = test_003.draws()
    printed = Printed("003")

    def z(keys: np.ndarray) -> np.ndarray:
        return ops.softmax(s.x_dec @ s.w_q @ keys.T * 3**-0.5)[0] @ (s.memory @ s.w_v)

    printed.check("z_cross_naive", z(s.memory @ s.w_k))
    assert np.max(np.abs(z(s.memory @ s.w_q) - printed["z_cross_naive"])) > 0.1


def test_003_text_forgets_the_scale() -> None:
    printed = Printed("003")
    printed.check("z", attend_003())
    assert np.max(np.abs(attend_003(scale=1.0) - printed["z"])) > 0.05


def test_003_naive_softmax_overflows() -> None:
    x = np.array([[1000.0, 999.0]])
    with np.errstate(over="ignore", invalid="ignore"):
        wrong = np.exp(x) / np.sum(np.exp(x), axis=-1, keepdims=True)
    assert np.all(np.isnan(wrong))
    right, _ = ops.softmax(x)
    assert np.allclose(right, [[1 / (1 + math.exp(-1)), 1 / (1 + math.e)]], rtol=1e-15)


def test_003_equal_examples_hide_a_mix_up() -> None:
    """A backward that gives each example the gradient of its neighbour passes 003's own check."""

    def attend(x: np.ndarray, params: Any) -> Any:
        return layers.attention(x, params, config=test_003.heads(test_003.H))

    def neighbour(c: Any, y: np.ndarray, dy: np.ndarray) -> Any:
        dx, dparams, *_ = c.backward(dy)
        return np.roll(dx, 1, axis=0), dparams

    wrong = test_003.Layer(plug(attend, neighbour), lambda: (), None)
    x, params = test_003.LAYERS["multi-head"].args()
    assert max(test_003.errors(wrong, (x, params), np.ones_like(x)).values()) < test_003.RTOL
    report = xformer.gradcheck(wrong.run, normal(*x.shape), params)
    assert failing_inputs(report) == {"x"}


# --- 004 --------------------------------------------------------------------------------------


def test_004_keys_transposed_fit_by_accident() -> None:
    """With 5 tokens and heads of width 4 the product does not exist."""
    with pytest.raises(ValueError, match="mismatch"):
        xformer.gradcheck(plug(causal_attention, keys_transposed), *ATTENTION_ARGS)


def test_004_column_number_is_not_a_bias() -> None:
    x, w, _ = LINEAR_ARGS
    zero = np.zeros(7)
    right, _ = ops.linear(x, w, zero)
    wrong, _ = column_number(x, w, zero)
    assert np.allclose(wrong - right, np.arange(7), atol=1e-14)


def test_004_no_loss_has_these_gradients() -> None:
    """Weights get a mean over the rows; gamma, beta and the input a sum. Neither loss has both."""
    x, w, _ = LINEAR_ARGS
    n = len(x)

    class Cache(NamedTuple):
        linear: Any
        norm: Any
        share: float

        def backward(self, dy: np.ndarray) -> Any:
            dhidden, dgamma, dbeta = self.norm.backward(dy * self.share)
            dx, dw, _ = self.linear.backward(dhidden)
            return dx, dw, dgamma, dbeta

    def network(share: float) -> Callable[..., Any]:
        def run(x: Any, w: Any, gamma: Any, beta: Any) -> Any:
            hidden, linear = ops.linear(x, w)
            y, norm = ops.layer_norm(hidden, gamma, beta)
            return y * share, Cache(linear, norm, share)

        return run

    def rule(c: Cache, y: np.ndarray, dy: np.ndarray) -> Any:
        dx, dw, dgamma, dbeta = c._replace(share=1.0).backward(dy)
        return dx, dw / n, dgamma, dbeta

    args = (x, w, normal(7, seed=1), normal(7, seed=2))
    for share, fails in ((1.0, {"w"}), (1 / n, {"x", "gamma", "beta"})):
        xformer.gradcheck(network(share), *args).require()
        report = xformer.gradcheck(plug(network(share), rule), *args)
        assert failing_inputs(report) == fails


def test_004_initial_weights() -> None:
    """One matrix uniform in (-s, 1); the others in (-s, s) where s is Xavier's *deviation*."""
    shape = (8, 16)
    s = math.sqrt(2 / sum(shape))
    rng = np.random.default_rng(0)
    lopsided = rng.uniform(-s, 1, (1000, *shape))
    assert abs(np.mean(lopsided) - (1 - s) / 2) < 1e-2
    narrow = rng.uniform(-s, s, (1000, *shape))
    generator = xformer.backends.get("numpy").generator(0, "float64")
    uniform = np.stack([initializers.xavier_uniform(generator, shape) for _ in range(1000)])
    gaussian = np.stack([initializers.xavier_normal(generator, shape) for _ in range(1000)])
    for weights in (uniform, gaussian):
        assert abs(np.mean(weights)) < 1e-2
        assert abs(np.std(weights) / s - 1) < 1e-2
    assert abs(np.std(narrow) / s - 3**-0.5) < 1e-2


def test_004_scaling_after_the_mask_is_harmless() -> None:
    """The stand-in for minus infinity shrinks too, and is still far below any score."""
    q, k, v = (normal(1, 2, 4, 4, seed=i).astype("float32") for i in range(3))
    hidden = ~np.tri(4, dtype=bool)
    logits = np.where(hidden, np.float32(-1e9), q @ k.mT) * np.float32(0.5)
    probs, _ = ops.softmax(logits)
    assert np.all(probs[..., hidden] == 0)
    ctx, _ = ops.sdpa(q, k, v, causal=True)
    assert np.allclose(probs @ v, ctx, rtol=0, atol=1e-6)


# --- the page ---------------------------------------------------------------------------------


def named_tests() -> set[str]:
    """Every `test_...`, `test_...[...]` that the page names."""
    return set(re.findall(r"`(test_\w+(?:\[[^\]`]+\])?)`", PAGE.read_text(encoding="utf-8")))


def test_the_page_names_every_case() -> None:
    named = named_tests()
    assert {f"test_wrong_gradient_fails[{name}]" for name in WRONG} <= named
    assert {f"test_suspected_formula_is_right[{name}]" for name in RIGHT} <= named


def test_the_page_names_tests_that_exist() -> None:
    files = Path(__file__).parent.glob("test_*.py")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    defined = set(re.findall(r"^def (test_\w+)", sources, flags=re.MULTILINE))
    cases = {f"test_wrong_gradient_fails[{name}]" for name in WRONG}
    cases |= {f"test_suspected_formula_is_right[{name}]" for name in RIGHT}
    for name in named_tests():
        assert name in cases if "[" in name else name in defined, name
