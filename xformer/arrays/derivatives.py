"""Exact derivatives in a direction, of any function of arrays: also of a backward.

The function is called once, on dual numbers (`xformer.arrays.dual`), on the library of its
arguments. Ops run their references.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from array_api_compat import is_array_api_obj

from xformer.arrays.dual import Dual, dual, forget
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import library_of, reference_only
from xformer.dispatch.checks import require_shape
from xformer.dispatch.shapes import require_like

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
    names = [f"args[{i}]" for i in range(len(args))]
    return _jvp("jvp", fn, args, tangents, names, [f"tangents[{i}]" for i in range(len(args))])


def _jvp(
    what: str,
    fn: Callable[..., T],
    args: Sequence[Any],
    tangents: Sequence[Any],
    names: Sequence[str],
    tangent_names: Sequence[str],
) -> tuple[T, T]:
    """`jvp`; what, names, tangent_names: of the function and of its arguments, for messages."""
    if not callable(fn):
        raise TypeError(f"{what}: fn must be a function, got {fn!r:.100}")
    level = next(_levels)
    libraries: dict[str, str] = {}  # library -> the first argument of it

    def raised(name: str, x: Array, v: Array) -> Dual:
        require_like(what, name, v, x)
        require_shape(what, name, v, x.shape)
        if not _is_floating(x):
            raise TypeError(
                f"{what}: an argument of dtype {x.dtype} is constant: {name} must be None"
            )
        return dual(x, v, level)

    def constant(x: Any) -> Any:
        return dual(x, array_namespace(x).zeros_like(x), level) if _is_floating(x) else x

    duals = []
    for x, v, name, tangent_name in zip(args, tangents, names, tangent_names, strict=True):
        for leaf in tree.flatten({"": x}).values():
            if _is_floating(leaf):
                libraries.setdefault(library_of(type(leaf)), name)
        one = constant if v is None else partial(raised, tangent_name)
        duals.append(tree.map(one, x) if v is None else tree.map(one, x, v))
    if len(libraries) > 1:
        (wanted, first), (got, other), *_ = libraries.items()
        raise TypeError(f"{what}: {other} must be of {wanted}, as {first}, got arrays of {got}")
    try:
        with reference_only():
            y = fn(*duals)
    except (TypeError, AttributeError) as error:  # of a function of a library, of a method
        said = str(error)
        if "Dual" in said and not said.startswith(("dual:", "unsupported operand")):
            named = f" (it uses {', '.join(own)})" if (own := _arrays_of(fn)) else ""
            way = "with the tangent None" if what == "jvp" else "after v"
            raise TypeError(
                f"{what}: the function must call functions of `array_namespace(x)`, and a floating "
                f"array whose functions it calls{named} must be an argument of {what}, {way} if it "
                f"is constant ({error})"
            ) from error
        raise
    finally:
        forget(level)
    return tree.map(lambda leaf: _parts(leaf, level)[0], y), tree.map(
        lambda leaf: _parts(leaf, level)[1], y
    )


def _is_floating(x: Any) -> bool:
    return is_array_api_obj(x) and bool(array_namespace(x).isdtype(x.dtype, "real floating"))


def _arrays_of(fn: Any) -> list[str]:
    """The names of the floating arrays that a function of Python uses without an argument."""
    fn = inspect.unwrap(fn)
    try:
        used = inspect.getclosurevars(fn)
    except (TypeError, ValueError):  # no function of Python, or one of a variable without a value
        return []
    return [name for name, x in {**used.nonlocals, **used.globals}.items() if _is_floating(x)]


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

    functools.update_wrapper(gradient, fn)
    return _jvp("hvp", gradient, *_with_constants(params, v, args))[1]


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

    def output(*args: Any) -> Array:
        return model(*args)[0]

    functools.update_wrapper(output, model)
    _, dz = _jvp("gauss_newton", output, *_with_constants(params, v, args))
    z, cache = model(params, *args)
    gradient: T = cache.backward(hvp(loss, z, dz))
    return gradient


def _with_constants(params: Any, v: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `_jvp` after fn for the derivative along v of params."""
    names = ["params", *(f"args[{i}]" for i in range(len(args)))]
    return (params, *args), (v, *(None for _ in args)), names, ["v", *names[1:]]


def _parts(leaf: Any, level: int) -> tuple[Array, Array]:
    """The value and the tangent of an array; the tangent of a constant is 0."""
    if isinstance(leaf, Dual) and leaf.level == level:
        return leaf.value, leaf.tangent
    if not is_array_api_obj(leaf):
        raise TypeError(f"jvp: the function must return arrays, got {type(leaf).__name__}")
    return leaf, array_namespace(leaf).zeros_like(leaf)
