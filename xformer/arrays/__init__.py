"""Array types that give the library's code another meaning, forward and backward.

Ops, layers, models and optimisers call only functions of the array API, so an array type decides
what they compute:

- `dual`: dual numbers, for exact derivatives in a direction
- `digits`: numbers of many digits
- `rounding`: arrays that round every result to a number format of `formats`
- `onnx`: arrays that record a graph

On them stand `derivatives` (`jvp`, `hvp`, `gauss_newton`) and `rounded`.
"""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.arrays.derivatives import gauss_newton as gauss_newton
    from xformer.arrays.derivatives import hvp as hvp
    from xformer.arrays.derivatives import jvp as jvp
    from xformer.arrays.rounded import rounded as rounded

later(__name__, "digits", "dual", "formats", "onnx", "onnx_functions", "rounding")
