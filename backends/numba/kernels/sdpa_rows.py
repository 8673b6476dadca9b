"""What the options of `sdpa` do to a row of scores: e of the keys that a query may reach."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba import philox
from xformer.backends.numba.compiled import LOG2_E, elementwise, exp2, inlined, rowwise
from xformer.backends.numba.flash_rows import LOWEST, ONE, ZERO, highest
from xformer.backends.numba.program.native import float32s, uint8s, words

BLOCKS = 16  # of four words, drawn at once
TWO, NEAR = np.float32(2), np.float32(0.6)  # up to which tanh(x) = x + x^3 P(x^2)
P0, P1 = np.float32(-0.33333327423398756), np.float32(0.13332617027827845)
P2, P3 = np.float32(-0.05382805338620822), np.float32(0.020891090132775524)
P4 = np.float32(-0.005946235343189831)  # of least relative error, 1e-7


@rowwise
def reach(g: Any, i: int, low: int, high: int) -> Any:
    """From which to which column of low to high query i may see."""
    first = min(high, max(low, i - g.left)) - low
    return first, max(first, min(high, i + g.right + 1) - low)


@rowwise
def score(g: Any, b: int, head: int, i: int, j: int, e: Any, slope: Any, sloped: bool) -> None:
    """Softcap, bias and mask of query i and the keys from j on. slope: of the softcap, if asked."""
    if g.cap:
        if sloped:
            _cap_sloped(e, g.cap, slope)
        else:
            _cap(e, g.cap)
    if g.has_bias:
        step = g.bias_steps
        at = g.bias + b * step[0] + head * step[1] + i * step[2] + j * step[3]
        if step[3]:
            _add(e, float32s(at, (e.size,)))
        else:
            _add_number(e, float32s(at, (1,))[0])
    if g.has_mask:
        step = g.mask_steps
        at = g.mask + b * step[0] + head * step[1] + i * step[2] + j * step[3]
        if step[3]:
            _hide(e, uint8s(at, e.size))
        elif not uint8s(at, 1)[0]:
            e[:] = LOWEST


@inlined
def _tanh(x: Any) -> Any:
    """By a polynomial where 1 would be taken off what is near 1."""
    z = x * x
    near = x + x * z * (P0 + z * (P1 + z * (P2 + z * (P3 + z * P4))))
    far = ONE - TWO / (ONE + exp2(TWO * LOG2_E * x))
    return near if abs(x) < NEAR else far


@elementwise
def _cap(e: Any, cap: Any) -> None:
    """cap tanh(e / cap)."""
    for j in range(e.size):
        e[j] = cap * _tanh(e[j] / cap)


@elementwise
def _cap_sloped(e: Any, cap: Any, slope: Any) -> None:
    """The same, and its slope 1 - tanh^2."""
    for j in range(e.size):
        y = _tanh(e[j] / cap)
        e[j] = cap * y
        slope[j] = ONE - y * y


@elementwise
def _add(e: Any, bias: Any) -> None:
    for j in range(e.size):
        e[j] += bias[j]


@elementwise
def _add_number(e: Any, bias: Any) -> None:
    for j in range(e.size):
        e[j] += bias


@elementwise
def _hide(e: Any, seen: Any) -> None:
    """-inf where a key is not seen, whatever is there."""
    for j in range(e.size):
        e[j] = e[j] if seen[j] else LOWEST


@rowwise
def top_of(e: Any, sink: Any) -> Any:
    """The largest of a row and its sink; 0 of none: -inf taken off itself would be no number."""
    top = highest(e)
    top = sink if sink > top else top
    return ZERO if top == LOWEST else top


@rowwise
def powers(e: Any, top: Any) -> Any:
    """e = exp(e - top); their sum."""
    total = ZERO
    for j in range(e.size):
        x = exp2((e[j] - top) * LOG2_E)
        e[j] = x
        total += x
    return total


@rowwise
def probabilities(p: Any, dp: Any, top: Any, total: Any) -> Any:
    """p = exp(p - top) / total; the sum of p dp."""
    inner, share = ZERO, ONE / total
    for j in range(p.size):
        x = exp2((p[j] - top) * LOG2_E) * share
        p[j] = x
        inner += x * dp[j]
    return inner


@rowwise
def slopes(p: Any, dp: Any, inner: Any, scale: Any) -> None:
    """dp = p (dp - inner) scale."""
    for j in range(p.size):
        dp[j] = p[j] * (dp[j] - inner) * scale


@rowwise
def words_of(n: int) -> Any:
    """Memory of the words of a row, and of a few blocks."""
    return np.empty(n + 8 * BLOCKS, np.uint32), np.empty((4, BLOCKS), np.uint32)


@rowwise
def drop(g: Any, b: int, head: int, i: int, j: int, drawn: Any, x: Any) -> None:
    """Dropout of x (n,), of query i and the keys from j on: the mask of `random_bits`."""
    row, few = drawn
    (t, h), s = g.q.shape[1:3], g.k.shape[1]
    first = ((b * h + head) * t + i) * s + j
    step, begin = words(g.step, 1)[0], first % 4
    for at in range(0, begin + x.size, 4 * BLOCKS):
        philox.words((first - begin + at) // 4, g.seed_low, g.seed_high, step, g.site, few)
        _in_order(few, row[at : at + 4 * BLOCKS])
    _keep(row[begin : begin + x.size], np.uint32(g.lowest), g.over, x)


@elementwise
def _in_order(few: Any, row: Any) -> None:
    """Words of blocks one behind the other."""
    for i in range(few.shape[1]):
        for j in range(4):
            row[4 * i + j] = few[j, i]


@elementwise
def _keep(row: Any, lowest: Any, over: Any, x: Any) -> None:
    """What is dropped is 0, whatever it was."""
    for j in range(x.size):
        kept = x[j] * over
        x[j] = kept if row[j] >= lowest else ZERO
