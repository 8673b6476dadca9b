"""The loops of `advance`: one token of each text through all layers, on all threads at once.

The work is cut into stages, each of these into pieces, as many whatever the number of threads. All
threads go through all stages: they take pieces that nobody has taken yet, and wait for those that
others have. One that comes late finds nothing left to do, and one alone does everything.

Tables, with the columns below: of int64 maps (L, 7, 8), norms (4 L + 1, 3), sizes (L, 5) and
past (L, 7); of float32 numbers (4 L + 1, 2), those of norms, and scales (L,). x, h: (B, D).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.atomic import count, floats, give_way, pause, read
from xformer.backends.numba.compiled import LOG2_E, elementwise, exp2, rowwise
from xformer.backends.numba.flash_rows import ONE, ZERO, dot, highest, powers
from xformer.backends.numba.gelu import exact_form, tanh_form
from xformer.backends.numba.glu import FAR32
from xformer.backends.numba.vectors import matrix_vector, vector_matrix

QUERY, KEY, VALUE, OUT, UP, GATE, DOWN = range(7)  # maps of a layer
WEIGHT, STEP, BY_ROWS, N_IN, N_OUT, BIAS, PIECES, PARTS = range(8)  # of a map
ATTN, ATTN_OUT, FFN, FFN_OUT, NORMS = range(5)  # norms of a layer; the last of all ends the stack
GAIN, SHIFT, RMS = range(3)  # of a norm
EPS, OFFSET = range(2)
HEADS, GROUPS, WIDTH, VALUE_WIDTH, ACTIVATION = range(5)  # sizes
KEYS, KEYS_TEXT, KEYS_HEAD, VALUES, VALUES_TEXT, VALUES_HEAD, LENGTH = range(7)  # of a past
SILU, GELU, GELU_TANH, RELU = range(4)
STAGES = 8  # of a layer
WORD = 8  # bytes; of a stage there are two: how many pieces have been taken, and are done
LONG = 10_000  # pauses: then the other thread may have no core
HIDDEN = 512  # elements of a piece of the hidden vector


@rowwise
def advance_all(
    maps: Any,
    norms: Any,
    sizes: Any,
    past: Any,
    numbers: Any,
    scales: Any,
    turns: Any,
    interleaved: bool,
    x: Any,
    h: Any,
    ctx: Any,
    hidden: Any,
    parts: Any,
    stages: Any,
) -> None:
    """h = norm(block_n(... block_1(x))); x is written over.

    turns: (2, B or 1, R/2), cosines and sines. ctx (B H M), hidden (B F) and parts: memory. stages:
    (8 L + 1, 2) zeros.
    """
    at = np.int64(stages.ctypes.data)
    if count(at) == 0:
        for b in range(len(x)):
            _norm(x[b], norms[0], numbers[0], h[b])
        count(at + WORD)
    _wait(at, 1)
    for i in range(len(maps)):
        own, size, n = maps[i], sizes[i], NORMS * i
        at = np.int64(stages[STAGES * i + 1 :].ctypes.data)
        seen = ctx[: len(x) * size[HEADS] * size[VALUE_WIDTH]].reshape(len(x), -1)
        inner = hidden[: len(x) * own[UP, N_OUT]].reshape(len(x), -1)
        _multiply(at, h, own[QUERY : VALUE + 1], parts)
        at += 2 * WORD
        _attend(at, own, size, past[i], scales[i], turns, interleaved, parts, seen)
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
def _wait(at: int, n_pieces: int) -> None:
    waited = 0
    while read(at + WORD) < n_pieces:
        waited += 1
        if waited < LONG:
            pause()
        else:
            give_way()


@rowwise
def _multiply(at: int, x: Any, maps: Any, parts: Any) -> None:
    """Parts of the products of x (B, N_IN) with some maps, one map's behind the other's."""
    n_pieces = 0
    for m in range(len(maps)):
        n_pieces += maps[m, PIECES]
    piece = count(at)
    while piece < n_pieces:
        start, m = 0, 0
        while piece >= maps[m, PIECES]:
            piece -= maps[m, PIECES]
            start += _size(maps[m], len(x))
            m += 1
        _product(x, maps[m], piece, parts[start:])
        count(at + WORD)
        piece = count(at)
    _wait(at, n_pieces)


@rowwise
def _size(own: Any, n_texts: int) -> int:
    return own[PARTS] * n_texts * own[N_OUT]


@rowwise
def _product(x: Any, own: Any, piece: int, parts: Any) -> None:
    """Of weights that lie by rows some rows, whose products are a part of all sums; else some
    columns, which lie as rows, and some sums."""
    n_in, n_out, by_rows = own[N_IN], own[N_OUT], own[BY_ROWS]
    long, step = n_in if by_rows else n_out, own[STEP]
    start, stop = piece * long // own[PIECES], (piece + 1) * long // own[PIECES]
    w = own[WEIGHT] + 4 * start * step
    for b in range(len(x)):
        if by_rows:
            at = (piece * len(x) + b) * n_out
            vector_matrix(x[b, start:stop], w, step, parts[at : at + n_out])
        else:
            matrix_vector(w, step, x[b], parts[b * n_out + start : b * n_out + stop])


@rowwise
def _sum(parts: Any, own: Any, n_texts: int, b: int, first: int, out: Any) -> None:
    """Elements of x w + b of text b, from the first on."""
    n_out = own[N_OUT]
    if own[BIAS]:
        out[:] = floats(own[BIAS], (n_out,))[first : first + len(out)]
    else:
        out[:] = ZERO
    for part in range(own[PARTS]):
        start = (part * n_texts + b) * n_out + first
        for j in range(len(out)):
            out[j] += parts[start + j]


@rowwise
def _attend(
    at: int,
    maps: Any,
    size: Any,
    past: Any,
    scale: Any,
    turns: Any,
    interleaved: bool,
    parts: Any,
    ctx: Any,
) -> None:
    """A piece is a head of keys and values: they go behind those before; then all that share it."""
    n, shared, width = past[LENGTH], size[HEADS] // size[GROUPS], size[WIDTH]
    n_texts, value_width = len(ctx), size[VALUE_WIDTH]
    q, scores = np.empty((shared, width), np.float32), np.empty((shared, n), np.float32)
    keys_parts = _size(maps[QUERY], n_texts)
    values_parts = keys_parts + _size(maps[KEY], n_texts)
    g = count(at)
    while g < size[GROUPS]:
        for b in range(n_texts):
            cos, sin = turns[0, b % turns.shape[1]], turns[1, b % turns.shape[1]]
            start = past[KEYS] + 4 * (b * past[KEYS_TEXT] + g * past[KEYS_HEAD])
            keys = floats(start, (n, width))
            start = past[VALUES] + 4 * (b * past[VALUES_TEXT] + g * past[VALUES_HEAD])
            values = floats(start, (n, value_width))
            _sum(parts[keys_parts:], maps[KEY], n_texts, b, g * width, keys[n - 1])
            _turn(keys[n - 1], cos, sin, interleaved)
            place = g * value_width
            _sum(parts[values_parts:], maps[VALUE], n_texts, b, place, values[n - 1])
            for i in range(shared):
                _sum(parts, maps[QUERY], n_texts, b, (g * shared + i) * width, q[i])
                _turn(q[i], cos, sin, interleaved)
            out = ctx[b].reshape(-1, value_width)[g * shared : (g + 1) * shared]
            for i in range(shared):
                _look(q[i], keys, values, scale * LOG2_E, scores[i], out[i])
        count(at + WORD)
        g = count(at)
    _wait(at, size[GROUPS])


@rowwise
def _look(q: Any, keys: Any, values: Any, scale: Any, scores: Any, out: Any) -> None:
    """out = softmax(q keys^T) values; scale: with log2 e."""
    for j in range(len(keys)):
        scores[j] = dot(q, keys[j]) * scale
    share = ONE / powers(scores, highest(scores))
    out[:] = ZERO
    for j in range(len(keys)):
        p = scores[j] * share
        for c in range(len(out)):
            out[c] += p * values[j, c]


@rowwise
def _turn(row: Any, cos: Any, sin: Any, interleaved: bool) -> None:
    """`ops.rope` of one vector."""
    half = len(cos)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = row[first], row[second]
        row[first], row[second] = a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]


@rowwise
def _add(at: int, parts: Any, own: Any, norms: Any, numbers: Any, x: Any, h: Any) -> None:
    """x += norm(branch), and h = norm'(x), of the next branch; a piece is a text."""
    b = count(at)
    while b < len(x):
        _sum(parts, own, len(x), b, 0, h[b])
        _norm(h[b], norms[0], numbers[0], h[b])
        for i in range(x.shape[1]):
            x[b, i] += h[b, i]
        _norm(x[b], norms[1], numbers[1], h[b])
        count(at + WORD)
        b = count(at)
    _wait(at, len(x))


@rowwise
def _norm(x: Any, own: Any, numbers: Any, y: Any) -> None:
    """x itself where there is no norm; y may be x."""
    n = len(x)
    if own[GAIN] == 0:
        y[:] = x
        return
    gain, mean, square = floats(own[GAIN], (n,)), 0.0, 0.0  # sums in float64, of all their own
    if not own[RMS]:
        for i in range(n):
            mean += np.float64(x[i])
        mean /= n
    for i in range(n):
        y[i] = x[i] - mean
        square += np.float64(y[i]) ** 2
    factor = np.float32(1.0 / np.sqrt(square / n + numbers[EPS]))
    for i in range(n):
        y[i] *= factor * (gain[i] + numbers[OFFSET])
    if own[SHIFT]:
        shift = floats(own[SHIFT], (n,))
        for i in range(n):
            y[i] += shift[i]


@rowwise
def _activate(at: int, maps: Any, activation: int, parts: Any, hidden: Any) -> None:
    """act(up), or act(gate) up; a piece is of each text some elements."""
    n_texts, n = hidden.shape
    n_pieces = -(-n // HIDDEN)
    gated, gate_parts = maps[GATE, PIECES] > 0, _size(maps[UP], n_texts)
    more = np.empty(HIDDEN, np.float32)
    piece = count(at)
    while piece < n_pieces:
        start, stop = piece * HIDDEN, min(n, (piece + 1) * HIDDEN)
        for b in range(n_texts):
            row, up = hidden[b, start:stop], more[: stop - start]
            if gated:
                _sum(parts, maps[UP], n_texts, b, start, up)
                _sum(parts[gate_parts:], maps[GATE], n_texts, b, start, row)
            else:
                _sum(parts, maps[UP], n_texts, b, start, row)
            if activation == SILU:
                _silu(row)
            elif activation == GELU:
                exact_form(row, row)
            elif activation == GELU_TANH:
                tanh_form(row, row)
            else:
                for i in range(len(row)):
                    row[i] = max(row[i], ZERO)
            if gated:
                for i in range(len(row)):
                    row[i] *= up[i]
        count(at + WORD)
        piece = count(at)
    _wait(at, n_pieces)


@elementwise
def _silu(x: Any) -> None:
    for i in range(x.size):
        v = max(x[i], -FAR32)
        x[i] = v / (ONE + exp2(-LOG2_E * v))
