"""The rows of a tile of `flash`: powers, probabilities and their slopes, each read once."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba.compiled import exp2, rowwise

ONE, ZERO = np.float32(1), np.float32(0)
LOWEST = np.float32(-np.inf)  # a finite number could be a score
LEAST, MOST = np.float32(2.0**-40), np.float32(2.0**40)  # sums of powers with nothing taken off
SIGN, OTHERS = np.int32(31), np.int32(0x7FFFFFFF)  # of a number's bits
LOWEST_BITS = np.int32(LOWEST.view(np.int32) ^ OTHERS)


@rowwise
def take_powers(
    e: Any,
    pad: Any,
    ahead: int,
    left: int,
    right: int,
    shifted: bool,
    top: Any,
    total: Any,
    sums: Any,
) -> None:
    """Powers of a tile's scores less top; a top that rises takes total and sums with it.

    ahead: from the number of the first key to that of the first query.
    """
    for i in range(len(e)):
        low, high = _reach(e, ahead + i, left, right)
        row = e[i]
        row[:low] = ZERO
        row[high:] = ZERO
        if pad.size:
            _hide(row[low:high], pad[low:high])
        if shifted:
            new = highest(row[low:high])
            if not new <= top[i]:
                decay = exp2(top[i] - new)
                total[i] *= decay
                multiply(sums[i], decay, sums[i])
                top[i] = new
        # -inf taken off itself would be no number.
        total[i] += powers(row[low:high], ZERO if top[i] == LOWEST else top[i])


@rowwise
def take_slopes(
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
    """A tile's probabilities of its scores, and dscores of dprobs.

    whole: it has all keys, and so dscores are exact where one has all the weight.
    """
    for i in range(len(p)):
        low, high = _reach(p, ahead + i, left, right)
        for x in (p[i], ds[i]):
            x[:low] = ZERO
            x[high:] = ZERO
        probs, dscores = p[i, low:high], ds[i, low:high]
        if pad.size:
            _hide(probs, pad[low:high])
        if whole:
            _slopes(probs, dscores, _probabilities(probs, dscores, top[i], total[i]), scale)
        else:
            _probabilities_and_slopes(probs, dscores, top[i], total[i], inner[i], scale)


@rowwise
def _reach(tile: Any, ahead: int, left: int, right: int) -> Any:
    """From which to which column a row goes, whose own key is column `ahead`."""
    return max(0, ahead - left), min(tile.shape[1], ahead + right + 1)


@rowwise
def seen(pad: Any, n: int) -> Any:
    """From which to which key anybody sees, of n."""
    low, high = 0, n
    if pad.size:
        while low < high and pad[low] < ZERO:
            low += 1
        while low < high and pad[high - 1] < ZERO:
            high -= 1
    return low, high


@rowwise
def _hide(x: Any, pad: Any) -> None:
    """x = pad where that is not 0; a sum would keep what is NaN."""
    for j in range(x.size):
        x[j] = pad[j] if pad[j] < ZERO else x[j]


@rowwise
def multiply(x: Any, factor: Any, out: Any) -> None:
    """out = factor x, which may be x itself."""
    for j in range(x.size):
        out[j] = factor * x[j]


@rowwise
def dot(x: Any, y: Any) -> Any:
    """The sum of x y."""
    total = ZERO
    for j in range(x.size):
        total += x[j] * y[j]
    return total


@rowwise
def highest(x: Any) -> Any:
    """-inf of none; by bits, whose order is that of whole numbers. NaN may be it."""
    top = LOWEST_BITS
    for j in range(x.size):
        bits = np.float32(x[j]).view(np.int32)
        top = max(top, bits ^ ((bits >> SIGN) & OTHERS))
    return np.int32(top ^ ((top >> SIGN) & OTHERS)).view(np.float32)


@rowwise
def within(totals: Any) -> Any:
    """Whether all sums of powers are as exact as with their maximum taken off; not of NaN."""
    return totals.min() >= LEAST and totals.max() <= MOST


@rowwise
def powers(x: Any, top: Any) -> Any:
    """x = 2^(x - top); their sum."""
    total = ZERO
    for j in range(x.size):
        e = exp2(x[j] - top)
        x[j] = e
        total += e
    return total


@rowwise
def _probabilities(p: Any, d: Any, top: Any, total: Any) -> Any:
    """p = 2^(p - top) / total; the sum of p d."""
    inner, share = ZERO, ONE / total
    for j in range(p.size):
        e = exp2(p[j] - top) * share
        p[j] = e
        inner += e * d[j]
    return inner


@rowwise
def _slopes(p: Any, d: Any, inner: Any, scale: Any) -> None:
    """d = p (d - inner) scale."""
    for j in range(p.size):
        d[j] = p[j] * (d[j] - inner) * scale


@rowwise
def _probabilities_and_slopes(p: Any, d: Any, top: Any, total: Any, inner: Any, scale: Any) -> None:
    """Both at once, where inner is known before."""
    share = ONE / total
    for j in range(p.size):
        e = exp2(p[j] - top) * share
        p[j] = e
        d[j] = e * (d[j] - inner) * scale
