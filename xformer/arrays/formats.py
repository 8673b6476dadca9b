"""Number formats of few bits: float32 and float64 arrays rounded to numbers of a format.

| format | bits: sign, exponent, significand | normal numbers | subnormal | beyond the largest |
|---|---|---|---|---|
| bfloat16 | 1, 8, 7 | 2^-126 to 3.39e38 | n 2^-133 | infinity |
| float8_e5m2 | 1, 5, 2 | 2^-14 to 57344 | n 2^-16 | the largest |
| float8_e4m3 | 1, 4, 3 | 2^-6 to 448 | n 2^-9 | the largest |
| mxfp4 | 1, 2, 1, and 8 for a block of 32 | X to 6 X | X / 2 | 6 X |

Sources: OCP 8-bit Floating Point Specification 1.0, with saturation; OCP Microscaling Formats
Specification 1.0, section 6.3, for the shared scale X = 2^(floor(log2(largest |x|)) - 2) of a block
along the last axis, from 2^-127. The last block of an axis may be shorter. Infinities and NaN stay
what they are in every format, although E4M3 and MXFP4 have no infinity: masks and diverged runs
need them. They have no part in X.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from array_api_compat import device

from xformer.base.choices import require_one_of
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.shapes import require_array
from xformer.ops import RandomKey, random_bits
from xformer.ops.random_bits import require_key


class Format(NamedTuple):
    """Numbers s 2^(e - bits), |s| < 2^(bits + 1), e >= low, and at most `largest`."""

    bits: int  # of the significand, without the leading one
    low: int  # the exponent of the smallest normal number
    high: int  # the exponent of the largest number
    largest: float
    saturates: bool = True  # a number beyond the largest becomes the largest, else infinity
    block: int | None = None  # numbers of the last axis that share a scale

    @property
    def name(self) -> str:
        """The name in `FORMATS`."""
        return next(name for name, known in FORMATS.items() if known == self)


FORMATS = {
    "bfloat16": Format(7, -126, 127, (2 - 2.0**-7) * 2.0**127, saturates=False),
    "float8_e5m2": Format(2, -14, 15, 57344.0),
    "float8_e4m3": Format(3, -6, 8, 448.0),
    "mxfp4": Format(1, 0, 2, 6.0, block=32),
}


def format_of(what: str, name: str) -> Format:
    """The format of a name in `FORMATS`. ValueError for another name.

    what: begins the message
    """
    require_one_of(f"{what}: format", name, FORMATS)
    return FORMATS[name]


def round_to(x: Array, format: str, *, key: RandomKey | None = None, axis: int = -1) -> Array:
    """x rounded to numbers of a format, in the dtype of x.

    format: "bfloat16", "float8_e5m2", "float8_e4m3" or "mxfp4" (see the module)
    key: None: the nearest number, of two equally near ones that with an even significand. A key:
        one of the two neighbours at random (stochastic rounding), the upper one with a probability
        of the distance to the lower one over the distance of both, to 2^-24. The mean is x, except
        beyond the largest number. The same key rounds equally on every library.
    axis: the axis of the blocks of "mxfp4"

    TypeError unless x is a floating array; ValueError for another format or axis.
    """
    known = format_of("round_to", format)
    require_array("round_to", "x", x)
    if not array_namespace(x).isdtype(x.dtype, "real floating"):
        raise TypeError(f"round_to: x must be a floating array, got dtype {x.dtype}")
    if key is not None:
        require_key("round_to", key)
    if known.block and x.ndim and not -x.ndim <= axis < x.ndim:
        raise ValueError(f"round_to: axis must be one of the {x.ndim} axes of x, got {axis}")
    return rounded(x, known, key, axis)


def rounded(x: Array, format: Format, key: RandomKey | None, axis: int = -1) -> Array:
    """`round_to` without checks."""
    if format.block is None:
        return _elements(x, format, key)
    xp = array_namespace(x)
    if not x.ndim:
        return xp.reshape(_blocks(xp.reshape(x, (1,)), format, key), ())
    if axis in (-1, x.ndim - 1):
        return _blocks(x, format, key)
    return xp.moveaxis(_blocks(xp.moveaxis(x, axis, -1), format, key), -1, axis)


def _blocks(x: Array, format: Format, key: RandomKey | None) -> Array:
    xp, n, size = array_namespace(x), x.shape[-1], format.block
    assert size is not None
    missing = -n % size
    zeros = xp.zeros((*x.shape[:-1], missing), dtype=x.dtype, device=device(x))
    padded = xp.concat([x, zeros], axis=-1) if missing else x
    parts = xp.reshape(padded, (*x.shape[:-1], (n + missing) // size, size))
    finite = xp.where(xp.isfinite(parts), xp.abs(parts), xp.zeros_like(parts))
    highest = 127 if xp.finfo(x.dtype).bits == 32 else 127 + format.high
    top = xp.max(finite, axis=-1, keepdims=True)
    scale = _power_of_two(top, -127 + format.high, highest) / 2.0**format.high
    y = _elements(parts / scale, format, key) * scale
    return xp.reshape(y, padded.shape)[..., :n]


def _elements(x: Array, format: Format, key: RandomKey | None) -> Array:
    xp = array_namespace(x)
    finite = xp.isfinite(x)
    y = xp.where(finite, x, xp.zeros_like(x))
    if format.saturates:
        y = _between(y, -format.largest, format.largest)
    power = _power_of_two(xp.abs(y), format.low, format.high)
    significand = y / power * 2.0**format.bits
    if key is None:
        significand = xp.round(significand)  # of two equally near integers the even one
    else:
        below = xp.floor(significand)
        bits = random_bits(x, key=key, size=math.prod(x.shape)) >> 8
        u = xp.reshape(xp.astype(bits, x.dtype), x.shape) * 2.0**-24
        significand = xp.where(u < significand - below, below + 1, below)  # keeps -0
    significand = significand / 2.0**format.bits
    if not format.saturates:
        unit = 2.0**-format.high  # keeps the product within the range of float32
        beyond = xp.abs(significand) * (power * unit) > format.largest * unit
        infinity = xp.full_like(y, xp.inf)
        significand = xp.where(beyond, xp.where(y > 0, infinity, -infinity), significand)
    return xp.where(finite, significand * power, x)


def _power_of_two(a: Array, low: int, high: int) -> Array:
    """The largest power of two <= a, but at least 2^low and at most 2^high. It is exact."""
    xp = array_namespace(a)
    a = _between(a, 2.0**low, 2.0**high * (2 - float(xp.finfo(a.dtype).eps)))
    table = xp.asarray([2.0**e for e in range(low, high + 1)], dtype=a.dtype, device=device(a))
    guess = _between(xp.floor(xp.log2(a)) - low, 0.0, high - low)
    index = xp.reshape(xp.astype(guess, _index_dtype(xp)), (-1,))
    power = xp.reshape(xp.take(table, index), a.shape)
    # log2 is rounded: its floor may be off by one next to a power of two.
    power = power / (1 + xp.astype(power > a, a.dtype))
    return power * (1 + xp.astype(power <= a / 2, a.dtype))


def _between(x: Array, low: float, high: float) -> Array:
    """`xp.clip`, which takes several times as long on some libraries."""
    xp = array_namespace(x)
    least, most = (xp.asarray(v, dtype=x.dtype, device=device(x)) for v in (low, high))
    return xp.minimum(xp.maximum(x, least), most)


def _index_dtype(xp: Any) -> Any:
    return xp.__array_namespace_info__().default_dtypes()["indexing"]
