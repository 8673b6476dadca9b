"""The array API namespace of arrays: NumPy itself for NumPy's, else what array-api-compat returns.

`array_api_compat.numpy` copies all names of NumPy, so that it imports numpy.f2py, numpy.testing and
more: half of the time of a first op. NumPy 2.1 has all functions that the library calls, but no
option `descending` of argsort: `largest_first` is for that.

Arrays that hold arrays, such as dual numbers, use array-api-compat's namespaces: a function of the
user may call all of the standard, and the names of namespaces must equal where arrays meet.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import array_api_compat

from xformer.base.typing import Array


def array_namespace(*arrays: Array) -> Any:
    """The namespace of arrays of one library. Numbers and None are skipped.

    TypeError if there is no array, for an unknown type, or for arrays of several libraries.
    """
    numpy: Any = sys.modules.get("numpy")  # without it, no array is NumPy's
    found = None
    for x in arrays:
        # Of kind "V" are gradients of integers by JAX, which are not NumPy's.
        if numpy and isinstance(x, numpy.ndarray | numpy.generic) and x.dtype.kind != "V":
            found = numpy
        elif not (x is None or isinstance(x, int | float | complex)):
            return array_api_compat.array_namespace(*arrays)
    return found or array_api_compat.array_namespace(*arrays)


def largest_first(x: Array) -> Array:
    """Indices that sort x along its last axis, descending. Equal elements keep their order."""
    xp, numpy = array_namespace(x), cast(Any, sys.modules.get("numpy"))
    if xp is not numpy:
        return xp.argsort(x, axis=-1, descending=True, stable=True)
    ascending = numpy.argsort(numpy.flip(x, axis=-1), axis=-1, stable=True)
    return x.shape[-1] - 1 - numpy.flip(ascending, axis=-1)
