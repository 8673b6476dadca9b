"""The exercises of the lectures as a learner may solve them: y, saved = f(x); df(dy, saved)."""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace, device

from xformer import ops

Arrays = tuple[Any, ...]


def rows(x: Any) -> Any:
    return array_namespace(x).reshape(x, (-1, x.shape[-1]))


def linear(x: Any, w: Any, b: Any) -> Arrays:
    return x @ w + b, (x, w)


def linear_backward(dy: Any, saved: Any) -> Arrays:
    x, w = saved
    return dy @ w.T, rows(x).T @ rows(dy), array_namespace(dy).sum(rows(dy), axis=0)


def relu(x: Any) -> Arrays:
    return array_namespace(x).where(x > 0, x, 0.0), x > 0


def relu_backward(dy: Any, saved: Any) -> Any:
    return array_namespace(dy).where(saved, dy, 0.0)


def softmax(x: Any) -> Arrays:
    xp = array_namespace(x)
    e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    y = e / xp.sum(e, axis=-1, keepdims=True)
    return y, y


def softmax_backward(dy: Any, saved: Any) -> Any:
    return saved * (dy - array_namespace(dy).sum(dy * saved, axis=-1, keepdims=True))


def layer_norm(x: Any, w: Any, b: Any, *, eps: float) -> Arrays:
    xp = array_namespace(x)
    c = x - xp.mean(x, axis=-1, keepdims=True)
    rstd = 1 / xp.sqrt(xp.mean(c**2, axis=-1, keepdims=True) + eps)
    return w * c * rstd + b, (c * rstd, rstd, w)


def layer_norm_backward(dy: Any, saved: Any) -> Arrays:
    xhat, rstd, w = saved
    xp, leading = array_namespace(dy), tuple(range(dy.ndim - 1))
    dxhat = dy * w
    slope = xp.mean(dxhat * xhat, axis=-1, keepdims=True)
    dx = rstd * (dxhat - xp.mean(dxhat, axis=-1, keepdims=True) - xhat * slope)
    return dx, xp.sum(dy * xhat, axis=leading), xp.sum(dy, axis=leading)


def rms_norm(x: Any, w: Any, *, eps: float) -> Arrays:
    xp = array_namespace(x)
    rstd = 1 / xp.sqrt(xp.mean(x**2, axis=-1, keepdims=True) + eps)
    return w * x * rstd, (x * rstd, rstd, w)


def rms_norm_backward(dy: Any, saved: Any) -> Arrays:
    xhat, rstd, w = saved
    xp = array_namespace(dy)
    slope = xp.mean(dy * w * xhat, axis=-1, keepdims=True)
    return rstd * (dy * w - xhat * slope), xp.sum(rows(dy * xhat), axis=0)


def cross_entropy(logits: Any, *, targets: Any) -> Arrays:
    xp = array_namespace(logits)
    probs, _ = softmax(logits)
    hit = targets[..., None] == xp.arange(logits.shape[-1], device=device(logits))
    hit = xp.astype(hit, logits.dtype)
    x = logits - xp.max(logits, axis=-1, keepdims=True)
    losses = xp.log(xp.sum(xp.exp(x), axis=-1)) - xp.sum(x * hit, axis=-1)
    return xp.mean(losses), (probs - hit) / math.prod(targets.shape)


def cross_entropy_backward(dy: Any, saved: Any) -> Any:
    return dy * saved


def attention(q: Any, k: Any, v: Any) -> Arrays:
    probs, _ = softmax(q @ k.mT * q.shape[-1] ** -0.5)
    return probs @ v, (q, k, v, probs)


def attention_backward(dy: Any, saved: Any) -> Arrays:
    q, k, v, probs = saved
    dscores = softmax_backward(dy @ v.mT, probs) * q.shape[-1] ** -0.5
    return dscores @ k, dscores.mT @ q, probs.mT @ dy


def causal_attention(q: Any, k: Any, v: Any) -> Arrays:
    xp, n_queries, n_keys = array_namespace(q), q.shape[-2], k.shape[-2]
    last = xp.arange(n_queries, device=device(q))[:, None] + n_keys - n_queries
    allowed = xp.arange(n_keys, device=device(q)) <= last
    scores = xp.where(allowed, q @ k.mT * q.shape[-1] ** -0.5, -1e30)
    probs = xp.where(allowed, softmax(scores)[0], 0.0)
    return probs @ v, (q, k, v, probs)


causal_attention_backward = attention_backward


def grouped_attention(q: Any, k: Any, v: Any) -> Arrays:
    xp, n = array_namespace(q), q.shape[1] // k.shape[1]
    y, saved = attention(q, xp.repeat(k, n, axis=1), xp.repeat(v, n, axis=1))
    return y, (saved, n)


def grouped_attention_backward(dy: Any, saved: Any) -> Arrays:
    inner, n = saved
    xp = array_namespace(dy)
    dq, dk, dv = attention_backward(dy, inner)

    def summed(d: Any) -> Any:
        return xp.sum(xp.reshape(d, (d.shape[0], -1, n, *d.shape[2:])), axis=2)

    return dq, summed(dk), summed(dv)


def rope(x: Any, *, cos: Any, sin: Any) -> Arrays:
    half = cos.shape[-1]
    p, q = x[..., :half], x[..., half : 2 * half]
    parts = [p * cos - q * sin, q * cos + p * sin, x[..., 2 * half :]]
    return array_namespace(x).concat(parts, axis=-1), (cos, sin)


def rope_backward(dy: Any, saved: Any) -> Any:
    cos, sin = saved
    return rope(dy, cos=cos, sin=-sin)[0]


def self_attention(x: Any, w_q: Any, w_k: Any, w_v: Any, w_o: Any) -> Arrays:
    ctx, saved = attention(x @ w_q, x @ w_k, x @ w_v)
    return ctx @ w_o, (x, w_q, w_k, w_v, w_o, ctx, saved)


def self_attention_backward(dy: Any, saved: Any) -> Arrays:
    x, w_q, w_k, w_v, w_o, ctx, inner = saved
    dq, dk, dv = attention_backward(dy @ w_o.T, inner)
    dx = dq @ w_q.T + dk @ w_k.T + dv @ w_v.T
    dw = tuple(rows(x).T @ rows(d) for d in (dq, dk, dv))
    return dx, *dw, rows(ctx).T @ rows(dy)


def scores(x: Any, a: Any) -> Arrays:
    return x @ a @ x.T, (x, a)


def scores_backward(dy: Any, saved: Any) -> Arrays:
    x, a = saved
    return dy @ x @ a.T + dy.T @ x @ a, x.T @ dy @ x


def embedding(table: Any, *, ids: Any) -> Arrays:
    xp = array_namespace(table)
    flat = xp.reshape(ids, (-1,))
    hit = xp.astype(flat[:, None] == xp.arange(table.shape[0], device=device(table)), table.dtype)
    return xp.reshape(hit @ table, (*ids.shape, table.shape[1])), hit


def embedding_backward(dy: Any, saved: Any) -> Any:
    return saved.T @ rows(dy)


def feed_forward(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Arrays:
    pre, up = linear(x, w1, b1)
    hidden, act = relu(pre)
    y, down = linear(hidden, w2, b2)
    return y, (up, act, down)


def feed_forward_backward(dy: Any, saved: Any) -> Arrays:
    up, act, down = saved
    dhidden, dw2, db2 = linear_backward(dy, down)
    return *linear_backward(relu_backward(dhidden, act), up), dw2, db2


def residual_block(x: Any, gamma: Any, beta: Any, w: Any) -> Arrays:
    h, norm = ops.layer_norm(x, gamma, beta)
    a, cache = ops.linear(h, w)
    return x + a, (norm, cache)


def residual_block_backward(dy: Any, saved: Any) -> Arrays:
    norm, cache = saved
    dh, dw, _ = cache.backward(dy)
    dx, dgamma, dbeta = norm.backward(dh)
    return dx + dy, dgamma, dbeta, dw


def adamw_step(
    p: Any,
    grad: Any,
    m: Any,
    v: Any,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> Arrays:
    m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
    root = array_namespace(p).sqrt(v / (1 - beta2**step))
    p = p - lr * weight_decay * p - lr * m / (1 - beta1**step) / (root + eps)
    return p, m, v


def clip(grads: Any, *, max_norm: float) -> list[Any]:
    xp = array_namespace(*grads)
    norm = math.sqrt(sum(float(xp.sum(g**2)) for g in grads))
    return [g * min(1.0, max_norm / (norm + 1e-6)) for g in grads]


def dropout(x: Any, *, rate: float, key: Any) -> Arrays:
    xp = array_namespace(x)
    bits = ops.random_bits(x, key=key, size=math.prod(x.shape))
    keep = xp.reshape(bits >= round(rate * 2**32), x.shape)
    return xp.where(keep, x / (1 - rate), 0.0), (rate, key)


def dropout_backward(dy: Any, saved: Any) -> Any:
    rate, key = saved
    return dropout(dy, rate=rate, key=key)[0]


def initial_weights(u: Any) -> Any:
    return (6 / sum(u.shape)) ** 0.5 * (2 * u - 1)


def decode_step(x: Any, keys: Any, values: Any, *, w_q: Any, w_k: Any, w_v: Any) -> Arrays:
    xp = array_namespace(x)
    keys = xp.concat([keys, (x @ w_k)[:, None, :]], axis=1)
    values = xp.concat([values, (x @ w_v)[:, None, :]], axis=1)
    ctx, _ = attention((x @ w_q)[:, None, :], keys, values)
    return ctx[:, 0, :], keys, values


def top_p(logits: Any, *, p: float) -> Any:
    xp = array_namespace(logits)
    probs, _ = softmax(logits)
    ranked = xp.sort(probs, axis=-1, descending=True)
    before = xp.cumulative_sum(ranked, axis=-1) - ranked
    least = xp.min(xp.where(before < p, ranked, 1.0), axis=-1, keepdims=True)
    kept = xp.where(probs >= least, probs, 0.0)
    return kept / xp.sum(kept, axis=-1, keepdims=True)


def gpt_step(params: Any, *, tokens: Any, targets: Any, lr: float) -> Arrays:
    xp, p = array_namespace(tokens), params
    block = "stack.blocks.0."

    def pair(name: str) -> Arrays:
        return p[f"{name}.w"], p[f"{name}.b"]

    def split(x: Any) -> Any:
        return xp.permute_dims(xp.reshape(x, (*x.shape[:2], 2, -1)), (0, 2, 1, 3))

    def join(x: Any) -> Any:
        x = xp.permute_dims(x, (0, 2, 1, 3))
        return xp.reshape(x, (*x.shape[:2], -1))

    x, lookup = ops.embedding(p["embed.table"], ids=tokens)
    x = x + p["embed.positions"][: tokens.shape[1], :]
    h, norm1 = ops.layer_norm(x, *pair(f"{block}attn_norm"))
    heads = {name: ops.linear(h, *pair(f"{block}attn.{name}")) for name in ("q", "kv.k", "kv.v")}
    ctx, core = ops.sdpa(*(split(y) for y, _ in heads.values()), causal=True)
    a, to_o = ops.linear(join(ctx), *pair(f"{block}attn.o"))
    x = x + a
    h, norm2 = ops.layer_norm(x, *pair(f"{block}ffn_norm"))
    u, up = ops.linear(h, *pair(f"{block}ffn.up"))
    g, gelu = ops.gelu(u, approximate="tanh")
    f, down = ops.linear(g, *pair(f"{block}ffn.down"))
    x, norm3 = ops.layer_norm(x + f, *pair("stack.norm"))
    logits, head = ops.linear(x, p["embed.table"].T)
    loss, losses = ops.cross_entropy(logits, targets=targets)

    d: dict[str, Any] = {}

    def noted(name: str, dx: Any, dw: Any, db: Any) -> Any:
        d[f"{name}.w"], d[f"{name}.b"] = dw, db
        return dx

    dx, dhead, _ = head.backward(losses.backward())
    dx = noted("stack.norm", *norm3.backward(dx))
    dg = noted(f"{block}ffn.down", *down.backward(dx))
    dh = noted(f"{block}ffn.up", *up.backward(gelu.backward(dg)))
    dx = dx + noted(f"{block}ffn_norm", *norm2.backward(dh))
    dctx = noted(f"{block}attn.o", *to_o.backward(dx))
    dheads = zip(heads.items(), core.backward(split(dctx))[:3], strict=True)
    dh = sum(
        noted(f"{block}attn.{name}", *cache.backward(join(dhead)))
        for (name, (_, cache)), dhead in dheads
    )
    dx = dx + noted(f"{block}attn_norm", *norm1.backward(dh))
    d["embed.table"] = lookup.backward(dx) + dhead.T
    rest = xp.zeros_like(p["embed.positions"][tokens.shape[1] :, :])
    d["embed.positions"] = xp.concat([xp.sum(dx, axis=0), rest], axis=0)
    return loss, {name: p[name] - lr * d[name] for name in p}
