"""The loops of `share` over all layers: one call of a thread forward, and one back.

x, y: (B, T, D), all texts, of which a share has at most `size`. What the layers keep of it is one
array, of which starts (L, 9) says where each part begins, and where the last one ends.
"""

from __future__ import annotations

from typing import Any

from xformer.backends.numba import share_layer
from xformer.backends.numba.atomic import WORD, count, floats, wait
from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.layer import GATE, HEADS, N_IN, N_OUT, NORMS, OUT, QUERY, UP
from xformer.backends.numba.maps import DB, DW, MORE
from xformer.backends.numba.share_layer import DGAIN, DSHIFT

X, MAPPED, CTX, STATISTICS, MIDDLE, UPS, OPENED, HIDDEN = range(8)  # what a layer keeps
# Memory of a backward: what goes back through the layers, then as in `share_layer.backward`.
DX, DMIDDLE, H, DH, DHIDDEN, DUPS, DOPENED = range(7)


@rowwise
def forward(
    by: Any,
    share: int,
    size: int,
    tables: Any,
    options: Any,
    x: Any,
    kept: Any,
    starts: Any,
    y: Any,
    h: Any,
) -> None:
    """y = block_n(... block_1(x)).

    tables: as in `plan`. options: `tiles` (L, 4), turns (2, B or 1, T, R/2), whether they are
    interleaved, and pad (B, T) or (B, 0). h: (N, D), memory.
    """
    first, stop, last = share * size, min(share * size + size, len(x)), len(starts) - 1
    shape = (stop - first) * x.shape[1], x.shape[2]
    for i in range(len(starts)):
        own, its = _of_layer(tables, i), _of_share(options, i, first, stop)
        given, out = x[first:stop].reshape(shape), y[first:stop].reshape(shape)
        if i > 0:
            given = _part(kept, starts[i, X], shape)
        if i < last:
            out = _part(kept, starts[i + 1, X], shape)
        parts = _parts(own, its, kept, starts[i], shape)
        share_layer.forward(by, own, its, given, parts, out, h[: len(out)])


@rowwise
def backward(
    by: Any,
    size: int,
    tables: Any,
    options: Any,
    order: Any,
    x: Any,
    kept: Any,
    starts: Any,
    dy: Any,
    grads: int,
    dmaps: Any,
    dnorms: Any,
    totals: Any,
    dx: Any,
    mine: Any,
    memory: Any,
    rooms: Any,
    stages: Any,
) -> int:
    """dx of dy, and the gradients of blocks, of the first share that no other thread has taken.

    Returns which share that is.
    order: (L,), the block of each layer. kept: of each share. grads: where gradients are. dmaps
    (blocks, 7, 4) and dnorms (blocks, 4, 2): as in `share_layer.backward`, but how far from there,
    -1 where there is none; totals (blocks, 2): how far a block's gradients are, and how many
    numbers. The rest as in `forward`, but turns go back. The first share writes to `grads`;
    each other one to `mine`, and adds it when those before it are in. memory: of which rooms (7,)
    says what begins where. stages: (blocks + 1, 2) zeros, how many shares are in a block's.
    """
    at = stages.ctypes.data
    share, last = count(at + 2 * WORD * len(dmaps)), len(starts) - 1
    first, stop = share * size, min(share * size + size, len(x))
    shape = (stop - first) * x.shape[1], x.shape[2]
    slope = dy[first:stop].reshape(shape)
    for i in range(last, -1, -1):
        block, own, its = order[i], _of_layer(tables, i), _of_share(options, i, first, stop)
        given, out = x[first:stop].reshape(shape), dx[first:stop].reshape(shape)
        if i > 0:
            given = _part(kept[share], starts[i, X], shape)
            out = _part(memory, rooms[DX], shape)
        parts = _parts(own, its, kept[share], starts[i], shape)
        start = grads if share == 0 else mine.ctypes.data - totals[block, 0]
        more = i < last and order[i + 1] == block
        places = _places(dmaps[block], dnorms[block], start, more)
        rest = _memory(memory, rooms, parts, shape)
        share_layer.backward(by, own, its, given, parts, slope, places[0], places[1], out, rest)
        slope = out
        if i == 0 or order[i - 1] != block:
            total = floats(grads + totals[block, 0], (totals[block, 1],))
            _hand_on(share, mine, total, at + 2 * WORD * block)
    return share


@rowwise
def _of_layer(tables: Any, i: int) -> Any:
    """The tables of one layer."""
    maps, norms, sizes, numbers, scales = tables
    low, high = NORMS * i, NORMS * i + NORMS
    return maps[i], norms[low:high], sizes[i], numbers[low:high], scales[i]


@rowwise
def _of_share(options: Any, i: int, first: int, stop: int) -> Any:
    """Those of one layer, of some texts."""
    tiles, turns, interleaved, pad = options
    return tiles[i], turns, interleaved, pad[first:stop], first


@rowwise
def _part(kept: Any, start: int, shape: Any) -> Any:
    return kept[start : start + shape[0] * shape[1]].reshape(shape)


@rowwise
def _parts(own: Any, its: Any, kept: Any, starts: Any, shape: Any) -> Any:
    """What a layer keeps, as `share_layer.forward` has it."""
    maps, size, n, n_texts = own[0], own[2], shape[0], len(its[3])
    wide, narrow = maps[UP, N_OUT], maps[GATE, N_OUT]
    mapped = n * maps[QUERY:OUT, N_OUT].sum()
    heads = size[HEADS], n // n_texts
    statistics = _part(kept, starts[STATISTICS], (2 * n_texts, heads[0] * heads[1]))
    return (
        kept[starts[MAPPED] : starts[MAPPED] + mapped],
        _part(kept, starts[CTX], (n, maps[OUT, N_IN])),
        statistics.reshape(2, n_texts, heads[0], heads[1]),
        _part(kept, starts[MIDDLE], shape),
        _part(kept, starts[UPS], (n, wide)),
        _part(kept, starts[OPENED], (n if narrow else 0, wide)),
        _part(kept, starts[HIDDEN], (n, wide)),
    )


@rowwise
def _memory(memory: Any, rooms: Any, parts: Any, shape: Any) -> Any:
    """That of `share_layer.backward`."""
    mapped, ctx, _, _, ups, opened, hidden = parts
    return (
        _part(memory, rooms[DMIDDLE], shape),
        _part(memory, rooms[H], shape),
        _part(memory, rooms[DH], shape),
        _part(memory, rooms[DHIDDEN], hidden.shape),
        _part(memory, rooms[DUPS], ups.shape),
        _part(memory, rooms[DOPENED], opened.shape),
        _part(memory, rooms[DHIDDEN], ctx.shape),
        memory[rooms[DUPS] : rooms[DUPS] + mapped.size],
    )


@rowwise
def _places(dmaps: Any, dnorms: Any, start: int, more: bool) -> Any:
    """Of gradients so far from the start, which are added to or not; 0 where there is none."""
    maps, norms = dmaps.copy(), dnorms.copy()
    for m in range(len(maps)):
        for column in (DW, DB):
            maps[m, column] = start + maps[m, column] if maps[m, column] >= 0 else 0
        maps[m, MORE] = more
    for k in range(len(norms)):
        for column in (DGAIN, DSHIFT):
            norms[k, column] = start + norms[k, column] if norms[k, column] >= 0 else 0
    return maps, norms


@rowwise
def _hand_on(share: int, mine: Any, total: Any, stage: int) -> None:
    """A share's gradients of a block, in turn."""
    if share > 0:
        wait(stage, share)
        for j in range(len(total)):
            total[j] += mine[j]
    count(stage + WORD)
