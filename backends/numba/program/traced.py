"""Arrays without values: operations on them are recorded as instructions of a program.

`operators` adds the operators, which are functions of `namespace`.
"""

from __future__ import annotations

import math
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xformer.backends.numba.program.program import Program

Shape = tuple[int, ...]
_KEYS = (int, slice, type(None), type(...))  # of an index that gives a view


_met = threading.local()  # `why` of the last Unrecorded on this thread


class Unrecorded(TypeError):
    """A function cannot be recorded: it reads a value, or uses a function that is not supported."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        _met.why = why


def require_none_caught(fn: Any, *args: Any) -> Any:
    """Return fn(*args). Unrecorded if one was raised in it that it has caught itself."""
    _met.why = None
    result = fn(*args)
    if _met.why is not None:
        raise Unrecorded(_met.why)
    return result


class Buffer:
    """A block of memory of a program. name: of an input; None for what the program computes."""

    __slots__ = ("name", "nbytes")

    def __init__(self, nbytes: int, name: str | None = None) -> None:
        self.nbytes, self.name = nbytes, name


class Traced:
    """An array of a program: a strided view of a buffer, or a constant, whose values are known.

    program, buffer: None for a constant.
    layout: a NumPy array of the same shape, dtype and strides. NumPy makes views of it; its memory
        is read for constants only.
    base: the address in the memory of `layout` that corresponds to the first byte of the buffer.
    """

    __slots__ = ("base", "buffer", "layout", "program")
    __xformer_library__ = "numba.kernels"
    __array_ufunc__ = None  # operators of NumPy arrays then call the methods below
    __array_priority__ = 1000.0
    __hash__ = object.__hash__

    def __init__(
        self, program: Program | None, buffer: Buffer | None, layout: Any, base: int
    ) -> None:
        self.program, self.buffer, self.layout, self.base = program, buffer, layout, base

    @property
    def is_constant(self) -> bool:
        """Whether the values are known while recording; they are in `layout`."""
        return self.buffer is None

    @property
    def shape(self) -> Shape:
        return self.layout.shape

    @property
    def dtype(self) -> Any:
        return self.layout.dtype

    @property
    def ndim(self) -> int:
        return self.layout.ndim

    @property
    def size(self) -> int:
        return math.prod(self.layout.shape)

    @property
    def strides(self) -> Shape:
        """In bytes, as in NumPy."""
        return self.layout.strides

    @property
    def offset(self) -> int:
        """Bytes from the beginning of the buffer to the first element."""
        return address(self.layout) - self.base

    @property
    def device(self) -> str:
        return "cpu"

    def view(self, layout: Any) -> Traced:
        """Return a view of the same memory. layout: a view of `self.layout`."""
        return Traced(self.program, self.buffer, layout, self.base)

    @property
    def T(self) -> Traced:
        return self.view(self.layout.T)

    @property
    def mT(self) -> Traced:
        return self.view(self.layout.swapaxes(-1, -2))

    def __getitem__(self, key: Any) -> Traced:
        keys = key if isinstance(key, tuple) else (key,)
        if not all(type(k) in _KEYS or isinstance(k, np.integer) for k in keys):
            raise Unrecorded("an index that is an array is not recorded; take(x, ids) is")
        if not any(k is Ellipsis for k in keys):
            keys = (*keys, ...)  # without it NumPy would return a scalar, not a view
        return self.view(self.layout[keys])

    def __len__(self) -> int:
        return len(self.layout)

    def __iter__(self) -> Iterator[Traced]:
        return map(self.__getitem__, range(len(self)))  # TypeError without axes, as in NumPy

    def __getattr__(self, name: str) -> Any:
        kind = self.__class__ if type(self) is TracedNumber else np.ndarray
        if hasattr(kind, name) and not name.startswith("__"):
            raise Unrecorded(f"{name}, which is not of the array API, is not recorded")
        raise AttributeError(f"an array has no attribute {name}")

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What `isinstance` asks: outside of xformer, the type that the function itself gets."""
        if is_of_xformer(sys._getframe(1)):
            return Traced
        if self.shape:
            return np.ndarray
        if self.buffer is not None and self.buffer.name is not None:
            raise Unrecorded("the type of an array () is read: it may be a scalar of NumPy")
        return self.dtype.type

    def __bool__(self) -> bool:
        return bool(self._value())

    def __int__(self) -> int:
        return int(self._value())

    def __float__(self) -> float:
        return float(self._value())

    def __index__(self) -> int:
        return int(self._value())

    def _value(self) -> Any:
        if not self.is_constant:
            raise Unrecorded("the value of an array is read, which is known only in a run")
        return self.layout

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._value(), dtype)

    def __reduce__(self) -> Any:
        self._value()
        return constant, (self.layout,)

    def __str__(self) -> str:
        return str(self._value())

    def __format__(self, spec: str) -> str:
        return format(self._value(), spec)

    def __repr__(self) -> str:
        if not is_of_xformer(sys._getframe(1)):
            raise Unrecorded("the text of an array is read")
        state = "constant" if self.is_constant else "traced"
        return f"<{state} {self.dtype.name}{list(self.shape)}>"


class TracedNumber(Traced):
    """A Python number of the arguments, or the result of an operator on numbers only.

    It takes the dtype of other operands. `isinstance` says the type of the number, as a function
    may ask for it. A result of this class is returned as a Python number.
    """

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return {"b": bool, "i": int, "f": float}[self.dtype.kind]

    def __getattribute__(self, name: str) -> Any:
        """An attribute. A function finds no `shape` or `dtype`, as a number has none."""
        if name[:1] != "_" and not is_of_xformer(sys._getframe(1), "numpy"):
            return self.__getattr__(name)
        return object.__getattribute__(self, name)

    def __hash__(self) -> int:
        return hash(self._value())

    def _unknown(self, *args: Any) -> Any:
        raise Unrecorded("the value of a number is read, which is known only in a run")

    def check_in_runs(self, check: Any) -> None:
        """Call check(value) before each run, which raises for a bad value."""
        if self.program is not None:
            self.program.formulas.append((check, (self,), None))

    __round__ = __floor__ = __ceil__ = __trunc__ = __complex__ = __divmod__ = __rdivmod__ = _unknown


def number(x: Traced) -> TracedNumber:
    """Return x, an array () of dtype int64, float64 or bool, as a number."""
    return TracedNumber(x.program, x.buffer, x.layout, x.base)


def is_number(x: Any) -> bool:
    """Return whether x is a Python number, or stands for one."""
    return type(x) in (TracedNumber, int, float, bool)


def constant(values: Any) -> Traced:
    """Return a constant with these values, which are not copied."""
    layout = np.asarray(values)
    return Traced(None, None, layout, address(layout))


def is_of_xformer(frame: Any, *more: str) -> bool:
    """Return whether a frame is of xformer, of the array API's package or of `more` packages."""
    while (name := frame.f_globals.get("__name__", "")) == "abc":  # `isinstance(x, Integral)`
        frame = frame.f_back
    root = name.partition(".")[0]
    return root in ("xformer", "array_api_compat", *more)


def address(layout: Any) -> int:
    """Return the address of the first element of a NumPy array."""
    return int(layout.__array_interface__["data"][0])


def laid_out(program: Program, buffer: Buffer, shape: Shape, dtype: Any, strides: Shape) -> Traced:
    """Return an array of this shape, dtype and strides at the beginning of a buffer.

    Unrecorded for another dtype than native numbers and booleans.
    """
    if dtype.kind not in "biufc" or not dtype.isnative:
        raise Unrecorded(f"an array of dtype {dtype.str} is not recorded")
    layout = as_strided(np.empty(1, dtype), shape, strides)
    return Traced(program, buffer, layout, address(layout))
