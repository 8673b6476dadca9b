"""The loops of `language_model_loss`: a share's tokens to losses in one call, and back in one.

Of a share first come its vectors, at last their gradients are added to those of the embedding.
"""

from __future__ import annotations

from typing import Any

from xformer.backends.numba import share_layer, share_loops
from xformer.backends.numba.atomic import WORD, count, wait
from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.linear_cross_entropy import some_rows


@rowwise
def forward(
    by: Any,
    share: int,
    size: int,
    tables: Any,
    options: Any,
    embedding: Any,
    kept: Any,
    starts: Any,
    top: Any,
    targets: Any,
    y: Any,
    losses: Any,
    dy: Any,
    places: Any,
    memory: Any,
) -> None:
    """losses (B T), and the gradient dy (B, T, D) of what the last layer gives, y (B, T, D).

    embedding: ids (B, T), table (V, D), positions (T, D) or (0, D), and x (B, T, D), where vectors
    go. top: rows of the final norm, of its numbers and of the head, as in `plan`, and the numbers
    of the loss. places: where gradients of that norm and of the head go. memory: h, dh (N, D) and
    logits (some, V). The rest as in `share_loops`.
    """
    ids, table, positions, x = embedding
    norm, numbers, head, how = top
    dnorm, dhead = places
    h, dh, logits = memory
    first, stop, length = share * size, min(share * size + size, len(ids)), ids.shape[1]
    for b in range(first, stop):
        for t in range(length):
            _sum(table[ids[b, t]], positions, t, x[b, t])
    share_loops.forward(by, share, size, tables, options, x, kept, starts, y, h)
    shape = (stop - first) * length, x.shape[2]
    out, slopes = y[first:stop].reshape(shape), dy[first:stop].reshape(shape)
    h, dh, own = h[: shape[0]], dh[: shape[0]], slice(first * length, stop * length)
    known = share_layer.norm(out, norm, numbers, h)
    some_rows(by, head, how, True, h, targets[own], losses[own], dh, dhead, logits)
    share_layer.norm_backward(out, norm, numbers, known, dnorm, False, dh, slopes)


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
    ids: Any,
    dtable: Any,
    dpositions: Any,
    mine: Any,
    memory: Any,
    rooms: Any,
    stages: Any,
) -> None:
    """As `share_loops.backward`; then dx is added, share after share, to dtable and dpositions.

    ids (B, T), dtable (V, D), dpositions (T, D) or (0, D).
    """
    layers = tables, options, order, x, kept, starts, dy, grads, dmaps, dnorms, totals, dx
    share = share_loops.backward(by, size, *layers, mine, memory, rooms, stages)
    stage = stages.ctypes.data + 2 * WORD * len(dmaps)
    wait(stage, share)
    for b in range(share * size, min(share * size + size, len(ids))):
        for t in range(ids.shape[1]):
            _add(dx[b, t], dtable[ids[b, t]])
            if len(dpositions):
                _add(dx[b, t], dpositions[t])
    count(stage + WORD)


@rowwise
def _sum(row: Any, positions: Any, t: int, x: Any) -> None:
    """x = row, and the position's vector where there are such."""
    if len(positions):
        position = positions[t]
        for j in range(x.size):
            x[j] = row[j] + position[j]
    else:
        x[:] = row


@rowwise
def _add(x: Any, y: Any) -> None:
    for j in range(x.size):
        y[j] += x[j]
