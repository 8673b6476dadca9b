"""Checks of the arguments of optimisers."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

from array_api_compat import is_array_api_obj

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.checks import finite, number, require_gradient
from xformer.dispatch.shapes import alike, require_array


def require_matching(op: str, params: Any, other: Any, what: str = "the gradient") -> None:
    """ValueError or TypeError unless `other` has the same leaves as params, and no others."""
    matching(op, tree.flatten(params), other, what)


def matching(op: str, params: dict[str, Array], other: Any, what: str) -> dict[str, Array]:
    """The leaves of `other` by name, in the order of params.

    what: the name of a leaf of `other` in a message. Raises as `require_matching` does.
    """
    leaves = tree.flatten(other)
    for name, p in params.items():
        leaf = leaves.get(name)
        if leaf is None:
            if isinstance(p, tree.Frozen):
                require_array(op, name or "params", p)
            raise ValueError(f"{op}: {what} of {name or 'params'} is missing")
        if not alike(leaf, p) or leaf.shape != p.shape:
            require_array(op, name or "params", p)
            require_gradient(op, f"{what} of {name or 'params'}", leaf, p)
    if len(leaves) > len(params):
        extra = sorted(leaves.keys() - params.keys())
        raise ValueError(f"{op}: there is {what} of {', '.join(extra)}, but no such parameter")
    return leaves if list(leaves) == list(params) else {name: leaves[name] for name in params}


def side_by_side(op: str, params: Any, **others: Any) -> tuple[list[Array], ...]:
    """The leaves of params and of each of the other trees, all in the order of params.

    others: trees, under the names that a message gives to their leaves. Raises as `matching` does.
    """
    rows = tree.beside(params, *others.values())
    if rows and _are_alike(rows):
        return tuple(map(list, zip(*rows, strict=True)))
    named = tree.flatten(params)  # by name: for a message, or because the orders differ
    matched = (matching(op, named, other, what) for what, other in others.items())
    return tuple(list(leaves.values()) for leaves in (named, *matched))


def _are_alike(rows: list[tuple[Array, ...]]) -> bool:
    """Whether the arrays of each row have the same shape, type, dtype and device."""
    for like, *others in rows:
        shape = like.shape
        for x in others:
            if x.shape != shape or not alike(x, like):
                return False
    return True


def require_arrays(op: str, leaves: Mapping[str, Any]) -> None:
    """TypeError unless all leaves are arrays; the message names the first that is not."""
    for name, leaf in leaves.items():
        require_array(op, name or "the tree", tree.value(leaf))


def zeros(op: str, params: Any) -> Any:
    """A tree of zeros like the leaves of params. TypeError unless all leaves are arrays."""
    require_arrays(op, tree.flatten(params))
    return tree.map(lambda p: array_namespace(p).zeros_like(p), params)


def rebuilt(like: Any, params: Any, old: Sequence[Array], new: Sequence[Array]) -> Any:
    """The tree `like` with the leaves `new`; `like` itself if each new leaf is the old one.

    like: its leaves have the same names as those of params, in any order; leaves are matched by
        name
    old, new: the leaves before and after the update, in the order of `tree.flatten(params)`
    """
    if all(map(operator.is_, old, new)):
        return like
    return tree.unflatten(like, dict(zip(tree.flatten(params), new, strict=True)))


def all_distinct(*leaves: Sequence[Array]) -> bool:
    """Whether no array appears twice, as a tied weight may. If not, none may be overwritten."""
    ids = list(map(id, itertools.chain(*leaves)))
    return len(set(ids)) == len(ids)


def require_state(op: str, state: Any, kind: type) -> None:
    """TypeError unless `state` is a `kind`."""
    if not isinstance(state, kind):
        raise TypeError(f"{op}: state must be {kind.__name__}, got {type(state).__name__}")


def learning_rate(op: str, lr: Any) -> Any:
    """lr as a float of at least 0. An array () is returned as it is: `jax.jit` may trace it.

    A number that a program is recorded for is checked in each run.
    """
    if not issubclass(type(lr), Real) and is_array_api_obj(lr) and lr.shape == ():
        require_array(op, "lr", lr, "a number")
        if (check_in_runs := getattr(lr, "check_in_runs", None)) is not None:
            check_in_runs(partial(finite, op, "lr", low=0))
        return lr
    return finite(op, "lr", lr, low=0)


def in_dtype(value: Any, p: Array) -> Any:
    """A number as a float, an array () in the dtype of p, so that neither widens p."""
    # Also NumPy's float64, which 0-d arrays become. A traced number is only an instance.
    if issubclass(type(value), Real):
        return float(value)
    return array_namespace(p).astype(value, p.dtype)


def two_betas(op: str, betas: Any) -> tuple[float, float]:
    """The decay rates of two moving averages, as floats.

    TypeError unless betas is two numbers, ValueError if one is outside [0, 1).
    """
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"{op}: betas must be two numbers, got {betas!r}")
    beta1, beta2 = (number(op, "betas", beta) for beta in betas)
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"{op}: betas must lie in [0, 1), got {betas}")
    return beta1, beta2
