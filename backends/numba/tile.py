"""Matmuls on cores with vectors of 8 or 16 float32 numbers, near the peak speed of the core.

A tile of HIGH rows and COLUMNS columns of y stays in registers. Both factors are copied to panels,
in which a tile reads its numbers one after the other (Goto and van de Geijn 2008, "Anatomy of
high-performance matrix multiplication"). On other machines `gemm` calls BLAS.

In this module an address and a step (the distance of two rows or columns) are in bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from xformer.backends.numba.atomic import floats
from xformer.backends.numba.flash_rows import ZERO
from xformer.backends.numba.jit import callable_from_c, rowwise
from xformer.backends.numba.registers import (
    COLUMNS,
    HIGH,
    LANES,
    ROWS,
    STEP,
    VECTORS,
    copy_vector,
    high_by_columns,
    high_by_rows,
    low_by_columns,
    low_by_rows,
    middle_by_columns,
    middle_by_rows,
    transpose_vectors,
)
from xformer.backends.numba.tuning import DEPTH, FEW_COLUMNS, FEW_ROWS, GROUP, NEAR, SLOT
from xformer.backends.numpy.threads import LINE

WIDE = 1024  # columns of w whose panels are kept at once
STRIDE = SLOT or HIGH  # numbers between the columns of an x panel that is copied column by column
# x has few rows if it has at most MOST rows, and at most NUMBERS numbers in a range of depth: then
# its panels stay in cache while panels of w are read one after the other.
MOST, NUMBERS = 384, 192 * DEPTH
PANEL, EDGE = max(HIGH * STEP, DEPTH * STRIDE), HIGH * COLUMNS  # numbers of an x panel, of a tile
PANELS = MOST // HIGH + 1  # panels of x: the last rows may take two tiles
SIZE = 16 + PANELS * PANEL + EDGE + DEPTH * (WIDE + COLUMNS)  # float32 numbers of scratch
LINES = max(1, 4 * COLUMNS // LINE)  # cache lines of a row of a w panel
TILES = 8 * COLUMNS // LINE  # tiles that prefetch a column-major panel: a line for two of its rows

MULTIPLY = types.void(types.int64, types.float32, *(types.int64,) * 12)


def multiply(
    scratch: int,
    scale: Any,
    x: int,
    x_row_step: int,
    x_column_step: int,
    w: int,
    w_row_step: int,
    w_column_step: int,
    keep: int,
    y: int,
    y_row_step: int,
    n: int,
    m: int,
    depth: int,
) -> None:
    """Compute y = scale x w, or y += scale x w if `keep`. x (N, K), w (K, M), y (N, M), K = depth.

    x, w, y: addresses. One of the two steps of x must be 4, and one of w; rows of y are contiguous.
    scratch: the address of SIZE float32 numbers.
    """
    if depth == 0 and not keep:
        for i in range(n):
            floats(y + i * y_row_step, (m,))[:] = ZERO
    x_panels = (scratch + 63) // 64 * 64
    edge = x_panels + 4 * PANELS * PANEL
    w_panels, by_rows, w_by_rows = edge + 4 * EDGE, x_column_step == 4, w_column_step == 4
    length = _even(depth, DEPTH)
    # Few rows: each panel of w meets all rows of x, and the first tiles prefetch the next panel.
    # Else the rows of each tile meet all panels of w.
    few = n <= MOST and n * length <= NUMBERS
    block_rows = MOST if few else HIGH
    for left in range(0, m, WIDE):
        right = min(m, left + WIDE)
        for p in range(0, depth, length):
            k, adds = min(length, depth - p), keep != 0 or p > 0
            w_near = w_by_rows and (k * w_row_step <= NEAR or n <= FEW_ROWS)
            x_near = k * x_column_step <= NEAR or m <= FEW_COLUMNS
            group = GROUP * COLUMNS if w_by_rows and not w_near else COLUMNS
            w_block = w + p * w_row_step + left * w_column_step
            for top in range(0, n, block_rows):
                for j in range(left, right, COLUMNS):
                    columns, y_column = min(COLUMNS, right - j), y + 4 * j
                    source = w_block + (j - left) * w_column_step
                    # With few rows a group of panels is used up before the next one is copied.
                    begin = (j - left) % group if few else j - left
                    w_panel, w_step = w_panels + 4 * begin * k, 4 * COLUMNS
                    if w_near and columns == COLUMNS:
                        w_panel, w_step = source, w_row_step
                    elif top == 0 and (j - left) % group == 0:
                        w_source = source, w_row_step, w_column_step
                        _pack_columns(w_source, k, min(group, right - j), w_panel)
                    next_panel = w_block + k * w_row_step
                    if j + COLUMNS < right:
                        next_panel = source + 4 * COLUMNS
                    i, panel, row_tile = top, x_panels, 0
                    while i < min(n, top + block_rows):
                        rows = _next_rows(n - i)
                        x_tile = x + i * x_row_step + p * x_column_step
                        tile_rows = x_tile, x_row_step, x_column_step, n - i, rows, k, x_near, panel
                        x_panel, x_step = _x_panel(tile_rows, j == left)
                        fetch, fetch_step, column_tile = x_panel, 0, (j - left) // COLUMNS
                        n_fetching = TILES if few else 0  # tiles that prefetch the next w panel
                        fetches_x = column_tile < (1 if few else 2) and n - i > rows
                        if row_tile >= n_fetching and fetches_x:
                            fetch, fetch_step = _fetch_of_x(tile_rows, column_tile)
                        elif few and w_near:
                            fetch = _fetch_of_w_rows(next_panel, w_step, k, row_tile)
                            fetch_step = w_step
                        elif few and not w_by_rows and row_tile < TILES:
                            w_columns = w_block, w_row_step, w_column_step, j - left, right - left
                            fetch, fetch_step = _fetch_of_w_columns(w_columns, k, row_tile)
                        factors = k, x_panel, x_step, w_panel, w_step, fetch, fetch_step
                        y_tile = y_column + i * y_row_step
                        if columns == COLUMNS and rows in ROWS:
                            _add_tile(by_rows, rows, factors, y_tile, y_row_step, scale, adds)
                        else:
                            _add_tile(by_rows, rows, factors, edge, 4 * COLUMNS, scale, False)
                            _copy_edge(edge, rows, columns, adds, y_tile, y_row_step)
                        i += rows
                        panel += 4 * PANEL
                        row_tile += 1


@rowwise
def _x_panel(tile_rows: Any, copies: bool) -> tuple[int, int]:
    """Return where a tile reads its rows of x: the address, and the step between columns.

    tile_rows: address of the rows, row step, column step, number of rows from here to the last one,
        rows of the tile, k, whether x is near (`tuning.NEAR`), address of the panel.
    copies: copy the rows to the panel, unless they are read in place.
    """
    x, row_step, column_step, remaining, rows, k, near, panel = tile_rows
    if column_step == 4:
        if copies:
            _pack_rows(x, row_step, rows, k, panel)
        return panel, 4
    if near and rows in ROWS:
        return x, column_step
    if copies:
        _pack_rows_of_columns(x, column_step, remaining, rows, k, panel)
    return panel, 4 * STRIDE


@rowwise
def _fetch_of_w_rows(panel: int, step: int, k: int, row_tile: int) -> int:
    """Return the first cache line of the next panel of w that a tile prefetches.

    panel, step: of the panel, which is read in place. row_tile: number of the tile. A tile
    prefetches one line of each row in one half of the panel.
    """
    return panel + row_tile // LINES % 2 * (k // 2) * step + row_tile % LINES * LINE


@rowwise
def _fetch_of_w_columns(w: Any, k: int, row_tile: int) -> tuple[int, int]:
    """Return the first cache line of a column-major w that a tile prefetches, and the step.

    w: address, row step, column step, index of the current column, number of columns.
    If columns have no gaps between them, the lines are a part of the next panel. Else the tiles of
    several panels prefetch the next k / 2 columns, a tile one line of each. All lines of these
    columns are prefetched if k is a multiple of 2 COLUMNS.
    """
    address, row_step, column_step, j, m = w
    if column_step == 4 * k:
        return address + (j + COLUMNS) * column_step + row_tile * (k // 2) * LINE, LINE
    panels = max(1, k // 2 // COLUMNS)
    panel, column = j // COLUMNS % panels, (j // COLUMNS // panels + 1) * panels * COLUMNS
    start = address + column * column_step if column < m else address + k * row_step
    return start + (panel * TILES + row_tile) * LINE, column_step


@rowwise
def _fetch_of_x(tile_rows: Any, column_tile: int) -> tuple[int, int]:
    """Return the first cache line of the next tile's rows of x to prefetch, and the step.

    tile_rows: as of `_x_panel`. column_tile: number of the tile among those with the same rows.
    A tile prefetches one line for two of its k steps:

    - column-major x: the line with the last number of each column; the first half of the columns
      for column_tile 0, the second half for 1. Lines with the first numbers may be cached already.
    - rows without gaps between them: the next lines, as many as there are steps for.
    - other rows: nothing new (step 0).
    """
    x, row_step, column_step, _, rows, k, _, _ = tile_rows
    if column_step != 4:
        last = x + (2 * rows - 1) * row_step
        return last + column_tile * (k // 2) * column_step, column_step
    if row_step != 4 * k:
        return x, 0
    return x + rows * row_step + column_tile * (k // 2) * LINE, LINE


@rowwise
def _even(n: int, most: int) -> int:
    """Return the length of equal parts of n, as few as possible, each at most `most`."""
    parts = max(1, -(-n // most))
    return max(1, -(-n // parts))


@rowwise
def _next_rows(n: int) -> int:
    """Return the rows of the next tile if n rows remain: the largest of ROWS that fits, else n."""
    for rows in ROWS:
        if n >= rows:
            return rows
    return n


@rowwise
def _add_tile(
    by_rows: bool, rows: int, factors: Any, y: int, step: int, scale: Any, keep: bool
) -> None:
    """Compute a tile of y by the function of `registers` for its number of rows.

    Tiles of other heights than ROWS compute the least of ROWS. factors: k, address and step of the
    panel of x and of the panel of w, address and step of the lines to prefetch.
    """
    k, x, x_step, w, w_step, fetch, fetch_step = factors
    args = k, x, x_step, w, w_step, y, step, scale, np.int64(keep), fetch, fetch_step
    if rows == ROWS[0]:
        if by_rows:
            high_by_rows(*args)
        else:
            high_by_columns(*args)
    elif rows == ROWS[1]:
        if by_rows:
            middle_by_rows(*args)
        else:
            middle_by_columns(*args)
    elif by_rows:
        low_by_rows(*args)
    else:
        low_by_columns(*args)


@rowwise
def _copy_edge(edge: int, rows: int, columns: int, keep: bool, y: int, y_row_step: int) -> None:
    """Copy the part of a tile that is within y, from `edge`; add it to y if `keep`."""
    tile = floats(edge, (HIGH, COLUMNS))
    for i in range(rows):
        y_row = floats(y + i * y_row_step, (columns,))
        for j in range(columns):
            y_row[j] = tile[i, j] + y_row[j] if keep else tile[i, j]


@rowwise
def _pack_rows(x: int, row_step: int, rows: int, k: int, panel: int) -> None:
    """Copy contiguous rows of x to a panel, where rows begin every STEP numbers."""
    whole = k // LANES * LANES
    for i in range(rows):
        source, target = x + i * row_step, panel + 4 * i * STEP
        for p in range(0, whole, LANES):
            copy_vector(source + 4 * p, target + 4 * p)
        _copy(source + 4 * whole, 4, target + 4 * whole, 4, k - whole)


@rowwise
def _pack_rows_of_columns(
    x: int, column_step: int, remaining: int, rows: int, k: int, panel: int
) -> None:
    """Copy rows of a column-major x to a panel, where columns begin every STRIDE numbers.

    remaining: numbers from the first of these rows to the end of a column.
    """
    for p in range(k):
        if remaining >= LANES:
            copy_vector(x + p * column_step, panel + 4 * p * STRIDE)
        else:
            _copy(x + p * column_step, 4, panel + 4 * p * STRIDE, 4, rows)


@rowwise
def _pack_columns(w: Any, k: int, m: int, panel: int) -> None:
    """Copy m columns of w (k rows) to panels of COLUMNS columns, whose rows have no gaps.

    w: address, row step, column step. A column-major w fills at most one panel. Missing columns of
    the last panel are set to 0: old numbers there do not change y, but could be slow to multiply.
    """
    address, row_step, column_step = w
    whole = m // COLUMNS
    if column_step != 4 and whole:
        _pack_transposed(address, column_step, k, panel)
        return
    for p in range(k):
        source, target = address + p * row_step, panel + 4 * p * COLUMNS
        for _ in range(whole):
            for v in range(VECTORS):
                copy_vector(source + 4 * v * LANES, target + 4 * v * LANES)
            source += 4 * COLUMNS
            target += 4 * COLUMNS * k
        if m > whole * COLUMNS:
            floats(target, (COLUMNS,))[:] = ZERO
            _copy(source, column_step, target, 4, m - whole * COLUMNS)


@rowwise
def _pack_transposed(w: int, column_step: int, k: int, panel: int) -> None:
    """Copy COLUMNS contiguous columns of w to a panel with contiguous rows."""
    whole = k // LANES * LANES
    for v in range(VECTORS):
        source = w + v * LANES * column_step
        for p in range(0, whole, LANES):
            target = panel + 4 * (p * COLUMNS + v * LANES)
            transpose_vectors(source + 4 * p, column_step, target, 4 * COLUMNS)
    for p in range(whole, k):
        _copy(w + 4 * p, column_step, panel + 4 * p * COLUMNS, 4, COLUMNS)


@rowwise
def _copy(source: int, step: int, target: int, target_step: int, n: int) -> None:
    """Copy n numbers, which are `step` bytes apart, to `target`, `target_step` bytes apart."""
    for i in range(n):
        floats(target + i * target_step, (1,))[0] = floats(source + i * step, (1,))[0]


@functools.cache
def compiled() -> int:
    """Return the address of `multiply` as a C function. Its first compilation takes seconds."""
    return callable_from_c(multiply, MULTIPLY)
