"""The operators of `Traced` arrays: functions of the array API. Importing this module adds them."""

from __future__ import annotations

import operator
import sys
from typing import Any

from xformer.backends.numba.program import namespace
from xformer.backends.numba.program.traced import (
    Traced,
    TracedNumber,
    Unrecorded,
    is_number,
    is_of_xformer,
    number,
)


def _operator(short: str, name: str, *, reverse: bool = False) -> Any:
    """Return the method __short__ or __rshort__: the namespace's function `name`."""
    compute = getattr(operator, f"__{short}__")

    def method(self: Traced, other: Any) -> Traced:
        fn = getattr(namespace, name)
        operands = (other, self) if reverse else (self, other)
        if not all(map(is_number, operands)):
            if name == "pow" and self.dtype == bool:
                raise Unrecorded("a power of booleans is an int8 in NumPy")
            result: Traced = fn(*operands)
            return result
        if name in _ARITHMETIC and all(isinstance(x, bool) for x in operands):
            raise Unrecorded("arithmetic of two booleans gives an int")
        is_whole = type(operands[1]) is int and operands[1] >= 0
        if name == "pow" and not any(isinstance(x, float) for x in operands) and not is_whole:
            raise Unrecorded("an int to the power of an int may be a float")
        return _computed(compute, fn, operands)

    return method


def _computed(compute: Any, fn: Any, operands: Any) -> TracedNumber:
    """Return fn(*operands), a number. compute: the operator on Python's numbers, for each run."""
    result = number(fn(*operands))
    if result.program is not None:
        result.program.formulas.append((compute, tuple(operands), result))
    return result


def _in_place(name: str) -> Any:
    """Return a method for an operator like `+=`. xformer uses it for arrays that it has made."""

    def method(self: Traced, other: Any) -> Traced:
        if self.shape and not is_of_xformer(sys._getframe(1)):
            raise Unrecorded("an array is changed in place")
        result: Traced = getattr(self, name)(other)
        return result

    return method


def _unary(short: str, name: str) -> Any:
    """Return the method __short__: the namespace's function `name`."""
    compute = getattr(operator, f"__{short}__")

    def method(self: Traced) -> Traced:
        fn = getattr(namespace, name)
        if is_number(self):
            return _computed(compute, fn, [self])
        result: Traced = fn(self)
        return result

    return method


_BINARY = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}
_ARITHMETIC = list(_BINARY.values())[:9]
_COMPARISONS = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
for _short, _name in _BINARY.items():
    setattr(Traced, f"__{_short}__", _operator(_short, _name))
    setattr(Traced, f"__r{_short}__", _operator(_short, _name, reverse=True))
    setattr(Traced, f"__i{_short}__", _in_place(f"__{_short}__"))
for _short, _name in _COMPARISONS.items():
    setattr(Traced, f"__{_short}__", _operator(_short, _name))
for _short, _name in {"neg": "negative", "invert": "bitwise_invert", "abs": "abs"}.items():
    setattr(Traced, f"__{_short}__", _unary(_short, _name))
Traced.__array_namespace__ = lambda self, api_version=None: namespace  # type: ignore[attr-defined]
