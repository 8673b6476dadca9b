"""Results in the memory of inputs: what is donated is written over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends.numba.program import namespace
from xformer.backends.numba.program.program import Instruction, Program
from xformer.backends.numba.program.traced import Buffer, Traced


def placed_in(results: Sequence[Traced], donated: Sequence[Traced]) -> dict[int, int]:
    """Which results will lie in which donated inputs, by their numbers: of the same layout each.

    The first that fits is taken: trees that come and go in one order keep their places. Results
    have buffers of their own, which fill them, or are donated inputs.
    """
    number = {x.buffer: j for j, x in enumerate(donated)}
    taken = {i: number[x.buffer] for i, x in enumerate(results) if x.buffer in number}
    free = [j for j in range(len(donated)) if j not in taken.values()]
    for i, x in enumerate(results):
        fits = [j for j in free if are_alike(x, donated[j])]
        if i not in taken and not x.is_constant and fits:
            taken[i] = fits[0]
            free.remove(fits[0])
    return taken


def are_alike(x: Traced, y: Traced) -> bool:
    """Whether they have the same layout."""
    return (x.shape, x.dtype, x.strides) == (y.shape, y.dtype, y.strides)


def written_over(
    code: Sequence[Instruction], pairs: Sequence[tuple[Traced, Traced]]
) -> list[Instruction]:
    """The code with results in the place of inputs: (result, input) pairs.

    At once, where nobody reads the input afterwards; else by a copy at the end.
    """
    moved: dict[Buffer | None, Traced] = {}
    late: list[tuple[Traced, Traced]] = []
    for result, given in pairs:
        if result.buffer is given.buffer:
            continue
        if _at_once(code, result, given):
            moved[result.buffer] = given
        else:
            late.append((result, given))
    code = [_moved(one, moved) for one in code]
    end = Program()
    for result, given in late:
        namespace.copy_to(end, given, result)
    return [*code, *end.code]


def _at_once(code: Sequence[Instruction], result: Traced, given: Traced) -> bool:
    """Whether the input is not read after the result is written, but for the same elements."""
    reads = [i for i, one in enumerate(code) if _reads(one, given)]
    first = min(i for i, one in enumerate(code) if any(x.buffer is result.buffer for x in one.outs))
    if not reads or reads[-1] < first:
        return True
    return reads[-1] == first and _is_in_place(code[first], result, given)


def _reads(one: Instruction, x: Traced) -> bool:
    return any(isinstance(y, Traced) and y.buffer is x.buffer for y in one.ins)


def _is_in_place(one: Instruction, result: Traced, given: Traced) -> bool:
    """Whether all of the result needs of the input the same elements alone, which lie as in it."""
    ins = [i for i, x in enumerate(one.ins) if isinstance(x, Traced) and x.buffer is given.buffer]
    outs = [i for i, x in enumerate(one.outs) if x.buffer is result.buffer]
    layouts = {
        (x.shape, x.strides) for x in [one.ins[i] for i in ins] + [one.outs[i] for i in outs]
    }
    if len(outs) != 1 or layouts != {(given.shape, given.strides)} or not one.in_place:
        return False
    return set(ins) <= set(one.in_place[outs[0]])


def _moved(one: Instruction, moved: dict[Buffer | None, Traced]) -> Instruction:
    def at(x: Any) -> Any:
        if isinstance(x, Traced) and x.buffer in moved:
            given = moved[x.buffer]
            return Traced(x.program, given.buffer, x.layout, x.base)
        return x

    outs, ins = (tuple(map(at, part)) for part in (one.outs, one.ins))
    return one._replace(outs=outs, ins=ins)


def require_apart(begins: np.ndarray, sizes: np.ndarray, n_donated: int) -> None:
    """ValueError where an array to be written over shares memory with another one.

    begins, sizes: of all arrays, in bytes; those to be written over come first.
    """
    ends, order = begins + sizes, np.argsort(begins, kind="stable")
    own = np.where(order < n_donated, ends[order], 0)  # ends of what is written over
    before, own_before = (np.maximum.accumulate(x)[:-1] for x in (ends[order], own))
    is_donated, after = order[1:] < n_donated, begins[order[1:]]
    if ((after < own_before) | (is_donated & (after < before))).any():
        raise ValueError("arrays that are donated share memory with other arguments")
