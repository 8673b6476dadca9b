"""What loops over whole layers share: the columns of their tables, and what they do with a row."""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.atomic import floats
from xformer.backends.numba.compiled import LOG2_E, elementwise, exp2, rowwise
from xformer.backends.numba.flash_rows import ONE, ZERO
from xformer.backends.numba.gelu import exact_form, tanh_form
from xformer.backends.numba.glu import FAR32

QUERY, KEY, VALUE, OUT, UP, GATE, DOWN = range(7)  # maps of a layer
# Of a map. Several whose rows lie behind each other are one product, of which the first has all
# PIECES. It gives PARTS of its sums, from START on, of ROW numbers each; FIRST: a map's own first.
WEIGHT, STEP, BY_ROWS, N_IN, N_OUT, BIAS, PIECES, PARTS, START, ROW, FIRST = range(11)
ATTN, ATTN_OUT, FFN, FFN_OUT, NORMS = range(5)  # norms of a layer; the last of all ends the stack
GAIN, SHIFT, RMS = range(3)  # of a norm
EPS, OFFSET = range(2)
HEADS, GROUPS, WIDTH, VALUE_WIDTH, ACTIVATION = range(5)  # sizes
SILU, GELU, GELU_TANH, RELU = range(4)
# Of a past: where keys and values are, and numbers from one text and from one head to the next; and
# how many there are, where they are read.
KEYS, KEYS_TEXT, KEYS_HEAD, VALUES, VALUES_TEXT, VALUES_HEAD, LENGTH = range(7)


@rowwise
def normalise(x: Any, own: Any, numbers: Any, y: Any) -> None:
    """y = norm(x), or x where there is none; y may be x."""
    n = len(x)
    if own[GAIN] == 0:
        y[:] = x
        return
    gain, mean, square = floats(own[GAIN], (n,)), 0.0, 0.0  # sums in float64, of all their own
    centred = np.empty(n, np.float32)
    if not own[RMS]:
        for i in range(n):
            mean += np.float64(x[i])
        mean /= n
    for i in range(n):
        centred[i] = x[i] - mean
        square += np.float64(centred[i]) ** 2
    factor = np.float32(1.0 / np.sqrt(square / n + numbers[EPS]))
    for i in range(n):
        y[i] = centred[i] * (factor * (gain[i] + numbers[OFFSET]))
    if own[SHIFT]:
        shift = floats(own[SHIFT], (n,))
        for i in range(n):
            y[i] += shift[i]


@rowwise
def turn(row: Any, cos: Any, sin: Any, interleaved: bool) -> None:
    """`ops.rope` of one vector."""
    half = len(cos)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = row[first], row[second]
        row[first], row[second] = a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]


@rowwise
def activate(activation: int, x: Any, y: Any) -> None:
    """y = act(x); not x itself, or the loops would go one number at a time."""
    if activation == SILU:
        _silu(x, y)
    elif activation == GELU:
        exact_form(x, y)
    elif activation == GELU_TANH:
        tanh_form(x, y)
    else:
        for i in range(len(x)):
            y[i] = max(x[i], ZERO)


@elementwise
def _silu(x: Any, y: Any) -> None:
    for i in range(x.size):
        v = max(x[i], -FAR32)
        y[i] = v / (ONE + exp2(-LOG2_E * v))
