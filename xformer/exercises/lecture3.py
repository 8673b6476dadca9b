"""Lecture 3: attention, causal masks, grouped heads, rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from xformer import layers, ops
from xformer.exercises.exercise import Exercise, Formula, Mistake, normal, of_op, unwritten
from xformer.exercises.formulas import softmax, total

TRANSPOSED = "dq = dscores k K^-1/2, not dscores k^T: its shapes fit only if T, S and K are equal"
TINY = "adding -1e-20 to a score masks nothing: a forbidden key needs -inf, or a probability of 0"
BY_DK = "all three weights are computed from dk: dw_q = x^T dq, dw_k = x^T dk, dw_v = x^T dv"
DIAGONAL = "a row of x is in a row and in a column of y, so both products of dy are needed in full"


def _t(x: Any) -> Any:
    return np.swapaxes(x, -1, -2)


def _probs(a: SimpleNamespace, scale: float) -> Any:
    """The probabilities; 0 for keys that `a.allowed`, if there is one, forbids."""
    allowed = getattr(a, "allowed", True)
    return softmax(np.where(allowed, a.q @ _t(a.k) * scale, -1e30)) * allowed


def _attention(a: SimpleNamespace, dy: Any) -> tuple[Any, Any, Any, Any]:
    """scale, probs, dprobs and dscores."""
    scale = a.q.shape[-1] ** -0.5
    probs = _probs(a, scale)
    dprobs = dy @ _t(a.v)
    return scale, probs, dprobs, probs * (dprobs - total(dprobs * probs))


def _by_scores(wrong: Callable[[Any, Any, Any, Any], tuple[Any, Any]]) -> Formula:
    """dq and dk from the wrong dscores and scale that a function makes of `_attention`'s arrays."""

    def formula(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
        dscores, scale = wrong(*_attention(a, dy))
        return {"dq": dscores @ a.k * scale, "dk": _t(dscores) @ a.q * scale}

    return formula


def _keys_transposed(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    scale, _, _, dscores = _attention(a, dy)
    return {"dq": dscores @ _t(a.k) * scale}


OF_SCORES = (  # mistakes in attention with and without a mask
    Mistake(
        "the factor K^-1/2 is missing in dq and dk: scores = q k^T K^-1/2",
        _by_scores(lambda scale, probs, dprobs, dscores: (dscores, 1)),
        "003-unscaled",
    ),
    Mistake(
        "the backward of softmax is left out: dscores is not dprobs",
        _by_scores(lambda scale, probs, dprobs, dscores: (dprobs, scale)),
    ),
    Mistake(
        "the sum in the backward of softmax is missing: probs * (dprobs - sum(dprobs * probs))",
        _by_scores(lambda scale, probs, dprobs, dscores: (probs * dprobs, scale)),
    ),
    Mistake("the scores need the factor K^-1/2", lambda a, dy: {"y": _probs(a, 1) @ a.v}),
    Mistake(
        "the scores are divided by K: divide by its root",
        lambda a, dy: {"y": _probs(a, 1 / a.q.shape[-1]) @ a.v},
    ),
)

ATTENTION_FORWARD = '''

def attention(q, k, v):
    """y = softmax(q k^T K^-1/2) v."""
    xp = array_namespace(q)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    e = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    probs = e / xp.sum(e, axis=-1, keepdims=True)
    return probs @ v, (q, k, v, probs)
'''

ATTENTION = Exercise(
    name="attention",
    summary="backward of attention: q, k and v of every head",
    task="""Write the backward of attention.

q (B, H, T, K), k (B, H, S, K), v (B, H, S, M) -> y (B, H, T, M).    y = softmax(scores) v,
    scores = q k^T K^-1/2, of shape (B, H, T, S); softmax over the S keys

Every batch and head is computed alone. `a.mT` is the transpose of the last two axes. The forward is
given.
""",
    code=ATTENTION_FORWARD
    + '''

def attention_backward(dy, saved):
    """(dq, dk, dv), in the shapes of q, k and v."""
    q, k, v, probs = saved
    xp = array_namespace(dy)
    raise NotImplementedError  # return dq, dk, dv
''',
    **of_op("sdpa"),
    draws={
        "T 5, S 3, K 7": normal(q=(2, 1, 5, 7), k=(2, 1, 3, 7), v=(2, 1, 3, 2)),
        "T, S, K, M 4": normal(q=(1, 2, 4, 4), k=(1, 2, 4, 4), v=(1, 2, 4, 4)),
    },
    mistakes=(
        *OF_SCORES,
        Mistake(TRANSPOSED, _keys_transposed, "004-keys-transposed"),
        Mistake(
            "softmax must run over the keys, the last axis",
            lambda a, dy: {"y": softmax(a.q @ _t(a.k) * a.q.shape[-1] ** -0.5, axis=-2) @ a.v},
        ),
    ),
)


def _allowed(a: SimpleNamespace, shift: int = 0) -> Any:
    """The causal mask: keys j <= i + S - T + shift."""
    n_queries, n_keys = a.q.shape[-2], a.k.shape[-2]
    return np.tri(n_queries, n_keys, n_keys - n_queries + shift, dtype=bool)


def _causal(a: SimpleNamespace, allowed: Any, stand_in: float) -> dict[str, Any]:
    """y with a number added to forbidden scores."""
    scores = a.q @ _t(a.k) * a.q.shape[-1] ** -0.5
    return {"y": softmax(scores + np.where(allowed, 0, stand_in)) @ a.v}


def _masked(formula: Formula) -> Formula:
    """A wrong formula of attention, with the causal mask."""
    return lambda a, dy: formula(SimpleNamespace(**vars(a), allowed=_allowed(a)), dy)


CAUSAL_ATTENTION = Exercise(
    name="causal_attention",
    summary="attention in which no query sees a later key, forward and backward",
    task="""Write causal attention, forward and backward.

q (B, H, T, K), k (B, H, S, K), v (B, H, S, M) -> y (B, H, T, M).    y = softmax(scores) v,
    scores = q k^T K^-1/2, over the keys that a query may attend to

The last query is at the position of the last key: query i attends to keys j <= i + S - T. A query
without any key (T > S) gives 0, and has gradient 0.
""",
    code=unwritten(
        "causal_attention(q, k, v)", "y = softmax(q k^T K^-1/2) v over keys j <= i + S - T."
    ),
    reference=partial(ops.sdpa, causal=True),
    draws={
        "T 5, S 5": normal(q=(2, 1, 5, 7), k=(2, 1, 5, 7), v=(2, 1, 5, 2)),
        "T 2, S 5": normal(q=(1, 2, 2, 3), k=(1, 2, 5, 3), v=(1, 2, 5, 4)),
        "T 5, S 3": normal(q=(1, 1, 5, 7), k=(1, 1, 3, 7), v=(1, 1, 3, 2)),
    },
    source="xformer/ops/sdpa.py",
    page="docs/derivations/sdpa.md",
    mistakes=(
        Mistake(TINY, lambda a, dy: _causal(a, _allowed(a), -1e-20)),
        Mistake(
            "a query also attends to the key at its own position",
            lambda a, dy: _causal(a, _allowed(a, -1), -1e30),
        ),
        Mistake(
            "the mask is aligned with the first key: query i attends to j <= i + S - T",
            lambda a, dy: _causal(a, _allowed(a, a.q.shape[-2] - a.k.shape[-2]), -1e30),
        ),
        Mistake(
            "a query without any key must give 0; a large negative number in all its scores gives "
            "the mean of the values",
            lambda a, dy: _causal(a, _allowed(a), -1e30),
        ),
        Mistake(
            "a query without any key gives 0 / 0: it must give 0",
            lambda a, dy: _causal(a, _allowed(a), -np.inf),
        ),
        *(Mistake(one.says, _masked(one.formula)) for one in OF_SCORES),
    ),
)


def _interleaved_heads(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    n = a.q.shape[1] // a.k.shape[1]
    k, v = (np.tile(x, (1, n, 1, 1)) for x in (a.k, a.v))
    return {"y": softmax(a.q @ _t(k) * a.q.shape[-1] ** -0.5) @ v}


def _repeated(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    """dk and dv of the repeated heads."""
    n = a.q.shape[1] // a.k.shape[1]
    wide = SimpleNamespace(q=a.q, k=np.repeat(a.k, n, axis=1), v=np.repeat(a.v, n, axis=1))
    scale, probs, _, dscores = _attention(wide, dy)
    return {"dk": _t(dscores) @ a.q * scale, "dv": _t(probs) @ dy}


def _of_groups(a: SimpleNamespace, dy: Any, reduce: Callable[[Any], Any]) -> dict[str, Any]:
    """dk and dv, by a function of the gradients (B, G, H / G, S, K) of the repeated heads."""
    grads = _repeated(a, dy).items()
    return {n: reduce(d.reshape(*a.k.shape[:2], -1, *d.shape[2:])) for n, d in grads}


GROUPED_ATTENTION = Exercise(
    name="grouped_attention",
    summary="several query heads share a key and value head, forward and backward",
    task="""Write attention with grouped heads (arXiv:2305.13245), forward and backward.

q (B, H, T, K), k (B, G, S, K), v (B, G, S, M) -> y (B, H, T, M).    G divides H.
Query head h attends to key and value head h // (H / G): 0, 0, 1, 1 for H = 4, G = 2.

`xp.repeat(k, n, axis=1)` repeats each head n times. What is its backward?
""",
    code=unwritten(
        "grouped_attention(q, k, v)", "y = softmax(q k^T K^-1/2) v with shared heads of k and v."
    ),
    **of_op("sdpa"),
    draws={
        "H 6, G 2": normal(q=(2, 6, 5, 7), k=(2, 2, 3, 7), v=(2, 2, 3, 4)),
        "H 2, G 1": normal(q=(1, 2, 3, 5), k=(1, 1, 7, 5), v=(1, 1, 7, 3)),
    },
    mistakes=(
        Mistake("heads of a group are neighbours: h // (H / G), not h mod G", _interleaved_heads),
        Mistake(
            "these are the gradients of the repeated heads: sum them over each group",
            _repeated,
        ),
        Mistake(
            "a shared head gets the sum over its group, not the mean",
            lambda a, dy: _of_groups(a, dy, partial(np.mean, axis=2)),
        ),
        Mistake(
            "a shared head gets the sum over its group; this is the last of the group alone",
            lambda a, dy: _of_groups(a, dy, lambda d: d[:, :, -1]),
        ),
    ),
)


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    half = cos.shape[-1]
    p, q = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([p * cos - q * sin, q * cos + p * sin, x[..., 2 * half :]], axis=-1)


def _inverse(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    square = a.cos**2 + a.sin**2
    return {"dx": _turned(dy, a.cos / square, -a.sin / square)}


def _neighbours(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    half = a.cos.shape[-1]
    p, q = a.x[..., 0 : 2 * half : 2], a.x[..., 1 : 2 * half : 2]
    pairs = np.stack([p * a.cos - q * a.sin, q * a.cos + p * a.sin], axis=-1)
    return {"y": np.concatenate([pairs.reshape(*p.shape[:-1], -1), a.x[..., 2 * half :]], axis=-1)}


def _tables(length: int, half: int, factor: float = 1.0) -> dict[str, Any]:
    angles = np.arange(length)[:, None] * 100.0 ** -(np.arange(half) / half)
    return {"cos": factor * np.cos(angles), "sin": factor * np.sin(angles)}


ROPE = Exercise(
    name="rope",
    summary="backward of rotary positions: a transpose",
    task="""Write the backward of rotary position embedding (arXiv:2104.09864).

x, y: (B, H, T, K);  cos, sin: (T, R/2), R <= K, without a gradient. Channel i and channel i + R/2
are a pair (p, q), which is turned:    (p, q) -> (p cos - q sin, q cos + p sin)

The other K - R channels stay. The forward is given. In one case of the check, the tables have a
factor: cos^2 + sin^2 is not 1.
""",
    code='''

def rope(x, *, cos, sin):
    """x with turned pairs of channels."""
    xp = array_namespace(x)
    half = cos.shape[-1]
    p, q = x[..., :half], x[..., half : 2 * half]
    y = xp.concat([p * cos - q * sin, q * cos + p * sin, x[..., 2 * half :]], axis=-1)
    return y, (cos, sin)


def rope_backward(dy, saved):
    """dx, in the shape of x."""
    cos, sin = saved
    xp = array_namespace(dy)
    raise NotImplementedError  # return dx
''',
    **of_op("rope"),
    draws={
        "all channels": normal(_tables(5, 3), x=(2, 3, 5, 6)),
        "R 4 of K 7": normal(_tables(3, 2), x=(1, 2, 3, 7)),
        "a factor in the tables": normal(_tables(3, 2, 1.5), x=(1, 2, 3, 4)),
    },
    mistakes=(
        Mistake(
            "dy is turned forward once more: the transpose turns by -sin",
            lambda a, dy: {"dx": _turned(dy, a.cos, a.sin)},
        ),
        Mistake(
            "this is the inverse; the gradient is the transpose, which keeps the factor", _inverse
        ),
        Mistake("pairs are (i, i + R/2), not neighbours", _neighbours),
    ),
)


def _self_attention(x: Any, w_q: Any, w_k: Any, w_v: Any, w_o: Any) -> tuple[Any, Any]:
    q, k, v, o = (layers.LinearParams(w, None) for w in (w_q, w_k, w_v, w_o))
    params = layers.AttentionParams(q, layers.KeyValueParams(k, v), o)
    cache: Any
    y, cache = layers.attention(x, params, config=layers.AttentionConfig(x.shape[-1], 1))

    def backward(dy: Any) -> Any:
        dx, d, *_ = cache.backward(dy)
        return dx, d.q.w, d.kv.k.w, d.kv.v.w, d.o.w

    return y, SimpleNamespace(backward=backward)


def _weights(a: SimpleNamespace, dy: Any) -> Any:
    """dw_k of self-attention with one head."""
    b = SimpleNamespace(q=a.x @ a.w_q, k=a.x @ a.w_k, v=a.x @ a.w_v)
    scale, _, _, dscores = _attention(b, dy @ a.w_o.T)
    dk = _t(dscores) @ b.q * scale
    return np.sum(_t(a.x) @ dk, axis=0)


SELF_ATTENTION_MISTAKE = Exercise(
    name="self_attention_mistake",
    function="self_attention",
    summary="find the mistake in a published backward of self-attention",
    task="""Find the mistake. A published program has this backward of self-attention with one head.

x (B, T, D), w_q, w_k, w_v, w_o (D, D) -> y (B, T, D).    y = softmax(q k^T D^-1/2) v w_o,
    q = x w_q, k = x w_k, v = x w_v
""",
    code='''

def self_attention(x, w_q, w_k, w_v, w_o):
    """y = softmax(q k^T D^-1/2) v w_o."""
    xp = array_namespace(x)
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    scores = q @ k.mT * q.shape[-1] ** -0.5
    e = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    probs = e / xp.sum(e, axis=-1, keepdims=True)
    ctx = probs @ v
    return ctx @ w_o, (x, w_q, w_k, w_v, w_o, q, k, v, probs, ctx)


def self_attention_backward(dy, saved):
    """(dx, dw_q, dw_k, dw_v, dw_o)."""
    x, w_q, w_k, w_v, w_o, q, k, v, probs, ctx = saved
    xp = array_namespace(dy)
    dctx = dy @ w_o.T
    dprobs = dctx @ v.mT
    dscores = probs * (dprobs - xp.sum(dprobs * probs, axis=-1, keepdims=True))
    dscores = dscores * q.shape[-1] ** -0.5
    dq, dk, dv = dscores @ k, dscores.mT @ q, probs.mT @ dctx
    dx = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    dw_q, dw_k, dw_v = (xp.sum(x.mT @ dk, axis=0) for _ in range(3))
    return dx, dw_q, dw_k, dw_v, xp.sum(ctx.mT @ dy, axis=0)
''',
    reference=_self_attention,
    draws={
        "x (2, 3, 5)": normal(
            scale=0.7, x=(2, 3, 5), w_q=(5, 5), w_k=(5, 5), w_v=(5, 5), w_o=(5, 5)
        )
    },
    source="xformer/layers/attention.py",
    page="docs/errata.md",
    mistakes=(
        Mistake(
            BY_DK,
            lambda a, dy: dict.fromkeys(("dw_q", "dw_v"), _weights(a, dy)),
            "004-weights-by-dk",
        ),
        Mistake(
            "the gradient of the output weights is thrown away: without it they never learn",
            lambda a, dy: {"dw_o": np.zeros_like(a.w_o)},
            "004-output-weights-dropped",
        ),
    ),
    planted=(BY_DK,),
)


def _scores(x: Any, a: Any) -> tuple[Any, Any]:
    h, to_h = ops.linear(x, a)
    to_y: Any
    y, to_y = ops.linear(h, x.T)

    def backward(dy: Any) -> Any:
        dh, dxt, _ = to_y.backward(dy)
        dx, da, _ = to_h.backward(dh)
        return dx + dxt.T, da

    return y, SimpleNamespace(backward=backward)


SCORES_MISTAKE = Exercise(
    name="scores_mistake",
    function="scores",
    summary="find the mistake in a published proof about the scores of self-attention",
    task="""Find the mistake. A published proof has this gradient of the scores of self-attention.

x (T, D), a (D, D) -> y (T, T).    y = x a x^T, in which a stands for w_q w_k^T

The proof says: the score of tokens k and l does not depend on row i of x if k or l is another row.
""",
    code='''

def scores(x, a):
    """y = x a x^T."""
    return x @ a @ x.T, (x, a)


def scores_backward(dy, saved):
    """(dx, da), in the shapes of x and a."""
    x, a = saved
    xp = array_namespace(dy)
    diagonal = xp.linalg.diagonal(dy)[:, None]
    dx = diagonal * (x @ a.T + x @ a)
    return dx, x.T @ dy @ x
''',
    reference=_scores,
    draws={"x (5, 3)": normal(x=(5, 3), a=(3, 3))},
    source="xformer/layers/attention.py",
    page="docs/errata.md",
    mistakes=(
        Mistake(
            DIAGONAL,
            lambda a, dy: {"dx": np.diag(dy)[:, None] * (a.x @ a.a.T + a.x @ a.a)},
            "003-row-or-column",
        ),
        Mistake(
            "x is also the right factor: a second term is missing",
            lambda a, dy: {"dx": dy @ a.x @ a.a.T},
        ),
    ),
    planted=(DIAGONAL,),
)

ATTENTION_MISTAKE = replace(
    ATTENTION,
    name="attention_mistake",
    function="attention",
    summary="find the mistake in a published backward of attention",
    task="""Find the mistake. A published program has this backward of attention.

q (B, H, T, K), k (B, H, S, K), v (B, H, S, M) -> y (B, H, T, M).    y = softmax(scores) v,
    scores = q k^T K^-1/2, of shape (B, H, T, S)

It was run with 4 tokens and heads of width 4 only.
""",
    code=ATTENTION_FORWARD
    + '''

def attention_backward(dy, saved):
    """(dq, dk, dv), in the shapes of q, k and v."""
    q, k, v, probs = saved
    xp = array_namespace(dy)
    dprobs = dy @ v.mT
    dscores = probs * (dprobs - xp.sum(dprobs * probs, axis=-1, keepdims=True))
    dscores = dscores * q.shape[-1] ** -0.5
    return dscores @ k.mT, dscores.mT @ q, probs.mT @ dy
''',
    planted=(TRANSPOSED,),
)

EXERCISES = (
    ATTENTION,
    CAUSAL_ATTENTION,
    GROUPED_ATTENTION,
    ROPE,
    ATTENTION_MISTAKE,
    SELF_ATTENTION_MISTAKE,
    SCORES_MISTAKE,
)
