"""Dual numbers over any array library: a value, and its derivative in one direction.

A function of the array API is called on `Dual` arrays as on others, and carries the derivative
along: f(x + e v) = f(x) + e f'(x) v, with e^2 = 0 (forward-mode differentiation; Griewank and
Walther, Evaluating Derivatives, 2008, chapter 3). `xformer.jvp` is the way to use it.

- The value and the tangent are arrays of one library. They may be `Dual` arrays themselves, which
  gives derivatives of higher order; `level` tells the orders apart, so that they do not mix.
- Other arrays and numbers are constants. Integers and booleans are always constants, and never
  `Dual` arrays.
- Where a function has no derivative, a rule decides: abs'(0) = 0; of equal numbers, `max` and
  `min` take the first, `maximum` and `minimum` their second argument. `kinks` records these calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from array_api_compat import array_namespace, is_array_api_obj

from xformer.base.typing import Array
from xformer.dispatch import library_of

# f(x + e v) = f(x) + e f(v)
LINEAR = {
    *("broadcast_to", "concat", "cumulative_sum", "expand_dims", "flip", "matrix_transpose"),
    *("mean", "permute_dims", "reshape", "roll", "squeeze", "stack", "sum", "take"),
    *("take_along_axis", "tile"),
}
# Functions whose result depends on the values alone and is not differentiable or constant.
OF_VALUES = {
    *("all", "any", "argmax", "argmin", "argsort", "isfinite", "isnan", "searchsorted", "sign"),
    *("full_like", "ones_like", "zeros_like"),
}

_kinks: ContextVar[list[str] | None] = ContextVar("kinks", default=None)


@contextmanager
def kinks() -> Iterator[list[str]]:
    """A context that yields a list of the functions called where they have no derivative."""
    met: list[str] = []
    token = _kinks.set(met)
    try:
        yield met
    finally:
        _kinks.reset(token)


class Dual:
    """value + e tangent, two arrays of the same shape and dtype. See the module.

    level: the derivative that e belongs to. Arrays of a lower level are constants.
    """

    __slots__ = ("level", "tangent", "value")
    __hash__ = None  # type: ignore[assignment]  # like other arrays
    __array_ufunc__ = None  # NumPy's arrays leave operators to this class

    def __init__(self, value: Array, tangent: Array, level: int) -> None:
        self.value, self.tangent, self.level = value, tangent, level

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a Dual array is no array of NumPy")

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return _namespace(array_namespace(self.value), self.level)

    # Attributes of the array API.
    dtype = property(lambda self: self.value.dtype)
    device = property(lambda self: self.value.device)
    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: math.prod(self.value.shape))
    T = property(lambda self: self._map(lambda x: x.T))
    mT = property(lambda self: self._map(lambda x: x.mT))

    def __getitem__(self, key: Any) -> Dual:
        return self._map(lambda x: x[key])

    def _map(self, linear: Callable[[Array], Array]) -> Dual:
        return dual(linear(self.value), linear(self.tangent), self.level)

    def __neg__(self) -> Dual:
        return self._map(lambda x: -x)

    def __add__(self, other: Any) -> Dual:
        x, y, level = _pair(self, other)
        return dual(x.value + y.value, _sum(x.tangent, y.tangent), level)

    def __sub__(self, other: Any) -> Dual:
        x, y, level = _pair(self, other)
        dy = None if y.tangent is None else -y.tangent
        return dual(x.value - y.value, _sum(x.tangent, dy), level)

    def __rsub__(self, other: Any) -> Dual:
        return -(self - other)

    def __mul__(self, other: Any) -> Dual:
        x, y, level = _pair(self, other)
        dx = None if x.tangent is None else x.tangent * y.value
        dy = None if y.tangent is None else x.value * y.tangent
        return dual(x.value * y.value, _sum(dx, dy), level)

    def __truediv__(self, other: Any) -> Dual:
        return _quotient(self, other)

    def __rtruediv__(self, other: Any) -> Dual:
        return _quotient(other, self)

    def __matmul__(self, other: Any) -> Dual:
        return _matmul(self, other)

    def __rmatmul__(self, other: Any) -> Dual:
        return _matmul(other, self)

    def __pow__(self, n: Any) -> Dual:
        if not isinstance(n, int | float):
            raise TypeError(f"dual: an exponent must be a number, got {type(n).__name__}")
        slope = self.tangent * 0 if n == 0 else n * self.value ** (n - 1) * self.tangent
        return dual(self.value**n, slope, self.level)

    def __abs__(self) -> Dual:
        xp = array_namespace(self.value)
        _met("abs", self.value == 0, self.tangent)
        return dual(xp.abs(self.value), xp.sign(self.value) * self.tangent, self.level)

    __radd__ = __add__
    __rmul__ = __mul__

    def __lt__(self, other: Any) -> Any:
        return _value(self) < _value(other)

    def __le__(self, other: Any) -> Any:
        return _value(self) <= _value(other)

    def __gt__(self, other: Any) -> Any:
        return _value(self) > _value(other)

    def __ge__(self, other: Any) -> Any:
        return _value(self) >= _value(other)

    def __eq__(self, other: Any) -> Any:
        return _value(self) == _value(other)

    def __ne__(self, other: Any) -> Any:
        return _value(self) != _value(other)

    def __bool__(self) -> bool:
        return bool(_value(self))

    def __float__(self) -> float:
        return float(_value(self))

    def __repr__(self) -> str:
        return f"Dual({self.value!r}, {self.tangent!r}, level={self.level})"


def dual(value: Array, tangent: Array, level: int) -> Dual:
    """A `Dual` array. The tangent is repeated to the shape of the value.

    Its class says which library it is of, because ops compare the libraries of their arguments.
    """
    value, tangent = _alike(value, tangent), _alike(tangent, value)
    if tangent.shape != value.shape:
        tangent = array_namespace(tangent).broadcast_to(tangent, value.shape)
    library = library_of(type(value))
    kind = _kinds.get(library)
    if kind is None:
        names = {"__slots__": (), "__xformer_library__": library}
        kind = _kinds.setdefault(library, type("Dual", (Dual,), names))
    dual: Dual = kind(value, tangent, level)
    return dual


_kinds: dict[str, type] = {}


class _Part:
    """The value and the tangent of an argument at one level; None: the argument is a constant."""

    __slots__ = ("tangent", "value")

    def __init__(self, x: Any, level: int) -> None:
        varies = isinstance(x, Dual) and x.level == level
        self.value = x.value if varies else x
        self.tangent = x.tangent if varies else None


def _pair(x: Any, y: Any) -> tuple[_Part, _Part, int]:
    level = _level((x, y))
    a, b = _Part(x, level), _Part(y, level)
    a.value, b.value = _alike(a.value, b.value), _alike(b.value, a.value)
    return a, b, level


def _alike(x: Any, like: Any) -> Any:
    """x as a constant of each level of `like` that it lacks: libraries need not mix both."""
    if not isinstance(like, Dual) or not is_array_api_obj(x) or _level((x,)) >= like.level:
        return x
    value = _alike(x, like.value)
    return dual(value, array_namespace(value).zeros_like(value), like.level)


def _level(arrays: Any) -> int:
    return max((x.level for x in arrays if isinstance(x, Dual)), default=-1)


def _value(x: Any) -> Any:
    """The value of an array without any tangents."""
    while isinstance(x, Dual):
        x = x.value
    return x


def _sum(dx: Array | None, dy: Array | None) -> Array:
    return dy if dx is None else dx if dy is None else dx + dy


def _quotient(x: Any, y: Any) -> Dual:
    """d(x / y) = (dx - (x / y) dy) / y."""
    a, b, level = _pair(x, y)
    q = a.value / b.value
    dy = None if b.tangent is None else -(q * b.tangent)
    return dual(q, _sum(a.tangent, dy) / b.value, level)


def _matmul(x: Any, y: Any) -> Dual:
    a, b, level = _pair(x, y)
    dx = None if a.tangent is None else a.tangent @ b.value
    dy = None if b.tangent is None else a.value @ b.tangent
    return dual(a.value @ b.value, _sum(dx, dy), level)


def _met(name: str, tie: Any, tangent: Array) -> None:
    """Record a call of `name` if the derivative depends on the rule for a tie."""
    met = _kinks.get()
    if met is not None:
        tie, tangent = _value(tie), _value(tangent)
        if bool(array_namespace(tangent).any(tie & (tangent != 0))):
            met.append(name)


class _Namespace:
    """The functions of the array API for `Dual` arrays of `level` over the namespace `xp`.

    Functions that create floating arrays return `Dual` arrays with the tangent 0.
    """

    def __init__(self, xp: Any, level: int) -> None:
        self._xp, self._level = xp, level

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._xp, name)
        if name in LINEAR:
            function = _linear(name)
        elif name in OF_VALUES:
            function = partial(self._of_values, name)
        elif callable(function) and not isinstance(function, type):
            function = partial(self._constant, name)
        vars(self)[name] = function
        return function

    def _constant(self, name: str, *args: Any, **options: Any) -> Any:
        """A function of xp without arrays that vary; its floating results get the tangent 0."""
        if _level((*args, *options.values())) >= 0:
            raise NotImplementedError(f"dual: {name} has no rule for a derivative")
        return self._lift(getattr(self._xp, name)(*args, **options))

    def _of_values(self, name: str, x: Any, /, *args: Any, **options: Any) -> Any:
        if not isinstance(x, Dual):
            return self._constant(name, x, *args, **options)
        xp = array_namespace(x.value)
        return self._lift(getattr(xp, name)(x.value, *map(_value, args), **options))

    def _lift(self, x: Any) -> Any:
        """A floating array as a `Dual` with the tangent 0; other objects as they are."""
        if not is_array_api_obj(x) or not self._xp.isdtype(x.dtype, "real floating"):
            return x
        return dual(x, array_namespace(x).zeros_like(x), self._level)

    def asarray(self, x: Any, /, **options: Any) -> Any:
        return x if isinstance(x, Dual) else self._lift(self._xp.asarray(x, **options))

    def astype(self, x: Any, dtype: Any, /, **options: Any) -> Any:
        """The conversion to a dtype; integers and booleans are constants."""
        if not isinstance(x, Dual):
            return self._lift(self._xp.astype(x, dtype, **options))
        if not self._xp.isdtype(dtype, "real floating"):
            return array_namespace(_value(x)).astype(_value(x), dtype, **options)
        xp = array_namespace(x.value)
        return x._map(lambda part: xp.astype(part, dtype, **options))

    def exp(self, x: Any, /) -> Any:
        return self._chain("exp", x, lambda xp, x, y: y)

    def log(self, x: Any, /) -> Any:
        return self._chain("log", x, lambda xp, x, y: 1 / x)

    def log1p(self, x: Any, /) -> Any:
        return self._chain("log1p", x, lambda xp, x, y: 1 / (1 + x))

    def sqrt(self, x: Any, /) -> Any:
        return self._chain("sqrt", x, lambda xp, x, y: 0.5 / y)

    def tanh(self, x: Any, /) -> Any:
        return self._chain("tanh", x, lambda xp, x, y: 1 - y**2)

    def sin(self, x: Any, /) -> Any:
        return self._chain("sin", x, lambda xp, x, y: xp.cos(x))

    def cos(self, x: Any, /) -> Any:
        return self._chain("cos", x, lambda xp, x, y: -xp.sin(x))

    def _chain(self, name: str, x: Any, slope: Callable[[Any, Array, Array], Array]) -> Any:
        if not isinstance(x, Dual):
            return getattr(self._xp, name)(x)
        xp = array_namespace(x.value)
        y = getattr(xp, name)(x.value)
        return dual(y, slope(xp, x.value, y) * x.tangent, x.level)

    def abs(self, x: Any, /) -> Any:
        return abs(x) if isinstance(x, Dual) else self._xp.abs(x)

    def matmul(self, x: Any, y: Any, /) -> Any:
        return x @ y

    def where(self, condition: Any, x: Any, y: Any, /) -> Any:
        a, b, level = _pair(x, y)
        condition = _value(condition)
        if level < 0:
            return self._xp.where(condition, x, y)
        xp = array_namespace(x.value if a.tangent is not None else y.value)
        dx = 0.0 if a.tangent is None else a.tangent
        dy = 0.0 if b.tangent is None else b.tangent
        return dual(xp.where(condition, a.value, b.value), xp.where(condition, dx, dy), level)

    def maximum(self, x: Any, y: Any, /) -> Any:
        return self._larger("maximum", x, y, lambda x, y: x > y)

    def minimum(self, x: Any, y: Any, /) -> Any:
        return self._larger("minimum", x, y, lambda x, y: x < y)

    def _larger(self, name: str, x: Any, y: Any, first: Callable[[Any, Any], Any]) -> Any:
        """The first argument where `first` is true, and NaN where one is NaN."""
        a, b, level = _pair(x, y)
        if level < 0:
            return getattr(self._xp, name)(x, y)
        xp = array_namespace(x.value if a.tangent is not None else y.value)
        chosen = self.where(first(_value(x), _value(y)), x, y)
        zero = chosen.tangent * 0
        difference = zero + (zero if a.tangent is None else a.tangent)
        difference = difference if b.tangent is None else difference - b.tangent
        _met(name, _value(x) == _value(y), difference)
        return dual(getattr(xp, name)(a.value, b.value), chosen.tangent, level)

    def max(self, x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Any:
        return self._extreme("max", "argmax", x, axis, keepdims)

    def min(self, x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Any:
        return self._extreme("min", "argmin", x, axis, keepdims)

    def _extreme(self, name: str, index_of: str, x: Any, axis: int | None, keepdims: bool) -> Any:
        if not isinstance(x, Dual):
            return getattr(self._xp, name)(x, axis=axis, keepdims=keepdims)
        if axis is not None and not isinstance(axis, int):
            raise NotImplementedError(f"dual: {name} of several axes has no rule")
        if axis is None:
            shape = (1,) * x.ndim if keepdims else ()
            flat = self._extreme(name, index_of, self.reshape(x, (-1,)), 0, False)
            return self.reshape(flat, shape)
        values = _value(x)
        xp = array_namespace(values)
        index = getattr(xp, index_of)(values, axis=axis, keepdims=True)
        y = self.take_along_axis(x, index, axis=axis)
        other = x.tangent - y.tangent
        _met(name, values == _value(y), other)
        return y if keepdims else self.squeeze(y, axis=axis)

    def sort(self, x: Any, /, *, axis: int = -1, **options: Any) -> Any:
        """The order is that of `argsort`; equal values keep their order if it is stable."""
        if not isinstance(x, Dual):
            return self._xp.sort(x, axis=axis, **options)
        order = self.argsort(x, axis=axis, **options)
        return self.take_along_axis(x, order, axis=axis)


def _linear(name: str) -> Callable[..., Any]:
    """The function `name` of the values and of the tangents; x may be a list of arrays."""

    def call(x: Any, /, *args: Any, **options: Any) -> Any:
        arrays = x if isinstance(x, list | tuple) else [x]
        level = _level(arrays)
        if _level((*args, *options.values())) >= 0:
            raise NotImplementedError(f"dual: {name} is linear in its first argument only")
        parts = [_Part(array, level) for array in arrays]
        xp = array_namespace(*(part.value for part in parts))
        tangents = [xp.zeros_like(p.value) if p.tangent is None else p.tangent for p in parts]
        values = [part.value for part in parts]
        if arrays is not x:
            values, tangents = values[0], tangents[0]
        function = getattr(xp, name)
        y = function(values, *args, **options)
        return y if level < 0 else dual(y, function(tangents, *args, **options), level)

    return call


_namespaces: dict[Any, _Namespace] = {}


def forget(level: int) -> None:
    """Drop the namespaces of a level that no call uses any more."""
    for key in [key for key in _namespaces.copy() if key[1] == level]:
        _namespaces.pop(key, None)


def _namespace(xp: Any, level: int) -> _Namespace:
    cached = _namespaces.get((xp, level))
    return cached or _namespaces.setdefault((xp, level), _Namespace(xp, level))
