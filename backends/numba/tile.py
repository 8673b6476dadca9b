"""Products of matrices where a core has vectors of 8 or 16 numbers: as fast as it can multiply.

A tile of HIGH rows and COLUMNS stays in registers while panels of both factors go by, copied so
that a tile reads their numbers one after the other (Goto and van de Geijn 2008, "Anatomy of
high-performance matrix multiplication"). On other machines `gemm` has BLAS's product.
"""

from __future__ import annotations

import functools
import itertools
import platform
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic
from xformer.backends.numba.atomic import floats
from xformer.backends.numba.compiled import callable_from_c, rowwise
from xformer.backends.numba.flash_rows import ZERO


def _lanes() -> int:
    """Numbers of a vector that are multiplied and added in one instruction; 0 where unknown."""
    if platform.machine().lower() not in ("x86_64", "amd64") or numba.config.CPU_NAME:
        return 0
    features = llvmlite.binding.get_host_cpu_features()
    if numba.config.CPU_FEATURES is not None:
        features = {name[1:]: name[:1] == "+" for name in numba.config.CPU_FEATURES.split(",")}
    wide = 16 if features.get("avx512f") else 8 if features.get("avx2") else 0
    return wide if features.get("fma") else 0


KNOWN = _lanes() > 0
LANES = _lanes() or 4  # of code that is never run
HIGH = 12 if LANES == 16 else 6
ROWS = HIGH, HIGH // 3 * 2, HIGH // 3  # of a tile: as many as fit into registers, or what is left
VECTORS = 2
COLUMNS = VECTORS * LANES
DEPTH, WIDE = 384, 1024  # numbers of a row of a panel of a, at most; columns of b at once
STEP = DEPTH + 16  # from row to row of a panel of a; not so that all rows are in one set of a cache
SLOT = 16  # the same of one that is copied column by column
# What is not copied: where it lies in so many bytes, or is read for so few rows or columns only.
NEAR, FEW = 1 << 19, 192
EDGE = HIGH * COLUMNS
SIZE = 16 + max(HIGH * STEP, DEPTH * SLOT) + EDGE + DEPTH * (WIDE + COLUMNS)  # of `memory`

MULTIPLY = types.void(types.int64, types.float32, *(types.int64,) * 12)
REAL, WHOLE, PART = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(REAL, LANES)


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
    panel = (memory + 63) // 64 * 64
    edge = panel + 4 * max(HIGH * STEP, DEPTH * SLOT)
    panels, by_rows, w_by_rows = edge + 4 * EDGE, x_across == 4, w_across == 4
    length = _even(depth, DEPTH)
    for left in range(0, m, WIDE):
        right = min(m, left + WIDE)
        for p in range(0, depth, length):
            k, more = min(length, depth - p), keep != 0 or p > 0
            w_near = w_by_rows and (k * w_down <= NEAR or n <= FEW)
            x_near = k * x_across <= NEAR or m <= FEW
            w_part = w_at + p * w_down + left * w_across
            _pack_columns((w_part, w_down, w_across), k, right - left, w_near, panels)
            i = 0
            while i < n:
                rows = _next(n - i)
                place, x_step = x_at + i * x_down + p * x_across, x_across
                if by_rows:
                    _pack_rows(place, x_down, rows, k, panel)
                    place = panel
                elif not (x_near and rows in ROWS):
                    _pack_rows_of_columns(place, x_across, n - i, rows, k, panel)
                    place, x_step = panel, 4 * SLOT
                for j in range(left, right, COLUMNS):
                    columns, at = min(COLUMNS, right - j), y_at + i * y_down + 4 * j
                    other, w_step = panels + 4 * (j - left) * k, 4 * COLUMNS
                    if w_near and columns == COLUMNS:
                        other, w_step = w_part + 4 * (j - left), w_down
                    factors = k, place, x_step, other, w_step
                    if columns == COLUMNS and rows in ROWS:
                        _add_tile(by_rows, rows, factors, at, y_down, scale, more)
                    else:
                        _add_tile(by_rows, rows, factors, edge, 4 * COLUMNS, scale, False)
                        _take(edge, rows, columns, more, at, y_down)
                i += rows


@rowwise
def _even(n: int, most: int) -> int:
    """The length of pieces of n, of at most `most`, as long as each other."""
    pieces = max(1, -(-n // most))
    return max(1, -(-n // pieces))


@rowwise
def _next(left: int) -> int:
    """The rows of a tile."""
    for rows in ROWS:
        if left >= rows:
            return rows
    return left


@rowwise
def _add_tile(
    by_rows: bool, rows: int, factors: Any, y: int, step: int, scale: Any, keep: bool
) -> None:
    k, x, x_step, w, w_step = factors
    given = k, x, x_step, w, w_step, y, step, scale, np.int64(keep)
    if rows == ROWS[0]:
        if by_rows:
            _high_by_rows(*given)
        else:
            _high_by_columns(*given)
    elif rows == ROWS[1]:
        if by_rows:
            _middle_by_rows(*given)
        else:
            _middle_by_columns(*given)
    elif by_rows:
        _low_by_rows(*given)
    else:
        _low_by_columns(*given)


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
            _move(source + 4 * p, own + 4 * p)
        _copy(source + 4 * whole, 4, own + 4 * whole, 4, k - whole)


@rowwise
def _pack_rows_of_columns(x: int, across: int, there: int, rows: int, k: int, panel: int) -> None:
    """Of contiguous columns, which have `there` numbers more: one every SLOT numbers."""
    for p in range(k):
        if there >= LANES:
            _move(x + p * across, panel + 4 * p * SLOT)
        else:
            _copy(x + p * across, 4, panel + 4 * p * SLOT, 4, rows)


@rowwise
def _pack_columns(w: Any, k: int, m: int, near: bool, panels: int) -> None:
    """COLUMNS of each row behind those of the row before; what is near stays where it is."""
    at, down, across = w
    for j in range(0, m, COLUMNS):
        own, panel = at + j * across, panels + 4 * j * k
        if m - j < COLUMNS:
            for p in range(k):
                floats(panel + 4 * p * COLUMNS, (COLUMNS,))[:] = ZERO
                _copy(own + p * down, across, panel + 4 * p * COLUMNS, 4, m - j)
        elif across != 4:
            _pack_turned(own, across, k, panel)
        elif not near:
            for p in range(k):
                for v in range(VECTORS):
                    number = v * LANES
                    _move(own + p * down + 4 * number, panel + 4 * (p * COLUMNS + number))


@rowwise
def _pack_turned(w: int, across: int, k: int, panel: int) -> None:
    """COLUMNS that are contiguous themselves."""
    whole = k // LANES * LANES
    for v in range(VECTORS):
        source = w + v * LANES * across
        for p in range(0, whole, LANES):
            _turn(source + 4 * p, across, panel + 4 * (p * COLUMNS + v * LANES), 4 * COLUMNS)
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


# ---- What a compiler does not make of loops: vectors that stay in registers. Addresses in bytes.


def _at(builder: Any, address: Any) -> Any:
    """A pointer to a vector."""
    return builder.inttoptr(address, VECTOR.as_pointer())


def _further(builder: Any, address: Any, step: Any, times: int = 1) -> Any:
    return builder.add(address, builder.mul(step, ir.Constant(WHOLE, times)))


def _moved(typing: Any, source: Any, to: Any) -> Any:
    """LANES numbers."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x = builder.load(_at(builder, values[0]), align=4)
        builder.store(x, _at(builder, values[1]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


def _turned(typing: Any, source: Any, step: Any, to: Any, to_step: Any) -> Any:
    """LANES rows of as many numbers, transposed: blocks off the diagonal change places."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, step, to, to_step = values
        rows = [
            builder.load(_at(builder, _further(builder, source, step, i)), align=4)
            for i in range(LANES)
        ]
        half = 1
        while half < LANES:
            upper = [i if not i & half else i - half + LANES for i in range(LANES)]
            lower = [i + half if not i & half else i + LANES for i in range(LANES)]
            for i in (i for i in range(LANES) if not i & half):
                pair = rows[i], rows[i + half]
                rows[i], rows[i + half] = (_shuffled(builder, *pair, x) for x in (upper, lower))
            half *= 2
        for i, row in enumerate(rows):
            builder.store(row, _at(builder, _further(builder, to, to_step, i)), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), build


def _shuffled(builder: Any, x: Any, y: Any, places: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(PART, LANES), places)
    return builder.shuffle_vector(x, y, mask)


def _tile(n: int, by_rows: bool) -> Any:
    """y = scale x w, or += that: x (n, k), w (k, COLUMNS), y (n, COLUMNS).

    by_rows: rows of x are STEP numbers apart, and those of a row follow each other; else those of
    a column do, and columns are x_step bytes apart. w_step, step: from row to row of w and y.
    """

    def typed(
        typing: Any,
        k: Any,
        x: Any,
        x_step: Any,
        w: Any,
        w_step: Any,
        y: Any,
        step: Any,
        scale: Any,
        keep: Any,
    ) -> Any:
        return types.void(*(types.int64,) * 7, types.float32, types.int64), build

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        k, x, x_step, w, w_step, y, step, scale, keep = values
        if by_rows:
            x_step = ir.Constant(WHOLE, 4)
        places = [
            [
                builder.add(_further(builder, y, step, i), ir.Constant(WHOLE, 4 * v * LANES))
                for v in range(VECTORS)
            ]
            for i in range(n)
        ]
        for place in itertools.chain(*places):
            _fetch(builder, place)
        sums = _sums(builder, n, k, (x, x_step, STEP if by_rows else 1), (w, w_step))
        factor = _all(builder, scale)
        kept = builder.icmp_signed("!=", keep, ir.Constant(WHOLE, 0))
        for i in range(n):
            for v in range(VECTORS):
                sums[i][v] = builder.fmul(sums[i][v], factor)
        with builder.if_else(kept) as branches:
            for branch, adds in zip(branches, (True, False), strict=True):
                with branch:
                    for i in range(n):
                        for v in range(VECTORS):
                            at, own = _at(builder, places[i][v]), sums[i][v]
                            if adds:
                                own = builder.fadd(builder.load(at, align=4), own)
                            builder.store(own, at, align=4)
        return context.get_dummy_value()

    return intrinsic(typed)


def _sums(builder: Any, n: int, k: Any, factor: Any, other: Any) -> Any:
    """The loop over k, at least once; n x VECTORS vectors."""
    (x, x_step, apart), (w, w_step) = factor, other
    before = builder.block
    loop, done = map(builder.append_basic_block, ("loop", "done"))
    builder.branch(loop)
    builder.position_at_end(loop)
    p = builder.phi(WHOLE)
    p.add_incoming(ir.Constant(WHOLE, 0), before)
    sums = [[builder.phi(VECTOR) for _ in range(VECTORS)] for _ in range(n)]
    row = builder.add(w, builder.mul(p, w_step))
    ws = [
        builder.load(_at(builder, builder.add(row, ir.Constant(WHOLE, 4 * v * LANES))), align=4)
        for v in range(VECTORS)
    ]
    numbers = builder.inttoptr(builder.add(x, builder.mul(p, x_step)), REAL.as_pointer())
    fma = get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), f"llvm.fma.v{LANES}f32"
    )
    added = []
    for i in range(n):
        place = builder.gep(numbers, [ir.Constant(WHOLE, i * apart)])
        number = _all(builder, builder.load(place, align=4))
        added.append([builder.call(fma, [number, ws[v], sums[i][v]]) for v in range(VECTORS)])
    after = builder.add(p, ir.Constant(WHOLE, 1))
    p.add_incoming(after, loop)
    zero = ir.Constant(VECTOR, [0.0] * LANES)
    for i in range(n):
        for v in range(VECTORS):
            sums[i][v].add_incoming(zero, before)
            sums[i][v].add_incoming(added[i][v], loop)
    builder.cbranch(builder.icmp_signed("<", after, k), loop, done)
    builder.position_at_end(done)
    return added


def _all(builder: Any, number: Any) -> Any:
    """A vector of one number."""
    empty = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(PART, 0))
    return _shuffled(builder, first, empty, [0] * LANES)


def _fetch(builder: Any, address: Any) -> None:
    """Have it in the cache soon, to be written."""
    byte = ir.IntType(8).as_pointer()
    prefetch = get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [byte, PART, PART, PART]),
        "llvm.prefetch.p0i8",
    )
    builder.call(prefetch, [builder.inttoptr(address, byte), *(PART(i) for i in (1, 3, 1))])


_move: Any = intrinsic(_moved)
_turn: Any = intrinsic(_turned)
_high_by_rows, _middle_by_rows, _low_by_rows = (_tile(n, True) for n in ROWS)
_high_by_columns, _middle_by_columns, _low_by_columns = (_tile(n, False) for n in ROWS)
