"""Any function of arrays in a number format of few bits: also a backward, or a training step."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from xformer.arrays import formats
from xformer.arrays.rounding import Rounding, plain
from xformer.base import tree
from xformer.dispatch import reference_only
from xformer.ops import RandomKey
from xformer.ops.random_bits import require_key


def rounded(
    fn: Callable[..., Any],
    format: str,
    *,
    key: RandomKey | None = None,
    matmuls_only: bool = False,
) -> Callable[..., Any]:
    """A function: fn computed in a number format of few bits, on the library of its arguments.

    Its floating arguments and results are plain arrays, in the dtype that they had. Within fn they
    are arrays that round (`xformer.arrays.rounding`); ops run their references.

    fn: returns a tree of arrays and other objects. Only what fn calls is rounded: the backward of a
        cache that it returns is not.
    format: "bfloat16", "float8_e5m2", "float8_e4m3" or "mxfp4" (`xformer.arrays.formats`)
    key: None: to the nearest number. A key: stochastically. Each rounding draws its bits at
        another site, beginning at the site of the key, so a call gives the same bits as one before
        it. Take a key for each step, `RandomKey(seed, step)`, with a seed that dropout does not
        have.
    matmuls_only: False: the arguments and all results are rounded. True: only the operands of
        matmuls, as on hardware for 8 and 4 bits.

    ValueError for another format or a bad key. The function raises TypeError where fn uses arrays
    of another call.
    """
    known = formats.format_of("rounded", format)
    if key is not None:
        require_key("rounded", key, "key")

    @wraps(fn)
    def call(*args: Any, **options: Any) -> Any:
        rounding = Rounding(known, key, matmuls_only)
        with reference_only():
            args, options = tree.map(rounding.enter, (args, options))
            y = fn(*args, **options)
        return tree.map(plain, y)

    return call
