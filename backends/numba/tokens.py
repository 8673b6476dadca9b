"""The loops of `blocks`: some tokens through all layers, on all threads at once.

In stages and pieces, as in `token`, and with its tables; but a piece of a product is one by `gemm`,
and there are as many pieces as threads: columns of all tokens, or of many tokens some, which go
from one attention to the next in one stage. x, h: (N, D), the N = B T tokens of all texts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from xformer.backends.numba.atomic import WORD, count, floats, wait
from xformer.backends.numba.compiled import LOG2_E, rowwise
from xformer.backends.numba.flash import attend
from xformer.backends.numba.layer import (
    ACTIVATION,
    ATTN_OUT,
    DOWN,
    FFN_OUT,
    GAIN,
    GATE,
    GROUPS,
    HEADS,
    KEYS,
    KEYS_HEAD,
    KEYS_TEXT,
    N_IN,
    N_OUT,
    NORMS,
    OUT,
    QUERY,
    UP,
    VALUE,
    VALUE_WIDTH,
    VALUES,
    VALUES_HEAD,
    VALUES_TEXT,
    WIDTH,
    turn,
)
from xformer.backends.numba.pieces import add_rows, behind_attention, open_columns, product, project

LEFT, RIGHT, ROWS, COLUMNS = range(4)  # of a layer's attention: its window, and its tiles
STAGES = 7  # of a layer
NARROW, LINE = 64, 16  # columns of a piece of a product, at least; it begins with a line of memory
FEW = 16  # rows of a piece of a sum and its norms

attend_heads = rowwise(attend)


@rowwise
def all_layers(
    by: Any,
    n_threads: int,
    by_rows: bool,
    maps: Any,
    norms: Any,
    sizes: Any,
    numbers: Any,
    scales: Any,
    tiles: Any,
    turns: Any,
    interleaved: bool,
    pad: Any,
    past: Any,
    x: Any,
    h: Any,
    mapped: Any,
    ctx: Any,
    hidden: Any,
    opened: Any,
    statistics: Any,
    stages: Any,
) -> None:
    """x = block_n(... block_1(x)).

    by_rows: pieces are rows. h: x itself with post-LN, else memory. tiles: (L, 4). turns: (2, B or
    1, T, R/2), cosines and sines. pad: (B, T) or (B, 0), as in `flash`. past: (L, 6), where keys
    and values are to be kept, or (L, 0). mapped (N (H K + G K + G M)), ctx (N H M), hidden (N F),
    opened (N F) of gated layers, statistics (2 N H): memory. stages: (7 L + 1, 2) zeros.
    """
    n_tokens, n_texts = len(x), len(pad)
    at = np.int64(stages.ctypes.data)
    if by_rows:
        _begin(by, n_threads, at, norms, numbers, maps[0], x, h, mapped)
    else:
        _add(at, ctx[:0].reshape(0, x.shape[1]), norms, numbers, -1, x, h)
    for i in range(len(maps)):
        own, size = maps[i], sizes[i]
        at = np.int64(stages[STAGES * i + 1 :].ctypes.data)
        seen = ctx[: n_tokens * own[OUT, N_IN]].reshape(n_tokens, -1)
        inner = hidden[: n_tokens * own[UP, N_OUT]].reshape(n_tokens, -1)
        ups = opened[: n_tokens * own[GATE, N_OUT]].reshape(n_tokens, -1)
        options = tiles[i], scales[i], turns, interleaved, pad, past[i]
        if by_rows:
            _attend(by, at, n_texts, own, size, options, mapped, seen, statistics)
            at += 2 * WORD
            memory = seen, inner, ups, mapped
            _go_on(by, n_threads, at, i, maps, norms, size[ACTIVATION], numbers, x, h, memory)
            continue
        attn_out, ffn_out = NORMS * i + ATTN_OUT, NORMS * i + FFN_OUT
        _multiply(by, n_threads, at, h, own[QUERY : VALUE + 1], False, mapped)
        at += 2 * WORD
        _attend(by, at, n_texts, own, size, options, mapped, seen, statistics)
        at += 2 * WORD
        branch = _close(by, n_threads, at, seen, own[OUT : OUT + 1], norms[attn_out], mapped, x)
        at += 2 * WORD
        _add(at, branch, norms, numbers, attn_out, x, h)
        at += 2 * WORD
        _open(by, n_threads, at, h, own, size[ACTIVATION], inner, ups)
        at += 2 * WORD
        branch = _close(by, n_threads, at, inner, own[DOWN : DOWN + 1], norms[ffn_out], mapped, x)
        at += 2 * WORD
        _add(at, branch, norms, numbers, ffn_out, x, h)


@rowwise
def _pieces(own: Any, n_threads: int) -> int:
    """Of a map's columns."""
    return max(1, min(n_threads, own[N_OUT] // NARROW))


@rowwise
def _columns(own: Any, n_pieces: int, piece: int) -> Any:
    """From which to which."""
    n_out = own[N_OUT]
    start, stop = piece * n_out // n_pieces, (piece + 1) * n_out // n_pieces
    return start // LINE * LINE, n_out if piece == n_pieces - 1 else stop // LINE * LINE


@rowwise
def _multiply(by: Any, n_threads: int, at: int, x: Any, maps: Any, keep: bool, out: Any) -> None:
    """x w + b of some maps, one's behind the other's; or += that with keep."""
    n_pieces = 0
    for m in range(len(maps)):
        n_pieces += _pieces(maps[m], n_threads)
    piece = count(at)
    while piece < n_pieces:
        before, m = 0, 0
        while piece >= _pieces(maps[m], n_threads):
            piece -= _pieces(maps[m], n_threads)
            before += len(x) * maps[m, N_OUT]
            m += 1
        own = maps[m]
        y = out[before : before + len(x) * own[N_OUT]].reshape(len(x), own[N_OUT])
        start, stop = _columns(own, _pieces(own, n_threads), piece)
        product(by, x, own, start, stop, keep, y)
        count(at + WORD)
        piece = count(at)
    wait(at, n_pieces)


@rowwise
def _close(
    by: Any, n_threads: int, at: int, inner: Any, maps: Any, norm: Any, mapped: Any, x: Any
) -> Any:
    """The branch, inner w + b, where a norm of it is to come; else it is added to x: no rows."""
    if norm[GAIN]:
        _multiply(by, n_threads, at, inner, maps, False, mapped)
        return mapped[: x.size].reshape(x.shape)
    _multiply(by, n_threads, at, inner, maps, True, x.reshape(x.size))
    return mapped[:0].reshape(0, x.shape[1])


@rowwise
def _attend(
    by: Any,
    at: int,
    n_texts: int,
    maps: Any,
    size: Any,
    options: Any,
    mapped: Any,
    ctx: Any,
    statistics: Any,
) -> None:
    """A piece is a head of keys and values of a text, and all queries that share it."""
    tile, scale, turns, interleaved, pad, past = options
    n_heads, n_groups, width, value_width = (
        size[HEADS],
        size[GROUPS],
        size[WIDTH],
        size[VALUE_WIDTH],
    )
    n_tokens, shared = len(ctx) // n_texts, n_heads // n_groups
    k_at = len(ctx) * n_heads * width
    v_at = k_at + len(ctx) * n_groups * width
    end = v_at + len(ctx) * n_groups * value_width
    q = mapped[:k_at].reshape(n_texts, n_tokens, n_heads, width)
    k = mapped[k_at:v_at].reshape(n_texts, n_tokens, n_groups, width)
    v = mapped[v_at:end].reshape(n_texts, n_tokens, n_groups, value_width)
    out = ctx.reshape(n_texts, n_tokens, n_heads, value_width)
    known = statistics[: 2 * len(ctx) * n_heads].reshape(2, n_texts, n_heads, n_tokens)
    group = count(at)
    while group < n_texts * n_groups:
        b, g = group // n_groups, group % n_groups
        for t in range(n_tokens if turns.shape[3] else 0):
            cos, sin = turns[0, b % turns.shape[1], t], turns[1, b % turns.shape[1], t]
            turn(k[b, t, g], cos, sin, interleaved)
            for i in range(g * shared, (g + 1) * shared):
                turn(q[b, t, i], cos, sin, interleaved)
        if len(past):
            _keep(k[b, :, g], past[KEYS] + 4 * (b * past[KEYS_TEXT] + g * past[KEYS_HEAD]))
            _keep(v[b, :, g], past[VALUES] + 4 * (b * past[VALUES_TEXT] + g * past[VALUES_HEAD]))
        sizes = tile[ROWS], tile[COLUMNS]
        window = tile[LEFT], tile[RIGHT]
        given = q, k, v, pad, *window, scale * LOG2_E, sizes
        attend_heads(by, group, group + 1, *given, out, known[0], known[1])
        count(at + WORD)
        group = count(at)
    wait(at, n_texts * n_groups)


@rowwise
def _keep(x: Any, at: int) -> None:
    """Of all tokens, one behind the other."""
    out = floats(at, x.shape)
    for t in range(len(x)):
        out[t] = x[t]


@rowwise
def _open(
    by: Any, n_threads: int, at: int, x: Any, maps: Any, activation: int, hidden: Any, ups: Any
) -> None:
    """hidden = act(up), or act(gate) up; a piece is some columns."""
    own, n_pieces = maps[UP], _pieces(maps[UP], n_threads)
    piece = count(at)
    while piece < n_pieces:
        start, stop = _columns(own, n_pieces, piece)
        open_columns(by, x, maps, activation, start, stop, hidden, ups)
        count(at + WORD)
        piece = count(at)
    wait(at, n_pieces)


@rowwise
def _add(at: int, branch: Any, norms: Any, numbers: Any, own: int, x: Any, h: Any) -> None:
    """`add_rows`; a piece is some tokens."""
    n_pieces = -(-len(x) // FEW)
    piece = count(at)
    while piece < n_pieces:
        start, stop = piece * FEW, min(len(x), (piece + 1) * FEW)
        add_rows(branch[start:stop], norms, numbers, own, x[start:stop], h[start:stop])
        count(at + WORD)
        piece = count(at)
    wait(at, n_pieces)


@rowwise
def _begin(
    by: Any,
    n_threads: int,
    at: int,
    norms: Any,
    numbers: Any,
    maps: Any,
    x: Any,
    h: Any,
    mapped: Any,
) -> None:
    """What comes before the first attention; a piece is some tokens. maps: its layer's."""
    piece = count(at)
    while piece < n_threads:
        start, stop = piece * len(x) // n_threads, (piece + 1) * len(x) // n_threads
        add_rows(x[:0], norms, numbers, -1, x[start:stop], h[start:stop])
        project(by, h[start:stop], maps, start, mapped, len(x))
        count(at + WORD)
        piece = count(at)
    wait(at, n_threads)


@rowwise
def _go_on(
    by: Any,
    n_threads: int,
    at: int,
    i: int,
    maps: Any,
    norms: Any,
    activation: int,
    numbers: Any,
    x: Any,
    h: Any,
    memory: Any,
) -> None:
    """From one attention to the next; a piece is some tokens, whose numbers stay near a core."""
    seen, inner, ups, mapped = memory
    piece = count(at)
    while piece < n_threads:
        start, stop = piece * len(x) // n_threads, (piece + 1) * len(x) // n_threads
        its = seen[start:stop], x[start:stop], h[start:stop], inner[start:stop], ups[start:stop]
        behind_attention(by, i, maps, norms, activation, numbers, *its)
        if i + 1 < len(maps):
            project(by, h[start:stop], maps[i + 1], start, mapped, len(x))
        count(at + WORD)
        piece = count(at)
    wait(at, n_threads)
