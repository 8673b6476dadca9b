"""Products of matrices where a core has vectors of 8 or 16 numbers: as fast as it can multiply.

A tile of HIGH rows and COLUMNS stays in registers while panels of both factors go by, copied so
that a tile reads their numbers one after the other (Goto and van de Geijn 2008, "Anatomy of
high-performance matrix multiplication"). On other machines `gemm` has BLAS's product.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from xformer.backends.numba.atomic import floats
from xformer.backends.numba.compiled import callable_from_c, rowwise
from xformer.backends.numba.flash_rows import ZERO
from xformer.backends.numba.registers import (
    COLUMNS,
    HIGH,
    LANES,
    ROWS,
    STEP,
    VECTORS,
    high_by_columns,
    high_by_rows,
    low_by_columns,
    low_by_rows,
    middle_by_columns,
    middle_by_rows,
    move,
    turn,
)
from xformer.backends.numba.tuning import DEPTH, FEW_COLUMNS, FEW_ROWS, GROUP, NEAR, SLOT
from xformer.backends.numpy.threads import LINE

WIDE = 1024  # columns at once
STRIDE = SLOT or HIGH  # from row to row of a panel that is copied column by column
# Rows that go by a panel of w together: at most so many, of so many numbers, which stay near.
MOST, NUMBERS = 384, 192 * DEPTH
PANEL, EDGE = max(HIGH * STEP, DEPTH * STRIDE), HIGH * COLUMNS
PANELS = MOST // HIGH + 1  # of x: what is left of its rows may take two tiles
SIZE = 16 + PANELS * PANEL + EDGE + DEPTH * (WIDE + COLUMNS)  # of `memory`
LINES = max(1, 4 * COLUMNS // LINE)  # of a row of w's panels
TILES = 8 * COLUMNS // LINE  # that fetch a panel of w by columns, each a line for two of its rows

MULTIPLY = types.void(types.int64, types.float32, *(types.int64,) * 12)


def multiply(
    memory: int,
    scale: Any,
    x_at: int,
    x_down: int,
    x_across: int,
    w_at: int,
    w_down: int,
    w_across: int,
    keep: int,
    y_at: int,
    y_down: int,
    n: int,
    m: int,
    depth: int,
) -> None:
    """y = scale x w, or += that with keep: x (N, K), w (K, M), y (N, M); K = depth.

    Of each, where it is, and how many bytes there are from row to row, and from column to column,
    which are 4 in y, and either of the two in x and w. memory: where SIZE numbers are.
    """
    if depth == 0 and not keep:
        for i in range(n):
            floats(y_at + i * y_down, (m,))[:] = ZERO
    block = (memory + 63) // 64 * 64
    edge = block + 4 * PANELS * PANEL
    panels, by_rows, w_by_rows = edge + 4 * EDGE, x_across == 4, w_across == 4
    length = _even(depth, DEPTH)
    # Few rows go by a panel of w, and their first tiles fetch the next one; else all of w goes by a
    # tile's rows.
    few = n <= MOST and n * length <= NUMBERS
    high = MOST if few else HIGH
    for left in range(0, m, WIDE):
        right = min(m, left + WIDE)
        for p in range(0, depth, length):
            k, more = min(length, depth - p), keep != 0 or p > 0
            w_near = w_by_rows and (k * w_down <= NEAR or n <= FEW_ROWS)
            x_near = k * x_across <= NEAR or m <= FEW_COLUMNS
            group = GROUP * COLUMNS if w_by_rows and not w_near else COLUMNS
            w_part = w_at + p * w_down + left * w_across
            for top in range(0, n, high):
                for j in range(left, right, COLUMNS):
                    columns, y = min(COLUMNS, right - j), y_at + 4 * j
                    source = w_part + (j - left) * w_across
                    # Of few rows one group is done with before the next is copied.
                    begin = (j - left) % group if few else j - left
                    other, w_step = panels + 4 * begin * k, 4 * COLUMNS
                    if w_near and columns == COLUMNS:
                        other, w_step = source, w_down
                    elif top == 0 and (j - left) % group == 0:
                        own = source, w_down, w_across
                        _pack_columns(own, k, min(group, right - j), other)
                    soon = source + 4 * COLUMNS if j + COLUMNS < right else w_part + k * w_down
                    i, panel, number = top, block, 0
                    while i < min(n, top + high):
                        rows, at = _next(n - i), x_at + i * x_down + p * x_across
                        given = at, x_down, x_across, n - i, rows, k, x_near, panel
                        place, x_step = _placed(given, j == left)
                        ahead, step, time = place, 0, (j - left) // COLUMNS
                        first = TILES if few else 0  # those before fetch the next panel
                        if number >= first and time < (1 if few else 2) and n - i > rows:
                            ahead, step = _ahead_of_rows(given, time)
                        elif few and w_near:
                            ahead, step = _ahead(soon, w_step, k, number), w_step
                        elif few and not w_by_rows and number < TILES:
                            its = w_part, w_down, w_across, j - left, right - left
                            ahead, step = _ahead_of_columns(its, k, number)
                        factors = k, place, x_step, other, w_step, ahead, step
                        if columns == COLUMNS and rows in ROWS:
                            _add_tile(by_rows, rows, factors, y + i * y_down, y_down, scale, more)
                        else:
                            _add_tile(by_rows, rows, factors, edge, 4 * COLUMNS, scale, False)
                            _take(edge, rows, columns, more, y + i * y_down, y_down)
                        i += rows
                        panel += 4 * PANEL
                        number += 1


@rowwise
def _placed(x: Any, first: bool) -> tuple[int, int]:
    """Where a tile reads its rows of x, and bytes between columns; the first time they are copied.

    x: where they are, bytes from row to row and from column to column, how many are left and how
    many the tile has, k, whether they are near, and where to copy them.
    """
    at, down, across, there, rows, k, near, panel = x
    if across == 4:
        if first:
            _pack_rows(at, down, rows, k, panel)
        return panel, 4
    if near and rows in ROWS:
        return at, across
    if first:
        _pack_rows_of_columns(at, across, there, rows, k, panel)
    return panel, 4 * STRIDE


@rowwise
def _ahead(panel: int, step: int, k: int, number: int) -> int:
    """Which lines of memory the tile of this number fetches: one of each row in one half."""
    return panel + number // LINES % 2 * (k // 2) * step + number % LINES * LINE


@rowwise
def _ahead_of_columns(w: Any, k: int, number: int) -> tuple[int, int]:
    """Which lines of w by columns the tile of this number fetches, and bytes from one to the next.

    A part of the next panel, where columns lie behind each other. Else a line of each of the next
    k / 2 columns: of some panels, during as many, whose tiles share out the lines. All of them are
    fetched where k is a multiple of 2 COLUMNS.
    """
    at, down, across, j, m = w
    if across == 4 * k:
        return at + (j + COLUMNS) * across + number * (k // 2) * LINE, LINE
    panels = max(1, k // 2 // COLUMNS)
    own, others = j // COLUMNS % panels, (j // COLUMNS // panels + 1) * panels * COLUMNS
    start = at + others * across if others < m else at + k * down
    return start + (own * TILES + number) * LINE, across


@rowwise
def _ahead_of_rows(x: Any, time: int) -> tuple[int, int]:
    """Which lines of the next tile's rows to fetch, and bytes from one to the next.

    x: as in `_placed`. A line for two of a tile's steps: of columns half of them the first time,
    the others the second, and those with the last numbers, since the first ones may be in lines
    that are here. Of rows as many as they have or there are steps for; none where they are apart.
    """
    at, down, across, _, rows, k, _, _ = x
    if across != 4:
        return at + (2 * rows - 1) * down + time * (k // 2) * across, across
    if down != 4 * k:
        return at, 0
    return at + rows * down + time * (k // 2) * LINE, LINE


@rowwise
def _even(n: int, most: int) -> int:
    """The length of pieces of n, of at most `most`, as long as each other."""
    pieces = max(1, -(-n // most))
    return max(1, -(-n // pieces))


@rowwise
def _next(left: int) -> int:
    """The number of rows of the next tile: the largest of ROWS that fits into `left` rows."""
    for rows in ROWS:
        if left >= rows:
            return rows
    return left


@rowwise
def _add_tile(
    by_rows: bool, rows: int, factors: Any, y: int, step: int, scale: Any, keep: bool
) -> None:
    k, x, x_step, w, w_step, ahead, ahead_step = factors
    given = k, x, x_step, w, w_step, y, step, scale, np.int64(keep), ahead, ahead_step
    if rows == ROWS[0]:
        if by_rows:
            high_by_rows(*given)
        else:
            high_by_columns(*given)
    elif rows == ROWS[1]:
        if by_rows:
            middle_by_rows(*given)
        else:
            middle_by_columns(*given)
    elif by_rows:
        low_by_rows(*given)
    else:
        low_by_columns(*given)


@rowwise
def _take(edge: int, rows: int, columns: int, keep: bool, y: int, y_down: int) -> None:
    """What of a tile is within the product."""
    tile = floats(edge, (HIGH, COLUMNS))
    for i in range(rows):
        own = floats(y + i * y_down, (columns,))
        for j in range(columns):
            own[j] = tile[i, j] + own[j] if keep else tile[i, j]


@rowwise
def _pack_rows(x: int, down: int, rows: int, k: int, panel: int) -> None:
    """Of contiguous rows: one every STEP numbers."""
    whole = k // LANES * LANES
    for i in range(rows):
        source, own = x + i * down, panel + 4 * i * STEP
        for p in range(0, whole, LANES):
            move(source + 4 * p, own + 4 * p)
        _copy(source + 4 * whole, 4, own + 4 * whole, 4, k - whole)


@rowwise
def _pack_rows_of_columns(x: int, across: int, there: int, rows: int, k: int, panel: int) -> None:
    """Of contiguous columns, which have `there` numbers more: one every STRIDE numbers."""
    for p in range(k):
        if there >= LANES:
            move(x + p * across, panel + 4 * p * STRIDE)
        else:
            _copy(x + p * across, 4, panel + 4 * p * STRIDE, 4, rows)


@rowwise
def _pack_columns(w: Any, k: int, m: int, panel: int) -> None:
    """Panels of m columns, of which one's rows follow each other.

    Zeros for what the last one lacks: numbers of old, which nobody takes, could be slow. Of columns
    that are contiguous themselves at most one panel.
    """
    at, down, across = w
    whole = m // COLUMNS
    if across != 4 and whole:
        _pack_turned(at, across, k, panel)
        return
    for p in range(k):
        source, own = at + p * down, panel + 4 * p * COLUMNS
        for _ in range(whole):
            for v in range(VECTORS):
                move(source + 4 * v * LANES, own + 4 * v * LANES)
            source += 4 * COLUMNS
            own += 4 * COLUMNS * k
        if m > whole * COLUMNS:
            floats(own, (COLUMNS,))[:] = ZERO
            _copy(source, across, own, 4, m - whole * COLUMNS)


@rowwise
def _pack_turned(w: int, across: int, k: int, panel: int) -> None:
    """COLUMNS that are contiguous themselves."""
    whole = k // LANES * LANES
    for v in range(VECTORS):
        source = w + v * LANES * across
        for p in range(0, whole, LANES):
            turn(source + 4 * p, across, panel + 4 * (p * COLUMNS + v * LANES), 4 * COLUMNS)
    for p in range(whole, k):
        _copy(w + 4 * p, across, panel + 4 * p * COLUMNS, 4, COLUMNS)


@rowwise
def _copy(source: int, step: int, to: int, to_step: int, n: int) -> None:
    """n numbers, so many bytes apart."""
    for i in range(n):
        floats(to + i * to_step, (1,))[0] = floats(source + i * step, (1,))[0]


@functools.cache
def compiled() -> int:
    """Where `multiply` is as machine code, which takes some seconds once."""
    return callable_from_c(multiply, MULTIPLY)
