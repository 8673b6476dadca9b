"""What a compiler does not make of loops: vectors, and tiles of a product, that stay in registers.

For loops of `tile`; as LLVM's instructions. Addresses and steps are in bytes.
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
    """Numbers of a vector that are multiplied and added in one instruction; 0 where unknown."""
    config = numba.config
    if platform.machine().lower() not in ("x86_64", "amd64") or config.DISABLE_JIT:
        return 0
    if config.CPU_NAME or not config.ENABLE_AVX:
        return 0
    features = llvmlite.binding.get_host_cpu_features()
    if config.CPU_FEATURES is not None:
        features = {name[1:]: name[:1] == "+" for name in config.CPU_FEATURES.split(",")}
    wide = 16 if features.get("avx512f") else 8 if features.get("avx2") else 0
    return wide if features.get("fma") else 0


USABLE = _lanes() > 0
LANES = _lanes() or 4  # of code that is never run
HIGH = 12 if LANES == 16 else 6
ROWS = HIGH, HIGH // 3 * 2, HIGH // 3  # of a tile: as many as fit into registers, or what is left
VECTORS = 2
COLUMNS = VECTORS * LANES
STEP = DEPTH + 16  # from row to row of one; not so that all rows are in one set of a cache

REAL, WHOLE, PART = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(REAL, LANES)


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
    ahead, ahead_step: a line of memory that is wanted soon, and from it to the next, one for two
    rows of w: asked for more often, lines come no faster, and w itself has to wait.
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
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        return types.void(*(types.int64,) * 7, types.float32, *(types.int64,) * 3), build

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        k, x, x_step, w, w_step, y, step, scale, keep, *ahead = values
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
            _fetch(builder, place, writes=1)
        sums = _sums(builder, n, k, (x, x_step, STEP if by_rows else 1), (w, w_step), ahead)
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


def _sums(builder: Any, n: int, k: Any, factor: Any, other: Any, soon: Any) -> Any:
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
    half = builder.lshr(p, ir.Constant(WHOLE, 1))
    _fetch(builder, builder.add(soon[0], builder.mul(half, soon[1])), writes=0)
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


def _fetch(builder: Any, address: Any, *, writes: int) -> None:
    """Have it in the cache soon, to be read or written."""
    byte = ir.IntType(8).as_pointer()
    prefetch = get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [byte, PART, PART, PART]),
        "llvm.prefetch.p0i8",
    )
    builder.call(prefetch, [builder.inttoptr(address, byte), *(PART(i) for i in (writes, 3, 1))])


move: Any = intrinsic(_moved)
turn: Any = intrinsic(_turned)
high_by_rows, middle_by_rows, low_by_rows = (_tile(n, True) for n in ROWS)
high_by_columns, middle_by_columns, low_by_columns = (_tile(n, False) for n in ROWS)
