"""Positional encodings without parameters: sinusoidal, and ALiBi's biases."""

from __future__ import annotations

import functools
import math
from typing import Any

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.checks import require_sizes
from xformer.dispatch.shapes import FLOATING, STORED, dtype_name, require_array
from xformer.layers.constant import constant
from xformer.ops._attention import aligned


def sinusoidal(length: int, width: int, *, like: Array) -> Array:
    """Return the sinusoidal position encodings p (length, D), D = width.

    p[t, 2i] = sin(t / 10000^(2i / D)) and p[t, 2i + 1] = cos(t / 10000^(2i / D)). If D is odd, the
    last channel is a sine. Source: arXiv:1706.03762, section 3.5.

    like: a floating-point array; p is of its library, dtype and device
    ValueError for negative sizes, TypeError unless `like` is a floating-point array.
    """
    _require_floating("sinusoidal", like)
    if min(length, width) < 0:
        raise ValueError(f"sinusoidal: sizes must not be negative, got ({length}, {width})")
    xp = array_namespace(like)
    table = constant(like, of=_table, args=(length, width), dtype=like.dtype)
    return xp.reshape(table, (length, width))  # an empty list of rows has no width


def distances(n: int, width: int, *, like: Array) -> Array:
    """p (n, D): the sinusoidal encodings of the distances n - 1, ..., 1, 0; D = width.

    For `ops.xl_attention`. ValueError for negative sizes.
    """
    # Few tables, although decoding asks for one more distance with each token.
    length = n if n < 2 else 1 << (n - 1).bit_length()
    p = array_namespace(like).flip(sinusoidal(length, width, like=like)[:n, :], axis=0)
    return p + 0  # a copy: a view would keep the whole table in a cache


@functools.lru_cache(maxsize=8)
def _table(length: int, width: int) -> Any:
    # In float64 on the host: at large t, a float32 angle has a larger error than rounding.
    rates = [10000.0 ** (-(i - i % 2) / width) for i in range(width)]
    return [
        [math.cos(t * r) if i % 2 else math.sin(t * r) for i, r in enumerate(rates)]
        for t in range(length)
    ]


def alibi(
    n_heads: int, *, n_queries: int, n_keys: int, like: Array, at: Array | None = None
) -> Array:
    """bias[0, h, i, j] = -slope_h * (i - j), with i from S - T (arXiv:2108.12409, section 3).

    slope_h = 2^(-8 (h + 1) / H) if H is a power of two. Otherwise, with the power of two P below H:
    the slopes of P heads, then the first, third, ... slopes of 2 P heads. A key after its query
    has a positive bias, so use it with causal attention.

    Returns (1, H, T, S), H = n_heads, T = n_queries, S = n_keys, of the library, dtype and device
    of `like`, for `ops.sdpa`.

    like: a floating-point array
    at: integer array (), the first i; None: S - T
    ValueError for fewer than 1 head or negative sizes, TypeError unless `like` is a floating-point
    array.
    """
    _require_floating("alibi", like)
    (n_heads,) = require_sizes("alibi", 1, n_heads=n_heads)
    n_queries, n_keys = require_sizes("alibi", 0, n_queries=n_queries, n_keys=n_keys)
    xp = array_namespace(like)
    slopes = constant(like, of=_slopes, args=(n_heads,), dtype=like.dtype)
    key, query = aligned(like, n_queries, n_keys, at)
    ahead = xp.astype(key - query, like.dtype)  # (T, S)
    return (slopes[:, None, None] * ahead)[None, ...]


def _require_floating(op: str, like: Any) -> None:
    require_array(op, "like", like, "a floating-point array")
    if dtype_name(like) not in (*FLOATING, *STORED):
        raise TypeError(f"{op}: like must be a floating-point array, got dtype {dtype_name(like)}")


def _slopes(n_heads: int) -> list[float]:
    power = 2 ** (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    return slopes + between[: n_heads - power]
