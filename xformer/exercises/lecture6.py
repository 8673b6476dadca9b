"""Lecture 6: decoding with a KV cache, sampling, a training step of a GPT."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from xformer import GPT, ops
from xformer.base import tree
from xformer.exercises.exercise import Exercise, Mistake, normal, unwritten
from xformer.exercises.formulas import rows, softmax
from xformer.generation import samplers


def _decode_step(x: Any, keys: Any, values: Any, *, w_q: Any, w_k: Any, w_v: Any) -> Any:
    """By attention of the last token to all keys, which the op computes without a cache."""
    q, k, v = (ops.linear(x, w)[0][:, None, None, :] for w in (w_q, w_k, w_v))
    k = np.concatenate([keys[:, None], k], axis=2)
    v = np.concatenate([values[:, None], v], axis=2)
    ctx, _ = ops.sdpa(q, k, v, causal=True)
    return ctx[:, 0, 0], k[:, 0], v[:, 0]


def _attend(a: SimpleNamespace, keys: Any, values: Any, scale: float) -> dict[str, Any]:
    probs = softmax((a.x @ a.w_q)[:, None, :] @ np.swapaxes(keys, 1, 2) * scale)
    return {"ctx": (probs @ values)[:, 0]}


def _itself_left_out(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    if not a.keys.shape[1]:
        raise ValueError
    return _attend(a, a.keys, a.values, a.keys.shape[-1] ** -0.5)


def _decode_unscaled(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    k, v = (a.x @ w for w in (a.w_k, a.w_v))
    keys, values = (
        np.concatenate([c, n[:, None]], axis=1) for c, n in ((a.keys, k), (a.values, v))
    )
    return _attend(a, keys, values, 1.0)


def _prepended(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    return {"keys": np.concatenate([(a.x @ a.w_k)[:, None], a.keys], axis=1)}


def _weights(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "w_q": rng.normal(size=(5, 3)),
        "w_k": rng.normal(size=(5, 3)),
        "w_v": rng.normal(size=(5, 4)),
    }


DECODE_STEP = Exercise(
    name="decode_step",
    summary="one token with a KV cache, equal to attention without one",
    task="""Write one step of decoding with a KV cache, for one head.

x (B, D), the new token; keys (B, S, K) and values (B, S, M) of the S tokens so far, S may be 0;
w_q, w_k (D, K), w_v (D, M). Return (ctx, keys, values):

    ctx (B, M)    attention of the new token to all S + 1 tokens, itself included:
                  softmax(q k^T K^-1/2) v, as the last row of causal attention on the whole text
    keys (B, S + 1, K), values (B, S + 1, M), the new token's behind the others
""",
    code=unwritten(
        "decode_step(x, keys, values, *, w_q, w_k, w_v)",
        "(ctx, keys, values) after one more token.",
        "ctx, keys, values",
        has_backward=False,
    ),
    reference=_decode_step,
    draws={
        "S 4": normal(_weights, x=(2, 5), keys=(2, 4, 3), values=(2, 4, 4)),
        "the first token": normal(_weights, x=(2, 5), keys=(2, 0, 3), values=(2, 0, 4)),
    },
    source="xformer/layers/kv_cache.py",
    page="docs/generation.md",
    outputs=("ctx", "keys", "values"),
    has_backward=False,
    mistakes=(
        Mistake("the new token must also attend to itself", _itself_left_out),
        Mistake("the scores need the factor K^-1/2", _decode_unscaled),
        Mistake("the new key comes behind the others", _prepended),
    ),
)


def _nucleus(logits: Any, *, p: float) -> Any:
    return ops.softmax(samplers.top_p(p)(logits, []))[0]


def _kept(a: SimpleNamespace, *, crossing: bool, least: bool = False) -> tuple[Any, Any]:
    """Probabilities, and whether each is kept."""
    probs = softmax(a.logits)
    order = np.argsort(probs if least else -probs, axis=-1)
    ranked = np.take_along_axis(probs, order, axis=-1)
    before = np.cumsum(ranked, axis=-1) - ranked
    kept = before < a.p if crossing else before + ranked <= a.p
    kept[..., 0] = True
    return probs, np.take_along_axis(kept, np.argsort(order, axis=-1), axis=-1)


def _normalised(probs: Any, kept: Any) -> dict[str, Any]:
    probs = np.where(kept, probs, 0)
    return {"probs": probs / np.sum(probs, axis=-1, keepdims=True)}


def _sum_below_one(a: SimpleNamespace, dy: Any) -> dict[str, Any]:
    probs, kept = _kept(a, crossing=True)
    return {"probs": np.where(kept, probs, 0)}


TOP_P = Exercise(
    name="top_p",
    summary="the distribution of nucleus sampling",
    task="""Write the distribution of nucleus sampling (arXiv:1904.09751, section 3.1).

logits (B, V) -> probs (B, V). Of the tokens of a row, sorted by probability, keep the fewest whose
probabilities add up to at least p; at least one. The others get 0, and the kept ones are divided by
their sum. No two probabilities of a row are equal.

`xp.argsort`, `xp.sort`, `xp.take_along_axis` and `xp.cumulative_sum` are in the standard. Or: which
is the smallest probability that is kept?
""",
    code=unwritten(
        "top_p(logits, *, p)",
        "Probabilities (B, V); 0 for tokens that are not kept.",
        "probs",
        has_backward=False,
    ),
    reference=_nucleus,
    draws={
        "p 0.7": normal({"p": 0.7}, scale=1.5, logits=(5, 11)),
        "p 0.05": normal({"p": 0.05}, logits=(3, 7)),
    },
    source="xformer/generation/samplers.py",
    page="docs/generation.md",
    outputs=("probs",),
    has_backward=False,
    mistakes=(
        Mistake(
            "the token that crosses p is kept too: the sum must be at least p",
            lambda a, dy: _normalised(*_kept(a, crossing=False)),
        ),
        Mistake("the kept probabilities must add up to 1 again", _sum_below_one),
        Mistake(
            "these are the least likely tokens: sort in descending order",
            lambda a, dy: _normalised(*_kept(a, crossing=True, least=True)),
        ),
    ),
)

MODEL = GPT(vocab_size=11, n_layers=1, d_model=8, n_heads=2, max_len=6)


def _gpt_step(params: Any, *, tokens: Any, targets: Any, lr: float) -> Any:
    like = MODEL.init(dtype="float64")
    loss, cache = MODEL.loss(tree.unflatten(like, params), tokens, targets)
    grads = tree.flatten(cache.backward())
    return loss, {name: p - lr * grads[name] for name, p in params.items()}


def _text(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters by their dotted names, and tokens with repeated ids."""
    leaves = tree.flatten(MODEL.init(dtype="float64"))
    params = {}
    for name, leaf in leaves.items():
        gain = 1.0 if name.endswith("norm.w") else 0.0
        params[name] = gain + 0.4 * rng.normal(size=leaf.shape)
    ids = rng.integers(0, 11, (2, 6))
    return {"params": params}, {"tokens": ids[:, :-1], "targets": ids[:, 1:], "lr": 0.1}


def _other_step(a: SimpleNamespace, sign: float, head: float, lookup: float) -> dict[str, Any]:
    """The step with its sign, and the two gradients of the table, multiplied by these factors."""
    params = tree.unflatten(MODEL.init(dtype="float64"), a.params)
    _, cache = MODEL.loss(params, a.tokens, a.targets)
    grads = tree.flatten(cache.backward())
    x, _ = MODEL.hidden(params, a.tokens)
    logits, _ = MODEL.forward(params, a.tokens)
    dlogits = ops.cross_entropy(logits, targets=a.targets)[1].backward()
    by_head = rows(dlogits).T @ rows(x)
    by_lookup = grads["embed.table"] - by_head
    grads["embed.table"] = head * by_head + lookup * by_lookup
    return {f"params.{name}": p + sign * a.lr * grads[name] for name, p in a.params.items()}


def _table(a: SimpleNamespace, *, head: float, lookup: float) -> dict[str, Any]:
    name = "params.embed.table"
    return {name: _other_step(a, -1.0, head, lookup)[name]}


GPT_STEP = Exercise(
    name="gpt_step",
    summary="a whole training step of a GPT",
    task="""Write a training step of a GPT: forward, backward, p <- p - lr dp for each parameter.

params: a dict of arrays; tokens, targets: (B, T) integers. Return (loss, params), a new dict. The
model is xf.GPT with 1 layer, 2 heads, D = 8, F = 32, V = 11. Parameters and their names:

    embed.table (V, D), embed.positions (max_len, D)           x = table[tokens] + positions[:T]
    stack.blocks.0.attn_norm.w, .b (D,)                        of the layer
    stack.blocks.0.attn.q.w (D, D), .b (D,); attn.kv.k.w, .b; attn.kv.v.w, .b; attn.o.w, .b
    stack.blocks.0.ffn_norm.w, .b;  ffn.up.w (D, F), .b;  ffn.down.w (F, D), .b
    stack.norm.w, .b                                           behind the layer

    x = x + o(attention(q(h), k(h), v(h))), h = layer_norm(x), causal, heads are slices of D / 2
    x = x + down(gelu(up(h))), h = layer_norm(x), gelu(approximate="tanh")
    logits = layer_norm(x) table^T;    loss = cross_entropy(logits, targets=targets)

Use our ops and their caches, as docs/lesson.md does: its program is this one but for the names.
""",
    code='''from xformer import ops


def gpt_step(params, *, tokens, targets, lr):
    """(loss, new params)."""
    xp = array_namespace(tokens)
    raise NotImplementedError  # return loss, params
''',
    reference=_gpt_step,
    draws={"tokens (2, 5)": _text},
    source="xformer/models/language_model.py",
    page="docs/lesson.md",
    outputs=("loss", "params"),
    has_backward=False,
    mistakes=(
        Mistake("this goes up the gradient: p - lr dp", lambda a, dy: _other_step(a, 1, 1, 1)),
        Mistake(
            "the table is used at both ends: the gradient by the look-up is missing",
            lambda a, dy: _table(a, head=1, lookup=0),
        ),
        Mistake(
            "the table is used at both ends: the gradient by the logits is missing",
            lambda a, dy: _table(a, head=0, lookup=1),
        ),
        Mistake(
            "the gradient is not multiplied by lr", lambda a, dy: _other_step(a, -1 / a.lr, 1, 1)
        ),
        Mistake("the parameters are unchanged", lambda a, dy: _other_step(a, 0, 1, 1)),
    ),
)

EXERCISES = (DECODE_STEP, TOP_P, GPT_STEP)
