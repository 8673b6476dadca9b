"""Arrays of numbers with any number of digits: NumPy arrays of MPFR's numbers (gmpy2).

    with digits(50) as backend:
        y, cache = fn(*case.build(backend))

- Floating arrays are `Precise` arrays; their dtype is called float64. Integers and booleans are
  plain NumPy arrays, so that random bits, indices and masks are those of float64.
- Python's floats are taken as the exact values of their 53 bits. A constant of an op that is not
  a sum of few powers of two, such as 1 / 3, therefore differs from its exact value by 1e-17.
- `max` and `min` assume that there is no NaN.
- The functions of the array API are NumPy's on arrays of objects, or MPFR's for single numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import array_api_compat.numpy as xnp
import numpy as np

from xformer.base.typing import Array
from xformer.dispatch import reference_only
from xformer.dispatch.backend import Backend, Unusable
from xformer.dispatch.checks import require_sizes

GUARD = 15  # further digits of the numbers, because sums lose some
LEAST, MOST = 17, 10_000  # float64 has 16


@contextmanager
def digits(n: int) -> Iterator[Backend]:
    """A context for numbers of n digits; yields the backend that makes `Precise` arrays.

    Inside, ops run their references, in this thread. ValueError unless n is an integer in
    [17, 10000], `backends.Unusable` without gmpy2.
    """
    n, gmpy2 = require_digits(n), _gmpy2()
    bits = math.ceil((n + GUARD) * math.log2(10))
    with gmpy2.context(gmpy2.get_context(), precision=bits), reference_only():
        yield PreciseBackend("digits", XP, None, ("float64",), f"gmpy2 {gmpy2.version()}")


def require_digits(n: Any) -> int:
    """n as an int. ValueError unless it is an integer in [17, 10000], Unusable without gmpy2."""
    (n,) = require_sizes("digits", LEAST, n=n)
    if n > MOST:
        raise ValueError(f"digits: n must be at most {MOST}, got {n}")
    _gmpy2()
    return n


def _gmpy2() -> Any:
    try:
        import gmpy2
    except ImportError as error:
        raise Unusable(
            f"digits needs gmpy2: {error}. Install it with pip install 'xformer-array[digits]'"
        ) from error
    return gmpy2


@dataclass(frozen=True)
class PreciseBackend(Backend):
    """Makes `Precise` arrays, exactly equal to their float64 values."""

    def to_numpy(self, array: Array) -> np.ndarray:
        """Return `array` as a NumPy array; numbers are rounded to float64."""
        return array.numbers.astype("float64") if isinstance(array, Precise) else array

    def _from_host(self, host: np.ndarray) -> Array:
        return _lift(host)


class Precise:
    """An array of MPFR's numbers. See the module."""

    __slots__ = ("numbers",)
    __hash__ = None  # type: ignore[assignment]  # like other arrays
    __array_ufunc__ = None  # NumPy's arrays leave operators to this class
    __xformer_library__ = "numpy"  # its integers are NumPy's

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return XP

    # Attributes of the array API.
    dtype = np.dtype("float64")
    device = "cpu"
    shape = property(lambda self: self.numbers.shape)
    ndim = property(lambda self: self.numbers.ndim)
    size = property(lambda self: self.numbers.size)
    T = property(lambda self: Precise(self.numbers.T))
    mT = property(lambda self: Precise(self.numbers.mT))

    def __getitem__(self, key: Any) -> Any:
        return _lift(self.numbers[key])

    def __matmul__(self, other: Any) -> Precise:
        return _matmul(self.numbers, _numbers(other))

    def __rmatmul__(self, other: Any) -> Precise:
        return _matmul(_numbers(other), self.numbers)

    def __float__(self) -> float:
        return float(self.numbers[()])

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def __repr__(self) -> str:
        return f"Precise({self.numbers!r})"


def _operator(of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: _lift(of_numbers(*map(_numbers, args)))


for _name in ("add", "sub", "mul", "truediv", "pow"):
    _function = getattr(operator, _name)
    setattr(Precise, f"__{_name}__", _operator(_function))
    setattr(Precise, f"__r{_name}__", _operator(lambda x, y, f=_function: f(y, x)))
for _name in ("neg", "abs", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Precise, f"__{_name}__", _operator(getattr(operator, _name)))


def _numbers(x: Any) -> Any:
    """The array of objects of a `Precise` array, also in a list; other things as they are."""
    if isinstance(x, list | tuple):
        return [_numbers(each) for each in x] if any(isinstance(e, Precise) for e in x) else x
    return x.numbers if isinstance(x, Precise) else x


def _lift(x: Any) -> Any:
    """Floating numbers as a `Precise` array; integers and booleans as a NumPy array."""
    gmpy2 = _gmpy2()
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind == "f":
        x = np.frompyfunc(gmpy2.mpfr, 1, 1)(x.astype("float64").astype(object))
    if isinstance(x, np.ndarray) and x.dtype == object:
        return Precise(x)
    if isinstance(x, gmpy2.mpfr):
        return Precise(np.asarray(x, dtype=object))
    return np.asarray(x) if isinstance(x, np.generic | bool) else x


def _matmul(x: np.ndarray, y: np.ndarray) -> Precise:
    if x.shape[-1] == 0:  # NumPy's sum of no objects is None
        return XP.zeros(np.matmul(np.zeros(x.shape), np.zeros(y.shape)).shape)
    return _lift(np.matmul(x, y))


class _Namespace:
    """The functions of the array API on `Precise` arrays and NumPy's integers and booleans."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(xnp, name)
        if callable(function) and not isinstance(function, type):
            function = partial(self._call, _of_numbers(name) or function)
        vars(self)[name] = function
        return function

    @staticmethod
    def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return _lift(function(*map(_numbers, args), **options))

    def asarray(self, x: Any, /, **options: Any) -> Any:
        return x if isinstance(x, Precise) else _lift(np.asarray(x, **options))

    def astype(self, x: Any, dtype: Any, /, **options: Any) -> Any:
        """The conversion to a dtype; integers are truncated numbers."""
        if not isinstance(x, Precise):
            return _lift(np.astype(np.asarray(x), dtype, **options))
        if np.isdtype(dtype, "real floating"):
            return x
        # MPFR's conversion to an integer rounds to the nearest one.
        truncated = np.frompyfunc(_gmpy2().trunc, 1, 1)(x.numbers)
        return np.asarray(x.numbers != 0 if np.isdtype(dtype, "bool") else truncated, dtype)

    def zeros_like(self, x: Any, /, **options: Any) -> Any:
        return self.full_like(x, 0, **options)

    def ones_like(self, x: Any, /, **options: Any) -> Any:
        return self.full_like(x, 1, **options)

    def full_like(self, x: Any, value: Any, /, *, dtype: Any = None, **options: Any) -> Any:
        return self.full(x.shape, value, dtype=x.dtype if dtype is None else dtype, **options)

    def sum(self, x: Any, /, **options: Any) -> Any:
        if isinstance(x, Precise):
            options["initial"] = _gmpy2().mpfr(0)  # NumPy's sum of no objects is an integer
        return self._call(np.sum, x, **options)

    def matmul(self, x: Any, y: Any, /) -> Any:
        return x @ y

    def where(self, condition: Any, x: Any, y: Any, /) -> Any:
        return self._of_two(partial(np.where, condition), x, y)

    def maximum(self, x: Any, y: Any, /) -> Any:
        return self._of_two(np.maximum, x, y)

    def minimum(self, x: Any, y: Any, /) -> Any:
        return self._of_two(np.minimum, x, y)

    def _of_two(self, function: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
        """A function that returns elements of its arguments: Python's floats become numbers."""
        if isinstance(x, Precise) or isinstance(y, Precise):
            x, y = (self.asarray(each, dtype="float64") for each in (x, y))
        return self._call(function, x, y)


def _of_numbers(name: str) -> Callable[..., Any] | None:
    """MPFR's function of single numbers for a name of the array API; None: NumPy has it."""
    gmpy2 = _gmpy2()
    of_one = {
        **{
            name: getattr(gmpy2, name)
            for name in ("exp", "log", "log1p", "sqrt", "tanh", "sin", "cos")
        },
        "sign": lambda x: gmpy2.mpfr(gmpy2.sign(x)),
        "isfinite": gmpy2.is_finite,
        "isnan": gmpy2.is_nan,
    }.get(name)
    if of_one is None:
        return None
    on_objects, usual = np.frompyfunc(of_one, 1, 1), getattr(xnp, name)

    def call(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype != object:
            return usual(x)
        y = on_objects(x)
        return np.asarray(y, bool) if name.startswith("is") else y

    return call


XP: Any = _Namespace()
