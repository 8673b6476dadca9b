"""Results that are written into the memory of donated inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends.numba.program.copies import copy_to
from xformer.backends.numba.program.program import Instruction, Program
from xformer.backends.numba.program.traced import Buffer, Traced


def placed_in(results: Sequence[Traced], donated: Sequence[Traced]) -> dict[int, int]:
    """Map indices of results to the indices of the donated inputs whose memory they reuse.

    A result reuses the first free input of the same layout, so results in the order of the inputs
    keep their memory from call to call. A result that is itself a donated input stays in it. Each
    other result must fill its buffer and share it with no other result.
    """
    number = {x.buffer: j for j, x in enumerate(donated)}
    assigned = {i: number[x.buffer] for i, x in enumerate(results) if x.buffer in number}
    free = [j for j in range(len(donated)) if j not in assigned.values()]
    for i, x in enumerate(results):
        fits = [j for j in free if are_alike(x, donated[j])]
        if i not in assigned and not x.is_constant and x.size and fits:  # empty: not computed
            assigned[i] = fits[0]
            free.remove(fits[0])
    return assigned


def are_alike(x: Traced, y: Traced) -> bool:
    """Return whether x and y have the same shape, dtype and strides."""
    return (x.shape, x.dtype, x.strides) == (y.shape, y.dtype, y.strides)


def written_over(
    code: Sequence[Instruction], pairs: Sequence[tuple[Traced, Traced]]
) -> list[Instruction]:
    """Return the code changed so that each result is written into its donated input.

    pairs: (result, donated input). If the input is not read after the result is written, the
    result's instruction writes into it directly. If it is, a copy at the end does.
    """
    replaced: dict[Buffer | None, Traced] = {}
    copied: list[tuple[Traced, Traced]] = []
    for result, donated in pairs:
        if result.buffer is donated.buffer:
            continue
        if _can_replace(code, result, donated):
            replaced[result.buffer] = donated
        else:
            copied.append((result, donated))
    code = [_with_operands(instruction, replaced) for instruction in code]
    copies = Program()
    for result, donated in copied:
        copy_to(copies, donated, result)
    return [*code, *copies.code]


def _can_replace(code: Sequence[Instruction], result: Traced, donated: Traced) -> bool:
    """Return whether instructions may write `result` straight into the memory of `donated`.

    The last read of `donated` must be before the first write of `result`, or in the same
    instruction if that can run in place.
    """
    reads = [i for i, instruction in enumerate(code) if _reads(instruction, donated)]
    first_write = min(
        i
        for i, instruction in enumerate(code)
        if any(x.buffer is result.buffer for x in instruction.outs)
    )
    if not reads or reads[-1] < first_write:
        return True
    return reads[-1] == first_write and _is_in_place(code[first_write], result, donated)


def _reads(instruction: Instruction, x: Traced) -> bool:
    """Return whether the instruction has an input in the buffer of x."""
    return any(isinstance(y, Traced) and y.buffer is x.buffer for y in instruction.ins)


def _is_in_place(instruction: Instruction, result: Traced, donated: Traced) -> bool:
    """Return whether the instruction may write `result` over `donated`, which it reads.

    The instruction must allow it (`Instruction.in_place`), have only one output in the result's
    buffer, and use both arrays in the layout of `donated`.
    """
    ins = [
        i
        for i, x in enumerate(instruction.ins)
        if isinstance(x, Traced) and x.buffer is donated.buffer
    ]
    outs = [i for i, x in enumerate(instruction.outs) if x.buffer is result.buffer]
    operands = [instruction.ins[i] for i in ins] + [instruction.outs[i] for i in outs]
    layouts = {(x.shape, x.strides) for x in operands}
    if len(outs) != 1 or layouts != {(donated.shape, donated.strides)} or not instruction.in_place:
        return False
    return set(ins) <= set(instruction.in_place[outs[0]])


def _with_operands(instruction: Instruction, replaced: dict[Buffer | None, Traced]) -> Instruction:
    """Return the instruction with its operands moved to other buffers.

    replaced: for a buffer, the donated input that takes its place.
    """

    def moved(x: Any) -> Any:
        if isinstance(x, Traced) and x.buffer in replaced:
            donated = replaced[x.buffer]
            return Traced(x.program, donated.buffer, x.layout, x.base)
        return x

    outs, ins = (tuple(map(moved, xs)) for xs in (instruction.outs, instruction.ins))
    return instruction._replace(outs=outs, ins=ins)


def require_apart(begins: np.ndarray, sizes: np.ndarray, n_donated: int) -> None:
    """Raise ValueError if a donated array shares memory with another array.

    begins, sizes: addresses and lengths of all arrays, in bytes; the first `n_donated` arrays are
    the donated ones.
    """
    filled = sizes > 0  # empty arrays share nothing
    begins, sizes, n_donated = begins[filled], sizes[filled], filled[:n_donated].sum()
    ends, order = begins + sizes, np.argsort(begins, kind="stable")
    donated_ends = np.where(order < n_donated, ends[order], 0)
    # For each array but the lowest: the highest end of all arrays, and of the donated arrays, that
    # begin before it.
    highest, highest_donated = (np.maximum.accumulate(x)[:-1] for x in (ends[order], donated_ends))
    is_donated, next_begins = order[1:] < n_donated, begins[order[1:]]
    if ((next_begins < highest_donated) | (is_donated & (next_begins < highest))).any():
        raise ValueError("arrays that are donated share memory with other arguments")
