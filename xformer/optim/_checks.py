"""Checks of what optimisers are given."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from array_api_compat import array_namespace, is_array_api_obj

from xformer import tree
from xformer.checks import finite, number, require_gradient
from xformer.shapes import alike, require_array
from xformer.typing import Array


def require_matching(op: str, params: Any, other: Any, what: str = "the gradient") -> None:
    """ValueError, TypeError unless `other` has a leaf like each of params, and no more."""
    matching(op, tree.flatten(params), other, what)


def matching(op: str, params: dict[str, Array], other: Any, what: str) -> dict[str, Array]:
    """The leaves of `other` by name, in the order of those of params. As `require_matching`."""
    leaves = tree.flatten(other)
    for name, p in params.items():
        leaf = leaves.get(name)
        if leaf is None:
            raise ValueError(f"{op}: {what} of {name or 'params'} is missing")
        if not alike(leaf, p) or leaf.shape != p.shape:
            require_array(op, name or "params", p)
            require_gradient(op, f"{what} of {name or 'params'}", leaf, p)
    if len(leaves) > len(params):
        extra = sorted(leaves.keys() - params.keys())
        raise ValueError(f"{op}: there is {what} of {', '.join(extra)}, but no such parameter")
    return leaves if list(leaves) == list(params) else {name: leaves[name] for name in params}


def side_by_side(op: str, params: Any, **others: Any) -> tuple[list[Array], ...]:
    """The leaves of params, and of other trees by what they are, in one order. As `matching`."""
    rows = tree.beside(params, *others.values())
    if rows and _are_alike(rows):
        return tuple(map(list, zip(*rows, strict=True)))
    named = tree.flatten(params)  # of which a message speaks, or whose order is another
    found = (matching(op, named, other, what) for what, other in others.items())
    return tuple(list(leaves.values()) for leaves in (named, *found))


def _are_alike(rows: list[tuple[Array, ...]]) -> bool:
    """Whether arrays beside each other have one shape, and more."""
    for like, *others in rows:
        shape = like.shape
        for x in others:
            if x.shape != shape or not alike(x, like):
                return False
    return True


def require_arrays(op: str, leaves: Mapping[str, Any]) -> None:
    """TypeError unless all leaves are arrays; the message has the name of the first that is not."""
    for name, leaf in leaves.items():
        require_array(op, name or "the tree", tree.value(leaf))


def zeros(op: str, params: Any) -> Any:
    """Zeros like the leaves of params. TypeError unless these are arrays."""
    require_arrays(op, tree.flatten(params))
    return tree.map(lambda p: array_namespace(p).zeros_like(p), params)


def rebuilt(like: Any, params: Any, old: Sequence[Array], new: Sequence[Array]) -> Any:
    """`like` with new leaves, in the order of params'; itself where each is the old one."""
    if all(map(operator.is_, old, new)):
        return like
    return tree.unflatten(like, dict(zip(tree.flatten(params), new, strict=True)))


def all_distinct(*leaves: Sequence[Array]) -> bool:
    """Whether no array is there twice, as a tied weight may be: else none may be written over."""
    ids = list(map(id, itertools.chain(*leaves)))
    return len(set(ids)) == len(ids)


def require_state(op: str, state: Any, kind: type) -> None:
    """TypeError unless the state is of that kind."""
    if not isinstance(state, kind):
        raise TypeError(f"{op}: state must be {kind.__name__}, got {type(state).__name__}")


def learning_rate(op: str, lr: Any) -> Any:
    """lr as a float of at least 0; an array () stays: it may be traced (`jax.jit`)."""
    if not isinstance(lr, Real) and is_array_api_obj(lr) and lr.shape == ():
        require_array(op, "lr", lr, "a number")
        return lr
    return finite(op, "lr", lr, low=0)


def in_dtype(value: Any, p: Array) -> Any:
    """A number as a float, an array () in the dtype of p: neither may widen p."""
    if isinstance(value, Real):  # NumPy's float64 too, which 0-d arrays turn into
        return float(value)
    return array_namespace(p).astype(value, p.dtype)


def two_betas(op: str, betas: Any) -> tuple[float, float]:
    """Two shares of what is remembered. TypeError unless two numbers, ValueError outside [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"{op}: betas must be two numbers, got {betas!r}")
    beta1, beta2 = (number(op, "betas", beta) for beta in betas)
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"{op}: betas must lie in [0, 1), got {betas}")
    return beta1, beta2
