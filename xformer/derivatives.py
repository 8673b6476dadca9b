"""Exact derivatives in a direction, of any function of arrays: also of a backward.

The function is called once, on dual numbers (`xformer.arrays.dual`), on the library of its
arguments. Ops run their references.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from array_api_compat import array_namespace, is_array_api_obj

from xformer import tree
from xformer.arrays.dual import Dual, dual, forget
from xformer.dispatch import reference_only
from xformer.shapes import require_like
from xformer.typing import Array

T = TypeVar("T")

_levels = itertools.count()


def jvp(fn: Callable[..., T], args: Sequence[Any], tangents: Sequence[Any]) -> tuple[T, T]:
    """(y, dy): y = fn(*args), and dy its derivative along the tangents, J v (forward mode).

    fn: returns an array or a tree of arrays. All floating arrays that it uses must be arguments.
    args: arrays, or trees of arrays such as parameters
    tangents: v, for each argument a tree with the same structure, dtypes and shapes, or None if the
        argument is constant, as integers must be
    y, dy: the same tree. Calls may be nested: the derivative of a derivative is exact too.

    ValueError or TypeError if the tangents do not fit, and TypeError if fn returns something else
    than arrays.
    """
    if len(args) != len(tangents):
        raise ValueError(f"jvp: {len(args)} arguments need as many tangents, got {len(tangents)}")
    level = next(_levels)

    def raised(x: Array, v: Array) -> Dual:
        require_like("jvp", "a tangent", v, x)
        if tuple(v.shape) != tuple(x.shape):
            raise ValueError(
                f"jvp: a tangent must have shape {tuple(x.shape)}, got {tuple(v.shape)}"
            )
        if not array_namespace(x).isdtype(x.dtype, "real floating"):
            raise TypeError(f"jvp: an argument of dtype {x.dtype} is constant: its tangent is None")
        return dual(x, v, level)

    def constant(x: Any) -> Any:
        is_floating = is_array_api_obj(x) and array_namespace(x).isdtype(x.dtype, "real floating")
        return dual(x, array_namespace(x).zeros_like(x), level) if is_floating else x

    duals = [
        tree.map(constant, x) if v is None else tree.map(raised, x, v)
        for x, v in zip(args, tangents, strict=True)
    ]
    try:
        with reference_only():
            y = fn(*duals)
    except TypeError as error:
        said = str(error)
        if "Dual" in said and not said.startswith(("dual:", "unsupported operand")):
            raise TypeError(
                "jvp: the function must call functions of `array_namespace(x)`, and a floating "
                "array whose functions it calls must be an argument of jvp, with the tangent None "
                f"if it is constant ({error})"
            ) from error
        raise
    finally:
        forget(level)
    return tree.map(lambda leaf: _parts(leaf, level)[0], y), tree.map(
        lambda leaf: _parts(leaf, level)[1], y
    )


def hvp(fn: Callable[..., tuple[Array, Any]], params: T, v: T, *args: Any) -> T:
    """H v, with H the Hessian of a loss: the derivative of the hand-written gradient along v.

    fn: fn(params, *args) returns (loss, cache), and `cache.backward()` the gradient of params
    params, v: trees of the same structure, dtypes and shapes
    args: constants. Integer arrays need not be among them, other arrays must (`jvp`).
    """

    def gradient(params: T, *args: Any) -> T:
        gradient: Any = fn(params, *args)[1].backward()
        if type(gradient) is tuple and not isinstance(params, tuple):
            raise ValueError(
                "hvp: cache.backward() must return the gradient of params alone, "
                f"got a tuple of {len(gradient)}"
            )
        return gradient

    return jvp(gradient, (params, *args), (v, *(None for _ in args)))[1]


def gauss_newton(
    model: Callable[..., tuple[Array, Any]],
    loss: Callable[[Array], tuple[Array, Any]],
    params: T,
    v: T,
    *args: Any,
) -> T:
    """G v = J^T H J v: J is the Jacobian of the model, H the Hessian of the loss at its output.

    G is the Hessian of loss(model(params)) without the second derivatives of the model. It is
    positive semidefinite if the loss is convex (Schraudolph 2002; Martens 2010).

    model: model(params, *args) returns (z, cache), and `cache.backward(dz)` the gradient of params
    loss: loss(z) returns (loss, cache), and `cache.backward()` the gradient of z
    params, v: trees of the same structure, dtypes and shapes
    args: constants, as in `hvp`
    """
    _, dz = jvp(lambda *args: model(*args)[0], (params, *args), (v, *(None for _ in args)))
    z, cache = model(params, *args)
    gradient: T = cache.backward(hvp(loss, z, dz))
    return gradient


def _parts(leaf: Any, level: int) -> tuple[Array, Array]:
    """The value and the tangent of an array; the tangent of a constant is 0."""
    if isinstance(leaf, Dual) and leaf.level == level:
        return leaf.value, leaf.tangent
    if not is_array_api_obj(leaf):
        raise TypeError(f"jvp: the function must return arrays, got {type(leaf).__name__}")
    return leaf, array_namespace(leaf).zeros_like(leaf)
