"""Which subclasses of NumPy's arrays can be computed with in their place."""

from __future__ import annotations

import numpy as np

_NAMES = "add sub mul matmul truediv floordiv mod pow lshift rshift and xor or"
_BINARY = (f"__{turned}{name}__" for name in _NAMES.split() for turned in ("", "r", "i"))
_REST = "array_ufunc array_function lt le eq ne gt ge neg pos abs invert"
MEANING = {*_BINARY, *(f"__{name}__" for name in _REST.split())}


def refusal(array_type: type) -> str | None:
    """What arrays of that type are, where they compute otherwise than NumPy's; else None.

    Such a subclass redefines an operator or how ufuncs treat it: `numpy.ma.MaskedArray`, arrays
    with units. Kernels would follow a part of that. `numpy.memmap` redefines neither.
    """
    if not issubclass(array_type, np.ndarray):
        return None
    for base in array_type.__mro__:
        if base is np.ndarray:
            return None
        own = base.__module__.partition(".")[0] == "xformer"  # as the stand-in for CuPy's arrays
        if not own and MEANING & vars(base).keys():
            return f"{array_type.__name__}, which computes otherwise than numpy.ndarray"
    return None
