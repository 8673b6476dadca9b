"""Which subclasses of `numpy.ndarray` kernels may treat as plain arrays."""

from __future__ import annotations

import numpy as np

_NAMES = "add sub mul matmul truediv floordiv mod pow lshift rshift and xor or"
_BINARY = (f"__{form}{name}__" for name in _NAMES.split() for form in ("", "r", "i"))
_OTHER = "array_ufunc array_function lt le eq ne gt ge neg pos abs invert"
OPERATORS = {*_BINARY, *(f"__{name}__" for name in _OTHER.split())}  # methods


def refusal(array_type: type) -> str | None:
    """Return why arrays of `array_type` are refused, or None if they are accepted.

    Subclasses of numpy.ndarray are refused if they redefine an operator or how ufuncs treat them:
    `numpy.ma.MaskedArray`, arrays with units. Kernels would ignore what they redefine.
    `numpy.memmap` redefines nothing.
    """
    if not issubclass(array_type, np.ndarray):
        return None
    for base in array_type.__mro__:
        if base is np.ndarray:
            return None
        is_ours = base.__module__.partition(".")[0] == "xformer"  # such as `stand_in.StandIn`
        if not is_ours and OPERATORS & vars(base).keys():
            return f"{array_type.__name__}, whose operators differ from numpy.ndarray's"
    return None
