"""The loops of `extend`: a token to its vector, through all layers, to logits, to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.atomic import WORD, count, floats, wait
from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.flash_rows import ZERO, highest
from xformer.backends.numba.layer import normalise
from xformer.backends.numba.linear import columns
from xformer.backends.numba.token import STAGES, through_layers

MORE = 3  # stages of a token beside those of its layers: its vector, logits, the next token


@rowwise
def extend_all(
    tables: Any,
    turns: Any,
    interleaved: bool,
    vectors: Any,
    ids: Any,
    head: Any,
    logits: Any,
    stop: Any,
    memory: Any,
    stages: Any,
) -> None:
    """Logits (B, V) after a token of each text; and of the likeliest after it, one by one.

    tables, memory: as of `advance_all`. turns: (n, 2, 1, R/2) of the tokens from the first on.
    vectors: what `_look_up` wants, and the first's place. ids: (B, n), of which the first are
    given, and those chosen come in; of one text where n > 1. It ends before a token that
    `_likeliest` refuses. head: weights, how many columns are one piece, as `columns` has them, and
    where a bias is, or 0. stages: (n (8 L + 3), 2) zeros.
    """
    maps, norms, numbers = tables[0], tables[1], tables[4]
    x, h = memory[0], memory[1]
    table, positions, scale, first = vectors
    w, size, bias = head
    n_stages, n = len(stages) // ids.shape[1], ids.shape[1]
    for t in range(n):
        own = stages[t * n_stages : (t + 1) * n_stages]
        at = np.int64(own.ctypes.data)
        if count(at) == 0:
            for b in range(len(x)):
                _look_up(table, positions, np.float32(scale), ids[b, t], first + t, x[b])
                normalise(x[b], norms[0], numbers[0], h[b])
            count(at + WORD)
        through_layers(tables, t, turns[t], interleaved, memory, own)
        at += 2 * WORD * (STAGES * len(maps) + 1)
        columns(h, w, size, logits, own[STAGES * len(maps) + 1 :])
        if bias or t + 1 < n:
            at += 2 * WORD
            if count(at) == 0:
                for b in range(len(x)):
                    if bias:
                        _add_bias(bias, logits[b])
                if t + 1 < n:
                    ids[0, t + 1] = _likeliest(logits[0], stop)
                count(at + WORD)
            wait(at, 1)
        if t + 1 < n and ids[0, t + 1] < 0:
            break


@rowwise
def _look_up(table: Any, positions: Any, scale: Any, i: int, place: int, x: Any) -> None:
    """The vector of token i at a place of its text. Tables: as `place_of` has them; 0 of none."""
    at, down, across = table
    for j in range(len(x)):
        x[j] = floats(at + 4 * (i * down + j * across), (1,))[0] * scale
    at, down, across = positions
    if at:
        for j in range(len(x)):
            x[j] += floats(at + 4 * (place * down + j * across), (1,))[0]


@rowwise
def _add_bias(bias: int, logits: Any) -> None:
    own = floats(bias, (len(logits),))
    for j in range(len(logits)):
        logits[j] += own[j]


@rowwise
def _likeliest(logits: Any, stop: Any) -> int:
    """The first of the largest; -1 where it is in `stop`, no number, or one of them is none."""
    top, numbers = highest(logits), True
    for j in range(len(logits)):
        numbers &= logits[j] == logits[j]
    if not numbers or top - top != ZERO:
        return -1
    best = 0
    while best < len(logits) and logits[best] != top:
        best += 1
    if best == len(logits):
        return -1
    for i in stop:
        if i == best:
            return -1
    return best
