"""Loops over one row of attention scores: softcap, bias, mask, softmax and dropout.

`sdpa_general` calls them. A row holds the scores of one query, for a range of consecutive keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.numba import philox
from xformer.backends.numba.flash_rows import LOWEST, ONE, ZERO, highest
from xformer.backends.numba.jit import LOG2_E, elementwise, exp2, inlined, rowwise
from xformer.backends.numba.program.native import float32s, uint8s, words

BLOCKS = 16  # blocks of four random words that one call of Philox computes
TWO, NEAR = np.float32(2), np.float32(0.6)  # if |x| < NEAR, tanh(x) = x + x^3 P(x^2)
P0, P1 = np.float32(-0.33333327423398756), np.float32(0.13332617027827845)
P2, P3 = np.float32(-0.05382805338620822), np.float32(0.020891090132775524)
P4 = np.float32(-0.005946235343189831)  # P has the least relative error, 1e-7


@rowwise
def reach(call: Any, i: int, low: int, high: int) -> Any:
    """Return (first, end): the keys that window and causality let query i see.

    Only keys from `low` to `high` count; the result is relative to `low`.
    """
    first = min(high, max(low, i - call.left)) - low
    return first, max(first, min(high, i + call.right + 1) - low)


@rowwise
def apply_options(
    call: Any,
    b: int,
    head: int,
    i: int,
    j: int,
    scores: Any,
    derivative: Any,
    with_derivative: bool,
) -> None:
    """Apply softcap, bias and mask to the scores (n,) of query i and the keys from j on, in place.

    b, head: the sequence and the head. derivative (n,): of the softcap, written if
    `with_derivative` and the call has a softcap.
    """
    if call.cap:
        if with_derivative:
            _cap_with_derivative(scores, call.cap, derivative)
        else:
            _cap(scores, call.cap)
    if call.has_bias:
        strides = call.bias_strides
        at = call.bias + b * strides[0] + head * strides[1] + i * strides[2] + j * strides[3]
        if strides[3]:
            _add(scores, float32s(at, (scores.size,)))
        else:
            _add_constant(scores, float32s(at, (1,))[0])
    if call.has_mask:
        strides = call.mask_strides
        at = call.mask + b * strides[0] + head * strides[1] + i * strides[2] + j * strides[3]
        if strides[3]:
            _apply_mask(scores, uint8s(at, scores.size))
        elif not uint8s(at, 1)[0]:
            scores[:] = LOWEST


@inlined
def _tanh(x: Any) -> Any:
    """Return tanh(x) = 1 - 2 / (1 + exp(2 x)); a polynomial if |x| < `NEAR`.

    For small |x|, the fraction is close to 1, and the difference would lose digits.
    """
    z = x * x
    near = x + x * z * (P0 + z * (P1 + z * (P2 + z * (P3 + z * P4))))
    far = ONE - TWO / (ONE + exp2(TWO * LOG2_E * x))
    return near if abs(x) < NEAR else far


@elementwise
def _cap(scores: Any, cap: Any) -> None:
    """Replace scores by cap * tanh(scores / cap)."""
    for j in range(scores.size):
        scores[j] = cap * _tanh(scores[j] / cap)


@elementwise
def _cap_with_derivative(scores: Any, cap: Any, derivative: Any) -> None:
    """As `_cap`, and write its derivative 1 - tanh^2."""
    for j in range(scores.size):
        y = _tanh(scores[j] / cap)
        scores[j] = cap * y
        derivative[j] = ONE - y * y


@elementwise
def _add(scores: Any, bias: Any) -> None:
    """Add bias (n,) to scores (n,)."""
    for j in range(scores.size):
        scores[j] += bias[j]


@elementwise
def _add_constant(scores: Any, bias: Any) -> None:
    """Add one number to scores (n,)."""
    for j in range(scores.size):
        scores[j] += bias


@elementwise
def _apply_mask(scores: Any, mask: Any) -> None:
    """Replace scores by -inf where mask (n,) is 0, NaN too."""
    for j in range(scores.size):
        scores[j] = scores[j] if mask[j] else LOWEST


@rowwise
def row_shift(scores: Any, sink: Any) -> Any:
    """Return the largest of the scores and the sink, which softmax subtracts.

    Return 0 if all are -inf: -inf - (-inf) would be NaN.
    """
    largest = highest(scores)
    largest = sink if sink > largest else largest
    return ZERO if largest == LOWEST else largest


@rowwise
def to_exponentials(scores: Any, shift: Any) -> Any:
    """Replace scores by exp(scores - shift), and return their sum."""
    total = ZERO
    for j in range(scores.size):
        power = exp2((scores[j] - shift) * LOG2_E)
        scores[j] = power
        total += power
    return total


@rowwise
def to_probs(scores: Any, dprobs: Any, shift: Any, exp_sum: Any) -> Any:
    """Replace scores by probs = exp(scores - shift) / exp_sum, and return sum(probs * dprobs)."""
    inner, inverse = ZERO, ONE / exp_sum
    for j in range(scores.size):
        prob = exp2((scores[j] - shift) * LOG2_E) * inverse
        scores[j] = prob
        inner += prob * dprobs[j]
    return inner


@rowwise
def to_dscores(probs: Any, dprobs: Any, inner: Any, scale: Any) -> None:
    """Replace dprobs by dscores = probs * (dprobs - inner) * scale."""
    for j in range(probs.size):
        dprobs[j] = probs[j] * (dprobs[j] - inner) * scale


@rowwise
def dropout_scratch(n: int) -> Any:
    """Return (row, blocks): the scratch arrays of `dropout` for rows of at most n keys.

    row: (n + 8 BLOCKS,) uint32, for the random words of a row
    blocks: (4, BLOCKS) uint32, for the random words of one call of Philox
    """
    return np.empty(n + 8 * BLOCKS, np.uint32), np.empty((4, BLOCKS), np.uint32)


@rowwise
def dropout(call: Any, b: int, head: int, i: int, j: int, scratch: Any, x: Any) -> None:
    """Apply dropout to x (n,), of query i and the keys from j on, in place.

    b, head: the sequence and the head. The mask is the one of `ops.random_bits` for the whole
    (B, H, T, S). scratch: from `dropout_scratch`.
    """
    drawn_row, blocks = scratch
    (t, h), s = call.q.shape[1:3], call.k.shape[1]
    first = ((b * h + head) * t + i) * s + j
    step, begin = words(call.step, 1)[0], first % 4
    for done in range(0, begin + x.size, 4 * BLOCKS):
        philox.words(
            (first - begin + done) // 4, call.seed_low, call.seed_high, step, call.site, blocks
        )
        _interleave(blocks, drawn_row[done : done + 4 * BLOCKS])
    _scale_kept(drawn_row[begin : begin + x.size], np.uint32(call.lowest_kept), call.keep_scale, x)


@elementwise
def _interleave(blocks: Any, row: Any) -> None:
    """Copy blocks (4, N) to row (4 N,), block after block."""
    for i in range(blocks.shape[1]):
        for j in range(4):
            row[4 * i + j] = blocks[j, i]


@elementwise
def _scale_kept(row: Any, lowest_kept: Any, keep_scale: Any, x: Any) -> None:
    """Multiply x by keep_scale where the random word is at least lowest_kept; else set x to 0."""
    for j in range(x.size):
        scaled = x[j] * keep_scale
        x[j] = scaled if row[j] >= lowest_kept else ZERO
