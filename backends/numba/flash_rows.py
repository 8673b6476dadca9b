"""Softmax of the rows of a tile of `flash`, forward and backward, in one pass each."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.jit import exp2, rowwise

ONE, ZERO = np.float32(1), np.float32(0)
LOWEST = np.float32(-np.inf)  # a finite number could be a score
# Range of sums of powers that are exact enough without subtracting the maximum of a row.
LEAST, MOST = np.float32(2.0**-40), np.float32(2.0**40)
SIGN, MAGNITUDE = np.int32(31), np.int32(0x7FFFFFFF)  # of a float32: shift of the sign bit; mask
LOWEST_BITS = np.int32(LOWEST.view(np.int32) ^ MAGNITUDE)


@rowwise
def take_powers(
    e: Any,
    pad: Any,
    ahead: int,
    left: int,
    right: int,
    subtracts_maximum: bool,
    top: Any,
    total: Any,
    sums: Any,
) -> None:
    """In place: turn a tile of scores e (rows, columns) into 2^(e - top), 0 for masked keys.

    pad, left, right: as in `flash`, pad of the tile's keys. ahead: the index of the first query
    minus the index of the first key. top, total (rows,): the number subtracted from a row, and the
    sum of its powers; total is updated. subtracts_maximum: top is raised to the row's maximum, and
    total and sums (rows, M), the weighted sums of values, are rescaled.
    """
    for i in range(len(e)):
        low, high = _window(e, ahead + i, left, right)
        row = e[i]
        row[:low] = ZERO
        row[high:] = ZERO
        if pad.size:
            _hide(row[low:high], pad[low:high])
        if subtracts_maximum:
            new = highest(row[low:high])
            if not new <= top[i]:
                decay = exp2(top[i] - new)
                total[i] *= decay
                multiply(sums[i], decay, sums[i])
                top[i] = new
        # -inf - -inf would be NaN.
        total[i] += powers(row[low:high], ZERO if top[i] == LOWEST else top[i])


@rowwise
def take_dscores(
    p: Any,
    ds: Any,
    pad: Any,
    ahead: int,
    left: int,
    right: int,
    scale: Any,
    top: Any,
    total: Any,
    inner: Any,
    whole: bool,
) -> None:
    """In place: turn p from scores to probabilities, and ds from dprobs to dscores.

    dscores = p * (dprobs - inner) * scale; 0 for masked keys. p, ds: (rows, columns). inner: the
    sum of p * dprobs of each row. whole: the tile holds all keys of its rows; then inner is
    computed here, and dscores are exact even if one key has all the weight.
    pad, ahead, left, right, top, total: as of `take_powers`.
    """
    for i in range(len(p)):
        low, high = _window(p, ahead + i, left, right)
        for x in (p[i], ds[i]):
            x[:low] = ZERO
            x[high:] = ZERO
        probs, dscores = p[i, low:high], ds[i, low:high]
        if pad.size:
            _hide(probs, pad[low:high])
        if whole:
            _dscores(probs, dscores, _probabilities(probs, dscores, top[i], total[i]), scale)
        else:
            _probabilities_and_dscores(probs, dscores, top[i], total[i], inner[i], scale)


@rowwise
def _window(tile: Any, ahead: int, left: int, right: int) -> Any:
    """Return (low, high): the columns of a tile that a query attends to.

    ahead: the index of the query minus the index of the tile's first key.
    """
    return max(0, ahead - left), min(tile.shape[1], ahead + right + 1)


@rowwise
def unmasked(pad: Any, n: int) -> Any:
    """Return (low, high): the range of n keys without the masked ones at both ends."""
    low, high = 0, n
    if pad.size:
        while low < high and pad[low] < ZERO:
            low += 1
        while low < high and pad[high - 1] < ZERO:
            high -= 1
    return low, high


@rowwise
def _hide(x: Any, pad: Any) -> None:
    """Set x to -inf where pad is; adding pad would not replace NaN."""
    for j in range(x.size):
        x[j] = pad[j] if pad[j] < ZERO else x[j]


@rowwise
def multiply(x: Any, factor: Any, out: Any) -> None:
    """Compute out = factor x; out may be x itself."""
    for j in range(x.size):
        out[j] = factor * x[j]


@rowwise
def copy(x: Any, out: Any) -> None:
    """Compute out = x. numba's out[:] = x compiles an error with both shapes, for seconds."""
    for j in range(x.size):
        out[j] = x[j]


@rowwise
def dot(x: Any, y: Any) -> Any:
    """Return the sum of x y."""
    total = ZERO
    for j in range(x.size):
        total += x[j] * y[j]
    return total


@rowwise
def highest(x: Any) -> Any:
    """Return the maximum of x, -inf if x is empty. If there is a NaN, it may be NaN.

    The bits of float32 numbers are compared as integers of the same order.
    """
    top = LOWEST_BITS
    for j in range(x.size):
        bits = np.float32(x[j]).view(np.int32)
        top = max(top, bits ^ ((bits >> SIGN) & MAGNITUDE))
    return np.int32(top ^ ((top >> SIGN) & MAGNITUDE)).view(np.float32)


@rowwise
def are_safe(totals: Any) -> Any:
    """Return whether sums of powers are as exact as with the maximum subtracted. False for NaN."""
    safe = True
    for i in range(totals.size):
        safe &= LEAST <= totals[i] <= MOST
    return safe


@rowwise
def powers(x: Any, top: Any) -> Any:
    """Overwrite x (n,) with 2^(x - top), and return the sum.

    x: scores times log2(e). top: a number, usually 0 or max(x).
    """
    total = ZERO
    for j in range(x.size):
        e = exp2(x[j] - top)
        x[j] = e
        total += e
    return total


@rowwise
def _probabilities(p: Any, d: Any, top: Any, total: Any) -> Any:
    """In place: p = 2^(p - top) / total. Return the sum of p d."""
    inner, share = ZERO, ONE / total
    for j in range(p.size):
        e = exp2(p[j] - top) * share
        p[j] = e
        inner += e * d[j]
    return inner


@rowwise
def _dscores(p: Any, d: Any, inner: Any, scale: Any) -> None:
    """In place: d = p (d - inner) scale."""
    for j in range(p.size):
        d[j] = p[j] * (d[j] - inner) * scale


@rowwise
def _probabilities_and_dscores(
    p: Any, d: Any, top: Any, total: Any, inner: Any, scale: Any
) -> None:
    """In place: p = 2^(p - top) / total and d = p (d - inner) scale, in one pass."""
    share = ONE / total
    for j in range(p.size):
        e = exp2(p[j] - top) * share
        p[j] = e
        d[j] = e * (d[j] - inner) * scale
