"""The summands of the gradients of each op with parameters, for `xf.per_example`.

A rule gets the cache of an op, the gradients of its outputs, what its backward returned for them,
and the number of examples. It returns the same with `Summands` for the gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.checks import require_gradient
from xformer.hooks.node_names import op_of
from xformer.hooks.per_example_array import Each, Product, Summands, each_of, rows
from xformer.layers.linear import BiasParams
from xformer.ops.sum_to import sum_to

Rule = Callable[[Any, tuple[Any, ...], Any, int], Any]


def _sum(x: Array) -> Array:
    """(B, N, D) -> (B, D)."""
    return array_namespace(x).sum(x, axis=1)


def _each(grad: Array | None, make: Callable[[], Array]) -> Summands | None:
    return None if grad is None else Summands(grad, [Each(make)])


def linear(cache: Any, dys: tuple[Any, ...], grads: Any, n: int) -> Any:
    """dw = x^T dy, db = sum of dy."""
    dx, dw, db = grads
    (dy,) = dys
    if isinstance(dy, Summands):  # x has no batch axis
        xp = array_namespace(cache.x)
        dy = rows(each_of(dy), n)
        x = xp.broadcast_to(rows(cache.x, 1), (*dy.shape[:2], cache.x.shape[-1]))
    else:
        dy, x = rows(dy, n), None if dw is None else rows(cache.x, n)
    weight = None if dw is None or x is None else Summands(dw, [Product(x, dy)])
    return dx, weight, _each(db, lambda: _sum(dy))


def layer_norm(cache: Any, dys: tuple[Any, ...], grads: Any, n: int) -> Any:
    """dw = sum of dy * xhat, db = sum of dy."""
    dx, dw, *db = grads
    dy = rows(dys[0], n)
    return (
        dx,
        _each(dw, lambda: _sum(dy * _xhat(cache, n))),
        *(_each(grad, lambda: _sum(dy)) for grad in db),
    )


def _xhat(cache: Any, n: int) -> Array:
    """(B, N, D). Some kernels store mean and rstd without the last axis, or rstd with another."""
    xp, x = array_namespace(cache.x), rows(cache.x, n)
    if hasattr(cache, "mean"):
        x = x - xp.reshape(cache.mean, (*x.shape[:2], 1))
    return x * xp.reshape(cache.rstd, (*x.shape[:2], -1))[..., :1]


def embedding(cache: Any, dys: tuple[Any, ...], grads: Any, n: int) -> Any:
    """Row ids of dtable gets dy."""
    (dy,) = dys
    xp = array_namespace(cache.ids)
    ids = xp.reshape(cache.ids, (1 if isinstance(dy, Summands) else n, -1))
    dy = rows(each_of(dy), n)
    return Summands(grads, [Product(xp.broadcast_to(ids, dy.shape[:2]), dy)])


def causal_conv(cache: Any, dys: tuple[Any, ...], grads: Any, n: int) -> Any:
    """The op's own backward, of one example at a time, gives dw."""
    dx, dw, dbefore = grads

    def make() -> Array:
        one = [_example(cache, i, ("x", "before")) for i in range(n)]
        each = [c.backward(dys[0][i : i + 1, ...])[1] for i, c in enumerate(one)]
        return array_namespace(dys[0]).stack(each)

    return dx, _each(dw, make), dbefore


def _example(cache: Any, i: int, names: tuple[str, ...]) -> Any:
    """The cache of example i alone, whose arrays `names` have a batch axis or are None."""
    arrays = {name: getattr(cache, name) for name in names}
    return cache._replace(**{k: a if a is None else a[i : i + 1, ...] for k, a in arrays.items()})


def log_decay(cache: Any, dys: tuple[Any, ...], grads: Any, n: int) -> Any:
    """dlog_rate = sum of y * dy."""
    dx, dlog_rate = grads
    return dx, _each(dlog_rate, lambda: _sum(rows(cache.y * dys[0], n)))


def scale(cache: Any, dys: tuple[Any, ...], grads: Any, n: int) -> Any:
    """dalpha = sum of dy * x."""
    dx, dalpha = grads

    def make() -> Array:
        xp = array_namespace(cache.x)
        return xp.sum(xp.reshape(dys[0] * cache.x, (n, -1)), axis=1, keepdims=True)

    return dx, _each(dalpha, make)


def attention(cache: Any, dys: tuple[Any, ...], grads: Any, n: int) -> Any:
    """The op's own backward, of one example at a time, gives the gradients after q, k and v."""
    if all(grad is None for grad in grads[3:]):
        return grads
    results: list[Any] = []

    def make(which: int) -> Array:
        if not results:
            results.extend(_of_examples(cache, dys[0], n))
        return array_namespace(dys[0]).stack([result[which] for result in results])

    return (
        *grads[:3],
        *(_each(grad, partial(make, which)) for which, grad in enumerate(grads[3:], start=3)),
    )


class _Times(NamedTuple):
    """The cache of dropout with a given mask, which is 0 or 1 / (1 - rate)."""

    mask: Array

    def backward(self, dy: Array) -> Array:
        return dy * self.mask


def _of_examples(cache: Any, dctx: Array, n: int) -> list[Any]:
    if not hasattr(cache, "probs"):
        raise ValueError(
            f"per_example: a kernel of {op_of(cache)} ran, which does not save the probabilities: "
            "run the forward within xf.reference_only()"
        )
    xp = array_namespace(dctx)
    changed = {name: getattr(cache, name) for name in ("q", "k", "v", "probs")}
    if getattr(cache, "shares", None) is not None:
        changed["shares"] = cache.shares
    if hasattr(cache, "drop"):
        mask = cache.drop.backward(xp.ones_like(cache.probs))
    found = []
    for i in range(n):
        one = {name: array[i : i + 1, ...] for name, array in changed.items()}
        if hasattr(cache, "drop"):
            one["drop"] = _Times(mask[i : i + 1, ...])
        shape = getattr(cache, "bias_shape", None)
        if shape is not None and len(shape) == 4:
            one["bias_shape"] = (1, *shape[1:])
        found.append(cache._replace(**one).backward(dctx[i : i + 1, ...]))
    return found


def experts(cache: Any, dys: tuple[Any, ...], grads: Any, n: int) -> Any:
    """Of each expert: the products of x with dgate and dup, and of its hidden units with dy.

    db_gate and db_up are sums of dgate and dup, db_down is the sum of share * dy.
    """
    dx, *dws, dweights, db_gate, db_up, db_down = grads
    if all(grad is None for grad in (*dws, db_gate)):
        return grads
    if not hasattr(cache, "factors"):
        raise ValueError(
            "per_example: a kernel of experts ran: run the forward within xf.reference_only()"
        )
    xp = array_namespace(dx)

    def stacked(arrays: tuple[Array, ...]) -> Array:
        """(B, E, N, D) of E arrays (B * N, D)."""
        return xp.stack([rows(a, n) for a in arrays], axis=1)

    pairs = zip(*cache.factors(dys[0]), strict=True)  # of gate, up and down
    products = [Product(*map(stacked, zip(*pair, strict=True))) for pair in pairs]
    terms = [Summands(dw, [product]) for dw, product in zip(dws, products, strict=True)]
    gate, up, down = products
    shares = stacked(tuple(part.share[:, None] for part in cache.parts))
    return (
        *(dx, *terms, dweights),
        _each(db_gate, lambda: xp.sum(gate.dy, axis=2)),
        _each(db_up, lambda: xp.sum(up.dy, axis=2)),
        _each(db_down, lambda: xp.sum(shares * down.dy, axis=2)),
    )


def bias(cache: Any, dys: tuple[Any, ...], grads: Any, n: int) -> Any:
    """db = sum of dy."""
    dx, (db,) = grads
    return dx, BiasParams(_each(db, lambda: _sum(rows(dys[0], n))))


def heads(cache: Any, dys: tuple[Any, ...], grads: Any, n: int) -> Any:
    """dpos = sum over the heads."""
    dy, dnorm, dpos = grads
    if dpos is None:
        return grads

    def make() -> Array:
        shape = (n, 1, *cache.pos_shape)
        each = cache._replace(pos_shape=shape).backward(dys[0])[2]
        return array_namespace(each).reshape(each, (n, *cache.pos_shape))

    return dy, dnorm, _each(dpos, make)


def per_example_rule(cache: type, rule: Callable[..., Any]) -> None:
    """Let `per_example` compute the gradients of an op of your own.

    def rule(cache, dy):  # y = x * w, of x (B, T, D) and w (D,)
        return None, xp.sum(dy * cache.x, axis=1)  # dw of each example, (B, D)

    xf.per_example_rule(MyCache, rule)

    cache: the class of the op's cache, a NamedTuple with a backward
    rule: rule(cache, *dys) returns what `cache.backward(*dys)` returns, with an array (B, *shape)
        in the place of a parameter's gradient of `shape`, the gradient of each example. None in the
        place of the gradient of an input, whose first axis is the batch.

    TypeError for another class, and for a rule that cannot be called.
    """
    if not (isinstance(cache, type) and hasattr(cache, "_fields") and hasattr(cache, "backward")):
        raise TypeError(
            "per_example_rule: cache must be the class of a cache, a NamedTuple with a backward, "
            f"got {cache!r:.100}"
        )
    if not callable(rule):
        raise TypeError(f"per_example_rule: rule must be a function, got {type(rule).__name__}")
    OWN[cache] = rule


def own(node: Any) -> Rule | None:
    """The rule of a cache whose class has a `per_example_rule`; None for others."""
    function = next((OWN[kind] for kind in type(node).__mro__ if kind in OWN), None)
    return None if function is None else partial(_by_function, function)


def _by_function(
    function: Callable[..., Any], cache: Any, dys: tuple[Any, ...], grads: Any, n: int
) -> Any:
    """A `Rule` by the function of `per_example_rule`."""
    name = type(cache).__name__
    if any(isinstance(dy, Summands) for dy in dys):
        raise ValueError(f"per_example: the rule of {name} needs inputs with a batch axis")

    def merged(each: Any, grad: Any) -> Any:
        if each is None or grad is None:
            return grad
        if isinstance(grad, tuple):
            if not isinstance(each, tuple) or len(each) != len(grad):
                raise ValueError(
                    f"per_example: the rule of {name} must return {len(grad)} gradients in a "
                    f"tuple, as its backward, got {type(each).__name__}"
                )
            parts: Any = tuple(map(merged, each, grad))
            return type(grad)(*parts) if hasattr(grad, "_fields") else parts
        what = f"a gradient by the rule of {name}"
        require_gradient("per_example", what, each, grad, (n, *grad.shape))
        return Summands(grad, [Each(lambda: each)])

    return merged(function(cache, *dys), grads)


def summed_positions(dpos: Any, shape: tuple[int, ...]) -> Any:
    """The gradient of position vectors of `shape`, from that of their sum with embeddings."""
    total = sum_to(dpos, shape=shape)
    if isinstance(dpos, Summands) or len(shape) != 2:
        return total
    return Summands(total, [Each(lambda: dpos)])


OPS: dict[str, Rule] = {
    "additive_attention": attention,
    "causal_conv": causal_conv,
    "embedding": embedding,
    "experts": experts,
    "layer_norm": layer_norm,
    "linear": linear,
    "log_decay": log_decay,
    "rms_norm": layer_norm,
    "scale": scale,
    "sdpa": attention,
    "shaw": attention,
    "xl_attention": attention,
}
LAYERS: dict[str, Rule] = {"linear.BiasCache": bias, "attention.HeadsCache": heads}
# Ops without parameters that treat the rows of x one by one.
PLAIN = {
    *("clamped_swiglu", "cross_entropy", "dropout", "erf", "gated_delta_rule", "gelu", "glu"),
    *("activation", "index_add", "l2_normalize"),
    *(
        "log_softmax",
        "lsh_attention",
        "mse",
        "quick_gelu",
        "relu",
        "relu_squared",
        "rope",
        "router_z_loss",
    ),
    *("sigmoid", "silu", "softcap", "softmax", "tanh"),
}
# Caches of ops of users -> their function in `per_example_rule`.
OWN: dict[type, Callable[..., Any]] = {}
MIXED = {"info_nce", "load_balancing"}  # the loss of an example depends on the others
