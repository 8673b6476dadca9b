"""The gradient of each example of a batch: exact norms, and clipping, in one backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any, NamedTuple

from array_api_compat import is_array_api_obj

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import NoCache
from xformer.dispatch.checks import in_range, number, require_shape
from xformer.dispatch.shapes import require_like
from xformer.hooks import per_example_rules as rules
from xformer.hooks.node_names import (
    UNFUSED,
    fused_op,
    is_edited,
    is_node,
    kind_of,
    op_of,
    with_methods,
    with_parts,
)
from xformer.hooks.per_example_array import Summands, value_of
from xformer.layers.protocol import SideInputs


@short
class PerExample(NamedTuple):
    """The gradients of the examples of a batch, as `per_example` returns them."""

    grads: Any  # what cache.backward() returns: the sum over the examples, with the same bits
    squared_norms: Array  # (B,), of the gradient of each example; never too small by rounding
    summands: Any  # the tree of `grads` with `Summands` arrays: the factors of the gradients

    def weighted(self, weights: Array) -> Any:
        """The sum of the gradients of the examples, each times its weight. weights: (B,)."""
        require_like("per_example", "weights", weights, self.squared_norms)
        require_shape("per_example", "weights", weights, self.squared_norms.shape)
        return tree.map(
            lambda g: g.weighted(weights) if isinstance(g, Summands) else g, self.summands
        )

    def clipped(self, max_norm: float) -> Any:
        """The sum of the gradients g of the examples, each times min(1, max_norm / |g|).

        The clipping of DP-SGD (arXiv:1607.00133, algorithm 1), before noise is added.

        ValueError for a norm that is infinite or NaN, where that is known without waiting for a
        device; otherwise the result is not finite.
        """
        max_norm = number("per_example", "max_norm", max_norm, low=0)
        xp = array_namespace(self.squared_norms)
        is_wrong = xp.astype(~xp.isfinite(self.squared_norms), xp.int32)
        if not in_range(is_wrong, size=1):
            raise ValueError(
                f"per_example: the gradient of example {int(xp.argmax(is_wrong))} is not finite"
            )
        norms = xp.sqrt(self.squared_norms)
        shorter = norms <= max_norm  # false for NaN, whose weight is NaN
        return self.weighted(xp.where(shorter, 1.0, max_norm / xp.where(shorter, 1.0, norms)))


def per_example(cache: Any, *dys: Any, dy: Any = None) -> PerExample:
    """The gradients of all examples of a batch, from one backward; none of them is stored.

    The gradient of an example is that of its part of the loss, so their sum is the gradient. With
    the mean over B sequences of one length, it is 1 / B of the gradient of the sequence alone.
    The norm is over all parameters. The part of a weight is computed from x and dy of the example
    ("ghost norms", arXiv:2110.05679), or from its gradient where that is less work.

    cache: of a loss or a forward; the first axis of its arrays is the batch
    dys, dy: the arguments of `cache.backward`; none for a loss

    Memory: x and dy of all linear layers are kept until the result is dropped.

    ValueError for a batch without examples, whose clipped sum is zeros like the parameters.
    ValueError, with the name of what cannot be done: a loss that mixes the examples, an op without
    a rule, and kernels that compute several layers at once or save too little.
    """
    dys = dys if dy is None else (*dys, dy)
    n = _n_examples(cache, dys)
    known = _known(cache, n)
    if n == 0:
        raise ValueError(
            "per_example: the number of examples is not known, or 0; a forward needs the gradient "
            "of its output"
        )
    summands = known.backward(*dys)
    grads = tree.map(lambda g: g.value if isinstance(g, Summands) else g, summands)
    norms = [g.squared_norms() for g in _gradients(summands)]
    if not norms:
        raise ValueError("per_example: no parameter has a gradient")
    return PerExample(grads, reduce(add, norms), summands)


def _gradients(summands: Any) -> Iterator[Summands]:
    """The gradients of all parameters. Arrays beside trees of them are gradients of inputs."""
    are_many = isinstance(summands, tuple) and not hasattr(summands, "_fields")
    for part in summands if are_many else (summands,):
        for name, grad in tree.flatten({"": part}).items():
            if isinstance(grad, Summands):
                yield grad
            elif (
                name
                and not isinstance(part, SideInputs)  # of inputs too
                and is_array_api_obj(grad)
                and array_namespace(grad).any(grad != 0)
            ):
                raise ValueError(f"per_example: the gradient of {name} is not known by example")


def _known(node: Any, n: int) -> Any:
    """A copy of a cache whose backward returns `Summands` for the gradients of parameters."""
    if isinstance(node, NoCache):
        raise ValueError("per_example: the cache was made within inference(), which saves nothing")
    if not isinstance(node, tuple):
        return node
    rule = _rule(node) if is_node(node) else None
    if is_node(node) and (_is_of_op(node) or rules.own(node) or _is_without_examples(node)):
        return node if rule is None else _with_rule(node, rule, n)
    parts = [_known(part, n) for part in node]
    node = with_parts(node, parts) if hasattr(node, "_fields") else tuple(parts)
    if rule is not None:
        return _with_rule(node, rule, n)
    if is_node(node) and kind_of(node) == "embed.EmbedCache":

        def backward(_: Any, self: Any, dpos: Any) -> Any:
            return self.table_backward(rules.summed_positions(dpos, self.pos_shape or ()))

        return with_methods(node, {"positions_backward": backward})
    if hasattr(node, "again"):  # the backward makes caches

        def again(before: Any, self: Any, *args: Any) -> Any:
            return _known(before(self, *args), n)

        return with_methods(node, {"again": again})
    return node


def _rule(node: Any) -> rules.Rule | None:
    """The rule of a cache with parameters; None for one without. ValueError if it has none."""
    op = op_of(node)
    if fused_op(node) is not None:
        raise ValueError(f"per_example: a kernel of {op} ran; {UNFUSED}")
    rule = rules.OPS.get(op) if _is_of_op(node) else rules.LAYERS.get(kind_of(node))
    rule = rule or rules.own(node)
    if rule is not None and is_edited(node):
        raise ValueError(f"per_example: the node of {op} was edited; edit the layer around it")
    if op in rules.MIXED:
        raise ValueError(f"per_example: by {op}, the loss of an example depends on the others")
    is_known = _is_of_op(node) and op in rules.PLAIN
    if rule is None and not is_known and not _has_nodes(node):
        raise ValueError(
            f"per_example: there is no rule for the gradients of {kind_of(node)}: give it one by "
            "xf.per_example_rule"
        )
    return rule


def _is_of_op(node: Any) -> bool:
    """Whether a cache is that of an op which is no composition of others."""
    is_op = type(node).__module__.startswith(("xformer.ops.", "xformer.backends."))
    return is_op and (op_of(node) in rules.OPS or op_of(node) in rules.PLAIN)


def _is_without_examples(node: Any) -> bool:
    """Whether a cache has the weight 0, as that of `load_balancing` may."""
    return kind_of(node) == "router_loss.RouterLossCache" and not node.weights[0]


def _has_nodes(node: Any) -> bool:
    """Whether a cache consists of others, or its backward makes them."""
    if type(node).__module__.startswith(("xformer.layers.", "xformer.models.")):
        return True
    return any(is_node(part) or (type(part) is tuple and any(map(is_node, part))) for part in node)


def _with_rule(node: Any, rule: rules.Rule, n: int) -> Any:
    def backward(before: Any, self: Any, *dys: Any) -> Any:
        return rule(node, dys, before(self, *map(value_of, dys)), n)

    return with_methods(node, {"backward": backward})


def _n_examples(cache: Any, dys: tuple[Any, ...]) -> int:
    """The size of the batch: that of dy, or of the targets; 0 if it is not known."""
    for dy in dys:
        if is_array_api_obj(dy) and dy.ndim:
            return int(dy.shape[0])
    return _batch(cache) or 0


def _batch(node: Any) -> int | None:
    if not isinstance(node, tuple):
        return None
    if op_of(node) == "cross_entropy" and is_node(node):
        loss: Any = node
        return int((loss.shape if hasattr(loss, "shape") else loss.targets.shape)[0])
    return next((n for part in node if (n := _batch(part)) is not None), None)
