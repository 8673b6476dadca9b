"""Arrays of float32 or float64 values that round every result to a number format of few bits.

`xformer.rounded` is the way to use them, `xformer.arrays.formats` has the formats. What is rounded:

- Every floating result of a function or an operator, once. Functions compute in the dtype of the
  values: a matmul, a sum or a mean adds in float32 (float64), then its result is rounded.
- Nothing is rounded by functions that only move or choose numbers (`MOVES`): shapes, indices,
  maxima, signs.
- Python numbers in an operator are exact. Arrays that are made from numbers are rounded.
- Integers and booleans are plain arrays.

With `matmuls_only` the results stay as they are, and the two operands of a matmul are rounded
before it, in blocks along the axis over which the products are added.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from array_api_compat import array_namespace, is_array_api_obj

from xformer.arrays import formats
from xformer.base.typing import Array
from xformer.dispatch import library_of
from xformer.ops import RandomKey
from xformer.ops.random_bits import MASK

# Functions whose results are numbers of their arguments, or 0, 1 and their negatives.
MOVES = {
    *("abs", "broadcast_arrays", "broadcast_to", "concat", "expand_dims", "flip", "max", "min"),
    *("matrix_transpose", "moveaxis", "negative", "ones", "ones_like", "permute_dims", "repeat"),
    *("reshape", "roll", "sign", "sort", "squeeze", "stack", "take", "take_along_axis", "tile"),
    *("unstack", "zeros", "zeros_like"),
}


class Rounding:
    """What the arrays of one call of `rounded` share: the format, and a count of the roundings."""

    def __init__(self, format: formats.Format, key: RandomKey | None, matmuls_only: bool) -> None:
        self.format, self.key, self.matmuls_only = format, key, matmuls_only
        self._n_rounded = 0
        self._namespaces: dict[Any, _Namespace] = {}

    def round(self, x: Array, axis: int = -1) -> Array:
        """A plain array, rounded."""
        key = None
        if self.key is not None:
            count = self.key.site + self._n_rounded
            key = self.key._replace(site=count & MASK)
            self._n_rounded += 1
        return formats.rounded(x, self.format, key, axis)

    def enter(self, x: Any) -> Any:
        """A floating array as one that rounds, itself rounded; other objects as they are."""
        if isinstance(x, Rounded) or not _is_floating(x):
            return x
        return self.made(x if self.matmuls_only else self.round(x))

    def moved(self, x: Any) -> Any:
        """A floating array as one that rounds, not rounded; other objects as they are."""
        if isinstance(x, list | tuple):
            return type(x)(self.moved(part) for part in x)
        return self.made(x) if _is_floating(x) else x

    def made(self, x: Array) -> Rounded:
        """A `Rounded` array whose class says which library it is of, since ops compare these."""
        library = library_of(type(x))
        kind = _kinds.get(library)
        if kind is None:
            names = {"__slots__": (), "__xformer_library__": library}
            kind = _kinds.setdefault(library, type("Rounded", (Rounded,), names))
        made: Rounded = kind(x, self)
        return made

    def matmul(self, x: Any, y: Any) -> Any:
        """x @ y, with rounded operands or a rounded result."""
        x, y = plain(x), plain(y)
        if not self.matmuls_only:
            return self.enter(x @ y)
        return self.made(self.round(x) @ self.round(y, axis=max(-2, -y.ndim)))

    def namespace(self, xp: Any) -> _Namespace:
        """The functions of xp for arrays of this rounding."""
        return self._namespaces.get(xp) or self._namespaces.setdefault(xp, _Namespace(xp, self))


_kinds: dict[str, type] = {}


def _is_floating(x: Any) -> bool:
    return is_array_api_obj(x) and array_namespace(x).isdtype(x.dtype, "real floating")


def plain(x: Any) -> Any:
    """The plain array; also of the arrays of a list or a tuple."""
    if isinstance(x, list | tuple):
        return type(x)(map(plain, x))
    return x.value if isinstance(x, Rounded) else x


def _operator(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def call(x: Rounded, y: Any) -> Any:
        a, b = x.value, x.other(y)
        return x.rounding.enter(function(b, a) if swapped else function(a, b))

    return call


class Rounded:
    """An array that holds plain values, and whose operators return rounded arrays."""

    __slots__ = ("rounding", "value")
    __hash__ = None  # type: ignore[assignment]  # like other arrays
    __array_ufunc__ = None  # NumPy's arrays leave operators to this class

    def __init__(self, value: Array, rounding: Rounding) -> None:
        self.value, self.rounding = value, rounding

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return self.rounding.namespace(array_namespace(self.value))

    # Attributes of the array API.
    dtype = property(lambda self: self.value.dtype)
    device = property(lambda self: self.value.device)
    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: math.prod(self.value.shape))
    T = property(lambda self: self.rounding.made(self.value.T))
    mT = property(lambda self: self.rounding.made(self.value.mT))

    def other(self, y: Any) -> Any:
        """The value of another operand. TypeError if it belongs to another call of `rounded`."""
        if isinstance(y, Rounded) and y.rounding is not self.rounding:
            formats = (x.rounding.format.name for x in (self, y))
            raise TypeError(f"rounded: arrays of two calls meet, {' and '.join(formats)}")
        return plain(y)

    def __getitem__(self, key: Any) -> Any:
        return self.rounding.made(self.value[key])

    def __neg__(self) -> Any:
        return self.rounding.made(-self.value)

    def __abs__(self) -> Any:
        return self.rounding.made(abs(self.value))

    __add__ = __radd__ = _operator(operator.add)
    __mul__ = __rmul__ = _operator(operator.mul)
    __sub__ = _operator(operator.sub)
    __rsub__ = _operator(operator.sub, swapped=True)
    __truediv__ = _operator(operator.truediv)
    __rtruediv__ = _operator(operator.truediv, swapped=True)
    __pow__ = _operator(operator.pow)
    # Comparisons give booleans, which `enter` leaves plain.
    __lt__ = _operator(operator.lt)
    __le__ = _operator(operator.le)
    __gt__ = _operator(operator.gt)
    __ge__ = _operator(operator.ge)
    __eq__ = _operator(operator.eq)
    __ne__ = _operator(operator.ne)

    def __matmul__(self, other: Any) -> Any:
        return self.rounding.matmul(self, self.other(other))

    def __rmatmul__(self, other: Any) -> Any:
        return self.rounding.matmul(self.other(other), self)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        return f"Rounded({self.value!r}, {self.rounding.format.name})"


class _Namespace:
    """The functions of a namespace for arrays that round."""

    def __init__(self, xp: Any, rounding: Rounding) -> None:
        self._xp, self._rounding = xp, rounding

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._xp, name)
        if callable(function) and not isinstance(function, type):
            lift = self._rounding.moved if name in MOVES else self._rounding.enter
            function = partial(self._call, function, lift)
        vars(self)[name] = function
        return function

    @staticmethod
    def _call(function: Any, lift: Callable[[Any], Any], *args: Any, **options: Any) -> Any:
        options = {name: plain(option) for name, option in options.items()}
        return lift(function(*map(plain, args), **options))

    def asarray(self, x: Any, /, **options: Any) -> Any:
        """An array that rounds stays as it is."""
        return x if isinstance(x, Rounded) else self._rounding.enter(self._xp.asarray(x, **options))

    def matmul(self, x: Any, y: Any, /) -> Any:
        """x @ y."""
        return x @ y
