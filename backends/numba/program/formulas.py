"""Functions of elements, as text, and compiled loops that choose one of them by its code."""

from __future__ import annotations

import math
import re
from typing import Any

from xformer.backends.numba.jit import elementwise

# y = f(x) or f(x, z), of the dtype of x and z. maximum and minimum propagate NaN.
OF_REALS = {
    "add": "x + z",
    "subtract": "x - z",
    "multiply": "x * z",
    "divide": "x / z",
    "maximum": "x if x > z or x != x else z",
    "minimum": "x if x < z or x != x else z",
    "negative": "-x",
    "abs": "abs(x)",
    "exp": "math.exp(x)",
    "log": "math.log(x)",
    "sqrt": "math.sqrt(x)",
    "square": "x * x",
    "tanh": "math.tanh(x)",
    "copy": "x",
    "cos": "math.cos(x)",
    "sin": "math.sin(x)",
    "pow": "math.pow(x, z)",
    "log1p": "math.log1p(x)",
}
COMPARISONS = {
    "less": "x < z",
    "less_equal": "x <= z",
    "greater": "x > z",
    "greater_equal": "x >= z",
    "equal": "x == z",
    "not_equal": "x != z",
    "isfinite": "x - x == 0",
}
# y = f(x) or f(x, z) of int64, and of float64, converted to other dtypes.
OF_WHOLES = {
    "add": "x + z",
    "subtract": "x - z",
    "multiply": "x * z",
    "maximum": "max(x, z)",
    "minimum": "min(x, z)",
    "negative": "-x",
    "bitwise_and": "x & z",
    "bitwise_or": "x | z",
    "bitwise_xor": "x ^ z",
    "bitwise_invert": "~x",
    "logical_not": "1 - x",
    "astype": "x",
    **COMPARISONS,
}
FROM_REALS = {"astype": "x", **COMPARISONS}


def loops_of(formulas: dict[str, str]) -> Any:
    """Return the compiled function (code, y, x, z) that writes y = f(x, z) of arrays (n,).

    code: the position of f in `formulas`. Each formula has a loop, which the compiler vectorises.
    """
    lines = ["def loops(code, y, x, z):"]
    for code, formula in enumerate(formulas.values()):
        element = re.sub(r"\b([xz])\b", r"\1[j]", formula)
        lines += [f" if code == {code}:", "  for j in range(y.size):", f"   y[j] = {element}"]
    scope: dict[str, Any] = {"math": math, "__name__": __name__}
    exec(compile("\n".join(lines), __file__, "exec"), scope)
    return elementwise(scope["loops"])
