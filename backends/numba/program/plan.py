"""Memory plan of a program: the offset of each buffer in one arena, and where threads wait.

Buffers that are in use at the same time do not overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xformer.backends.numba.program.program import Instruction
from xformer.backends.numba.program.traced import Buffer, Traced

Span = tuple[Buffer | None, int, int]  # buffer (None: the arena), first byte, byte after the last

LINE = 64  # bytes of a cache line: offsets in the arena are multiples of it


class Plan(NamedTuple):
    """The offsets of buffers in the arena, and the size of the arena, in bytes."""

    offsets: dict[Buffer, int]
    nbytes: int


def plan(
    code: Sequence[Instruction], external: set[Buffer], results: Sequence[Buffer] = ()
) -> Plan:
    """Assign arena offsets to all buffers of `code` except those in `external`.

    external: buffers outside the arena (inputs, and results in arrays that own their memory).
    results: buffers in the arena that are read after the last instruction.
    """
    lifetimes = _lifetimes(code, external)
    lifetimes |= {
        buffer: (lifetimes[buffer][0], len(code)) for buffer in results if buffer in lifetimes
    }
    order = sorted(lifetimes, key=lambda buffer: -buffer.nbytes)
    first = np.array([lifetimes[buffer][0] for buffer in order], np.int64)
    last = np.array([lifetimes[buffer][1] for buffer in order], np.int64)
    sizes = np.array([-(-max(buffer.nbytes, 1) // LINE) * LINE for buffer in order], np.int64)
    offsets = np.zeros(len(order), np.int64)
    for i in range(len(order)):
        in_use = np.flatnonzero((first[:i] <= last[i]) & (last[:i] >= first[i]))
        ends = offsets[in_use] + sizes[in_use]
        offsets[i] = _lowest_offset(offsets[in_use], ends, int(sizes[i]))
    nbytes = int((offsets + sizes).max(initial=0))
    return Plan(dict(zip(order, offsets.tolist(), strict=True)), nbytes)


def _lifetimes(code: Sequence[Instruction], external: set[Buffer]) -> dict[Buffer, tuple[int, int]]:
    """Return the indices of the first and the last instruction that use each arena buffer."""
    lifetimes: dict[Buffer, tuple[int, int]] = {}
    for i, instruction in enumerate(code):
        for x in (*instruction.outs, *instruction.ins):
            buffer = x.buffer if isinstance(x, Traced) else None
            if buffer is not None and buffer not in external:
                lifetimes[buffer] = lifetimes.get(buffer, (i, i))[0], i
    return lifetimes


def _lowest_offset(begins: np.ndarray, ends: np.ndarray, size: int) -> int:
    """Return the lowest offset of `size` bytes that overlap no range from begins[i] to ends[i]."""
    offset = 0
    for i in np.argsort(begins, kind="stable"):
        if offset + size <= begins[i]:
            break
        offset = max(offset, int(ends[i]))
    return offset


def waits(code: Sequence[Instruction], offsets: dict[Buffer, int]) -> list[bool]:
    """Return for each instruction whether threads wait for all earlier ones before it.

    They wait if the instruction

    - reads or writes bytes that an instruction since the last wait has written;
    - writes bytes that an instruction since the last wait has read;
    - follows a check: a kernel must not read ids that are out of range.

    offsets: of buffers in the arena, where several buffers may share the same bytes.
    """
    read, written, marks, after_check = list[Span](), list[Span](), list[bool](), False
    for instruction in code:
        ins = [_span(x, offsets) for x in instruction.ins if isinstance(x, Traced) and x.size]
        outs = [_span(x, offsets) for x in instruction.outs if x.size]
        marks.append(after_check or _overlap(written, ins + outs) or _overlap(read, outs))
        after_check = instruction.raises is not None and not instruction.outs
        if marks[-1]:
            read, written = [], []
        read += ins
        written += outs
    return marks


def _span(x: Traced, offsets: dict[Buffer, int]) -> Span:
    """Return the range of bytes from the lowest to the highest element of x."""
    assert x.buffer is not None
    reach = [(n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)]
    begin = x.offset + sum(step for step in reach if step < 0)
    end = x.offset + sum(step for step in reach if step > 0) + x.dtype.itemsize
    offset = offsets.get(x.buffer)
    return (x.buffer, begin, end) if offset is None else (None, offset + begin, offset + end)


def _overlap(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    """Return whether a span of the one list and a span of the other have a byte in common."""
    return any(
        a[0] is b[0] and a[1] < b[2] and b[1] < a[2] for a, b in itertools.product(spans, others)
    )
