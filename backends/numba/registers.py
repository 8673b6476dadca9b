"""Functions for `tile` as LLVM instructions, whose vectors stay in registers.

A compiler does not keep a tile of a matmul in registers if the tile is written as loops. Addresses
and steps are in bytes.
"""

from __future__ import annotations

import itertools
import platform
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from xformer.backends.numba.tuning import DEPTH


def _lanes() -> int:
    """Return how many float32 numbers one fused multiply-add of this core takes; 0 if unknown."""
    config = numba.config
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return 0
    if config.CPU_NAME or not config.ENABLE_AVX:
        return 0
    features = llvmlite.binding.get_host_cpu_features()
    if config.CPU_FEATURES is not None:
        features = {name[1:]: name[:1] == "+" for name in config.CPU_FEATURES.split(",")}
    wide = 16 if features.get("avx512f") else 8 if features.get("avx2") else 0
    return wide if features.get("fma") else 0


USABLE = _lanes() > 0
LANES = _lanes() or 4  # numbers of a vector; 4: the code is never run
HIGH = 12 if LANES == 16 else 6  # rows of a tile: as many as fit into registers
ROWS = HIGH, HIGH // 3 * 2, HIGH // 3  # possible rows of a tile; fewer for the last rows of x
VECTORS = 2  # vectors of a row of a tile
COLUMNS = VECTORS * LANES
STEP = DEPTH + 16  # numbers between rows of an x panel, chosen so that rows use several cache sets

REAL, INT64, INT32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(REAL, LANES)


def _vector_at(builder: Any, address: Any) -> Any:
    """Cast an address to a pointer to a vector."""
    return builder.inttoptr(address, VECTOR.as_pointer())


def _advance(builder: Any, address: Any, step: Any, times: int = 1) -> Any:
    """Return address + times * step."""
    return builder.add(address, builder.mul(step, ir.Constant(INT64, times)))


def _copy_vector(typing: Any, source: Any, target: Any) -> Any:
    """Copy LANES numbers."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x = builder.load(_vector_at(builder, values[0]), align=4)
        builder.store(x, _vector_at(builder, values[1]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


def _transpose_vectors(typing: Any, source: Any, step: Any, target: Any, target_step: Any) -> Any:
    """Copy LANES rows of LANES numbers, transposed. step, target_step: between rows.

    Blocks off the diagonal are swapped, blocks of 1 number first, then of 2, 4, ...
    """

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, step, target, target_step = values
        rows = [
            builder.load(_vector_at(builder, _advance(builder, source, step, i)), align=4)
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
            address = _advance(builder, target, target_step, i)
            builder.store(row, _vector_at(builder, address), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), build


def _shuffled(builder: Any, x: Any, y: Any, indices: list[int]) -> Any:
    """Return the vector of the numbers of x and y, joined, at these indices."""
    mask = ir.Constant(ir.VectorType(INT32, LANES), indices)
    return builder.shuffle_vector(x, y, mask)


def _tile(n: int, by_rows: bool) -> Any:
    """Return an intrinsic for y = scale x w, or y += scale x w if `keep`.

    x (n, k), w (k, COLUMNS), y (n, COLUMNS); x, w, y are addresses.
    by_rows: rows of x are contiguous and begin every STEP numbers. Else columns are contiguous and
        begin every x_step bytes.
    w_step, step: between rows of w and of y.
    fetch, fetch_step: the first cache line to prefetch, and the step to the next. One line is
        prefetched for two rows of w; more often would be no faster and delay the loads of w.
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
        fetch: Any,
        fetch_step: Any,
    ) -> Any:
        return types.void(*(types.int64,) * 7, types.float32, *(types.int64,) * 3), build

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        k, x, x_step, w, w_step, y, step, scale, keep, *fetched = values
        if by_rows:
            x_step = ir.Constant(INT64, 4)
        addresses = [
            [
                builder.add(_advance(builder, y, step, i), ir.Constant(INT64, 4 * v * LANES))
                for v in range(VECTORS)
            ]
            for i in range(n)
        ]
        for address in itertools.chain(*addresses):
            _prefetch(builder, address, writes=1)
        sums = _sums(builder, n, k, (x, x_step, STEP if by_rows else 1), (w, w_step), fetched)
        factor = _broadcast(builder, scale)
        keeps = builder.icmp_signed("!=", keep, ir.Constant(INT64, 0))
        for i in range(n):
            for v in range(VECTORS):
                sums[i][v] = builder.fmul(sums[i][v], factor)
        with builder.if_else(keeps) as branches:
            for branch, adds in zip(branches, (True, False), strict=True):
                with branch:
                    for i in range(n):
                        for v in range(VECTORS):
                            pointer, result = _vector_at(builder, addresses[i][v]), sums[i][v]
                            if adds:
                                result = builder.fadd(builder.load(pointer, align=4), result)
                            builder.store(result, pointer, align=4)
        return context.get_dummy_value()

    return intrinsic(typed)


def _sums(builder: Any, n: int, k: Any, x_panel: Any, w_panel: Any, fetched: Any) -> Any:
    """Build the loop over k >= 1 and return the sums of products: n rows of VECTORS vectors.

    x_panel: address, step between columns in bytes, step between rows in numbers. w_panel: address,
    step between rows. fetched: address and step of the cache lines to prefetch.
    """
    (x, x_step, row_distance), (w, w_step) = x_panel, w_panel
    before = builder.block
    loop, done = map(builder.append_basic_block, ("loop", "done"))
    builder.branch(loop)
    builder.position_at_end(loop)
    p = builder.phi(INT64)
    p.add_incoming(ir.Constant(INT64, 0), before)
    sums = [[builder.phi(VECTOR) for _ in range(VECTORS)] for _ in range(n)]
    row = builder.add(w, builder.mul(p, w_step))
    ws = [
        builder.load(
            _vector_at(builder, builder.add(row, ir.Constant(INT64, 4 * v * LANES))), align=4
        )
        for v in range(VECTORS)
    ]
    numbers = builder.inttoptr(builder.add(x, builder.mul(p, x_step)), REAL.as_pointer())
    fma = get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), f"llvm.fma.v{LANES}f32"
    )
    half = builder.lshr(p, ir.Constant(INT64, 1))
    _prefetch(builder, builder.add(fetched[0], builder.mul(half, fetched[1])), writes=0)
    added = []
    for i in range(n):
        pointer = builder.gep(numbers, [ir.Constant(INT64, i * row_distance)])
        number = _broadcast(builder, builder.load(pointer, align=4))
        added.append([builder.call(fma, [number, ws[v], sums[i][v]]) for v in range(VECTORS)])
    after = builder.add(p, ir.Constant(INT64, 1))
    p.add_incoming(after, loop)
    zero = ir.Constant(VECTOR, [0.0] * LANES)
    for i in range(n):
        for v in range(VECTORS):
            sums[i][v].add_incoming(zero, before)
            sums[i][v].add_incoming(added[i][v], loop)
    builder.cbranch(builder.icmp_signed("<", after, k), loop, done)
    builder.position_at_end(done)
    return added


def _broadcast(builder: Any, number: Any) -> Any:
    """Return a vector with the same number in all lanes."""
    empty = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(INT32, 0))
    return _shuffled(builder, first, empty, [0] * LANES)


def _prefetch(builder: Any, address: Any, *, writes: int) -> None:
    """Prefetch the cache line of an address, for reading (writes=0) or writing (writes=1)."""
    byte = ir.IntType(8).as_pointer()
    prefetch = get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32]),
        "llvm.prefetch.p0i8",
    )
    builder.call(prefetch, [builder.inttoptr(address, byte), *(INT32(i) for i in (writes, 3, 1))])


copy_vector: Any = intrinsic(_copy_vector)
transpose_vectors: Any = intrinsic(_transpose_vectors)
# The tiles of ROWS[0], ROWS[1] and ROWS[2] rows, for row-major and column-major panels of x.
high_by_rows, middle_by_rows, low_by_rows = (_tile(n, True) for n in ROWS)
high_by_columns, middle_by_columns, low_by_columns = (_tile(n, False) for n in ROWS)
