"""The loops of `advance`: one token of each text through all layers, on all threads at once.

The work is cut into stages, each of these into pieces, as many whatever the number of threads. All
threads go through all stages: they take pieces that nobody has taken yet, and wait for those that
others have. One that comes late finds nothing left to do, and one alone does everything.

Tables, with the columns of `layer`: of int64 maps (L, 7, 11), norms (4 L + 1, 3), sizes (L, 5) and,
with those below, past (L, 7); of float32 numbers (4 L + 1, 2), those of norms, and scales (L,).
x, h: (B, D).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.atomic import WORD, count, floats, wait
from xformer.backends.numba.compiled import LOG2_E, rowwise
from xformer.backends.numba.flash_rows import ONE, ZERO, dot, highest, multiply, powers
from xformer.backends.numba.layer import (
    ACTIVATION,
    ATTN_OUT,
    BIAS,
    BY_ROWS,
    DOWN,
    FFN_OUT,
    FIRST,
    GATE,
    GROUPS,
    HEADS,
    KEY,
    KEYS,
    KEYS_HEAD,
    KEYS_TEXT,
    LENGTH,
    N_IN,
    N_OUT,
    NORMS,
    OUT,
    PARTS,
    PIECES,
    QUERY,
    ROW,
    START,
    STEP,
    UP,
    VALUE,
    VALUE_WIDTH,
    VALUES,
    VALUES_HEAD,
    VALUES_TEXT,
    WEIGHT,
    WIDTH,
    activate,
    normalise,
    turn,
)
from xformer.backends.numba.vectors import matrix_vector, vector_matrix

STAGES = 8  # of a layer
HIDDEN = 512  # elements of a piece of the hidden vector


@rowwise
def advance_all(tables: Any, turns: Any, interleaved: bool, memory: Any, stages: Any) -> None:
    """h = norm(block_n(... block_1(x))); x is written over.

    tables: maps, norms, sizes, past, numbers and scales. turns: (2, B or 1, R/2), cosines and
    sines. memory: x, h, and what is needed for ctx (B H M), hidden (B F) and parts. stages:
    (8 L + 1, 2) zeros.
    """
    norms, numbers, x, h = tables[1], tables[4], memory[0], memory[1]
    at = np.int64(stages.ctypes.data)
    if count(at) == 0:
        for b in range(len(x)):
            normalise(x[b], norms[0], numbers[0], h[b])
        count(at + WORD)
    through_layers(tables, 0, turns, interleaved, memory, stages)


@rowwise
def through_layers(
    tables: Any, more: int, turns: Any, interleaved: bool, memory: Any, stages: Any
) -> None:
    """What `advance_all` does behind the first norm. more: keys that there are beside `past`'s."""
    maps, norms, sizes, past, numbers, scales = tables
    x, h, ctx, hidden, parts = memory
    wait(np.int64(stages.ctypes.data), 1)
    for i in range(len(maps)):
        own, size, n = maps[i], sizes[i], NORMS * i
        at = np.int64(stages[STAGES * i + 1 :].ctypes.data)
        seen = ctx[: len(x) * size[HEADS] * size[VALUE_WIDTH]].reshape(len(x), -1)
        inner = hidden[: len(x) * own[UP, N_OUT]].reshape(len(x), -1)
        _multiply(at, h, own[QUERY : VALUE + 1], parts)
        at += 2 * WORD
        _attend(at, own, size, past[i], more, scales[i], turns, interleaved, parts, seen)
        at += 2 * WORD
        _multiply(at, seen, own[OUT : OUT + 1], parts)
        at += 2 * WORD
        _add(at, parts, own[OUT], norms[n + ATTN_OUT :], numbers[n + ATTN_OUT :], x, h)
        at += 2 * WORD
        _multiply(at, h, own[UP : GATE + 1], parts)
        at += 2 * WORD
        _activate(at, own, size[ACTIVATION], parts, inner)
        at += 2 * WORD
        _multiply(at, inner, own[DOWN : DOWN + 1], parts)
        at += 2 * WORD
        _add(at, parts, own[DOWN], norms[n + FFN_OUT :], numbers[n + FFN_OUT :], x, h)


@rowwise
def _multiply(at: int, x: Any, maps: Any, parts: Any) -> None:
    """Parts of the products of x (B, N_IN) with some maps, one map's behind the other's."""
    n_pieces = 0
    for m in range(len(maps)):
        n_pieces += maps[m, PIECES]
    piece = count(at)
    while piece < n_pieces:
        m = 0
        while piece >= maps[m, PIECES]:
            piece -= maps[m, PIECES]
            m += 1
        _product(x, maps[m], piece, parts[maps[m, START] * len(x) :])
        count(at + WORD)
        piece = count(at)
    wait(at, n_pieces)


@rowwise
def _product(x: Any, own: Any, piece: int, parts: Any) -> None:
    """Of weights that lie by rows some rows, whose products are a part of all sums; else some
    columns, which lie as rows, and some sums."""
    n_in, row, by_rows = own[N_IN], own[ROW], own[BY_ROWS]
    long, step = n_in if by_rows else row, own[STEP]
    start, stop = piece * long // own[PIECES], (piece + 1) * long // own[PIECES]
    w = own[WEIGHT] + 4 * start * step
    for b in range(len(x)):
        if by_rows:
            at = (piece * len(x) + b) * row
            vector_matrix(x[b, start:stop], w, step, parts[at : at + row])
        else:
            matrix_vector(w, step, x[b], parts[b * row + start : b * row + stop])


@rowwise
def _sum(parts: Any, own: Any, n_texts: int, b: int, first: int, out: Any) -> None:
    """Elements of x w + b of text b, from the first on."""
    n_out = own[N_OUT]
    if own[BIAS]:
        out[:] = floats(own[BIAS], (n_out,))[first : first + len(out)]
    else:
        out[:] = ZERO
    for part in range(own[PARTS]):
        start = own[START] * n_texts + (part * n_texts + b) * own[ROW] + own[FIRST] + first
        for j in range(len(out)):
            out[j] += parts[start + j]


@rowwise
def _attend(
    at: int,
    maps: Any,
    size: Any,
    past: Any,
    more: int,
    scale: Any,
    turns: Any,
    interleaved: bool,
    parts: Any,
    ctx: Any,
) -> None:
    """A piece is a head of keys and values: they go behind those before; then all that share it."""
    n, shared, width = past[LENGTH] + more, size[HEADS] // size[GROUPS], size[WIDTH]
    n_texts, value_width = len(ctx), size[VALUE_WIDTH]
    q, scores = np.empty((shared, width), np.float32), np.empty((shared, n), np.float32)
    g = count(at)
    while g < size[GROUPS]:
        for b in range(n_texts):
            cos, sin = turns[0, b % turns.shape[1]], turns[1, b % turns.shape[1]]
            start = past[KEYS] + 4 * (b * past[KEYS_TEXT] + g * past[KEYS_HEAD])
            keys = floats(start, (n, width))
            start = past[VALUES] + 4 * (b * past[VALUES_TEXT] + g * past[VALUES_HEAD])
            values = floats(start, (n, value_width))
            _sum(parts, maps[KEY], n_texts, b, g * width, keys[n - 1])
            turn(keys[n - 1], cos, sin, interleaved)
            place = g * value_width
            _sum(parts, maps[VALUE], n_texts, b, place, values[n - 1])
            for i in range(shared):
                _sum(parts, maps[QUERY], n_texts, b, (g * shared + i) * width, q[i])
                turn(q[i], cos, sin, interleaved)
            out = ctx[b].reshape(-1, value_width)[g * shared : (g + 1) * shared]
            for i in range(shared):
                _look(q[i], keys, values, scale * LOG2_E, scores[i], out[i])
        count(at + WORD)
        g = count(at)
    wait(at, size[GROUPS])


@rowwise
def _look(q: Any, keys: Any, values: Any, scale: Any, scores: Any, out: Any) -> None:
    """out = softmax(q keys^T) values; scale: with log2 e."""
    for j in range(len(keys)):
        scores[j] = dot(q, keys[j]) * scale
    share = ONE / powers(scores, highest(scores))
    out[:] = ZERO
    even = len(values) // 4 * 4
    for j in range(0, even, 4):  # four at once: `out` is read and written once for them
        p0, p1, p2, p3 = scores[j], scores[j + 1], scores[j + 2], scores[j + 3]
        v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
        for i in range(len(out)):
            out[i] += p0 * v0[i] + p1 * v1[i] + p2 * v2[i] + p3 * v3[i]
    for j in range(even, len(values)):
        for i in range(len(out)):
            out[i] += scores[j] * values[j, i]
    multiply(out, share, out)


@rowwise
def _add(at: int, parts: Any, own: Any, norms: Any, numbers: Any, x: Any, h: Any) -> None:
    """x += norm(branch), and h = norm'(x), of the next branch; a piece is a text."""
    b = count(at)
    while b < len(x):
        _sum(parts, own, len(x), b, 0, h[b])
        normalise(h[b], norms[0], numbers[0], h[b])
        for i in range(x.shape[1]):
            x[b, i] += h[b, i]
        normalise(x[b], norms[1], numbers[1], h[b])
        count(at + WORD)
        b = count(at)
    wait(at, len(x))


@rowwise
def _activate(at: int, maps: Any, activation: int, parts: Any, hidden: Any) -> None:
    """act(up), or act(gate) up; a piece is of each text some elements."""
    n_texts, n = hidden.shape
    n_pieces = -(-n // HIDDEN)
    gated = maps[GATE, N_OUT] > 0
    branch, more = np.empty((2, HIDDEN), np.float32)
    piece = count(at)
    while piece < n_pieces:
        start, stop = piece * HIDDEN, min(n, (piece + 1) * HIDDEN)
        for b in range(n_texts):
            row, up = hidden[b, start:stop], more[: stop - start]
            own = branch[: stop - start]
            _sum(parts, maps[UP], n_texts, b, start, up)
            if gated:
                _sum(parts, maps[GATE], n_texts, b, start, own)
                activate(activation, own, row)
                for i in range(len(row)):
                    row[i] *= up[i]
            else:
                activate(activation, up, row)
        count(at + WORD)
        piece = count(at)
    wait(at, n_pieces)
