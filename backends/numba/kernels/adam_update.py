"""`adam_update` of all leaves, one instruction, each element once through all of its formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends.numba.atomic import floats
from xformer.backends.numba.compiled import elementwise, inlined, rowwise
from xformer.backends.numba.program import namespace, program
from xformer.backends.numba.program.native import (
    LINE,
    Native,
    bits,
    float64s,
    native,
    numbers,
    part,
    real,
    words,
)
from xformer.backends.numba.program.program import Program
from xformer.backends.numba.program.traced import Traced, constant
from xformer.dispatch import kernel
from xformer.optim.adam import adam_update as op
from xformer.typing import Array

NEW, OLD = 3, 4  # arrays of a leaf: parameters and moments, and before them gradients too
SIZE = NEW + OLD  # column of a leaf's row, after seven places


def unsupported(
    params: Sequence[Array],
    grads: Sequence[Array],
    m: Sequence[Array],
    v: Sequence[Array],
    *,
    rate: Any,
    root: Any,
    keep: Any,
    betas: tuple[float, float],
    eps: float,
    donate: bool = False,
) -> str | None:
    """Why the kernel cannot run."""
    leaves = [*params, *grads, *m, *v]
    if not all(isinstance(x, Traced) and x.dtype == np.float32 for x in leaves):
        return "only float32"
    shapes = [x.shape for x in params]
    if any([x.shape for x in others] != shapes for others in (grads, m, v)):
        return "gradients and moments must have the shapes of their parameters"
    return None if program.of(leaves) else "all arrays are constants"


@kernel(op, "numba.kernels", unsupported=unsupported)
def adam_update(
    params: Sequence[Array],
    grads: Sequence[Array],
    m: Sequence[Array],
    v: Sequence[Array],
    *,
    rate: Any,
    root: Any,
    keep: Any,
    betas: tuple[float, float],
    eps: float,
    donate: bool = False,
) -> tuple[list[Array], list[Array], list[Array]]:
    """p <- keep p - rate m / (sqrt(v) / root + eps): new arrays, that lie where the plan puts them.

    rate, root and keep may be known in a run only.
    """
    recorder = program.of([*params, *grads, *m, *v])
    assert recorder is not None  # else this were unsupported
    old = [_alike(leaf) for leaf in zip(params, grads, m, v, strict=True)]
    new = [tuple(_like(recorder, leaf[0]) for _ in range(NEW)) for leaf in old]

    def run(*arrays: Any) -> None:
        outs, (rate, root, keep, *leaves) = arrays[: NEW * len(old)], arrays[NEW * len(old) :]
        own = [leaves[i::OLD] for i in range(OLD)]
        made = op.reference(*own, rate=rate, root=root, keep=keep, betas=betas, eps=eps)
        for i, several in enumerate(made):
            for out, x in zip(outs[i::NEW], several, strict=True):
                out[...] = x

    scalars = [_scalar(x) for x in (rate, root, keep)]
    sizes = [leaf[0].size for leaf in old]
    own = *map(bits, (*betas, eps)), len(old), *sizes
    outs, ins = [x for leaf in new for x in leaf], [*scalars, *(x for leaf in old for x in leaf)]
    pieces = recorder.pieces(sum(sizes))
    of_leaf = [range(3 + OLD * i, 3 + OLD * (i + 1)) for i in range(len(old)) for _ in range(NEW)]
    recorder.emit("adam", run, outs, ins, Native(step, own, pieces), in_place=of_leaf)
    new_p, new_m, new_v = (list(leaves) for leaves in zip(*new, strict=True))
    return new_p, new_m, new_v


def _scalar(x: Any) -> Any:
    """A float64 array (), of a number or an array that may be traced."""
    x = x if isinstance(x, Traced) else constant(np.asarray(x, np.float64))
    return namespace.astype(x, np.dtype(np.float64))


def _order(x: Array) -> list[int]:
    """Axes from the one of largest steps to the one of smallest."""
    return sorted(range(x.ndim), key=lambda axis: -x.strides[axis])


def _alike(leaf: tuple[Array, ...]) -> tuple[Array, ...]:
    """The arrays, whose elements fill memory in one order: copies where they do not."""
    order = _order(leaf[0])
    turned = [namespace.permute_dims(x, order) for x in leaf]
    back = [order.index(axis) for axis in range(len(order))]
    return tuple(namespace.permute_dims(namespace.contiguous(x), back) for x in turned)


def _like(recorder: Program, x: Array) -> Array:
    """A new array that lies as x does."""
    order = _order(x)
    new = recorder.fresh([x.shape[axis] for axis in order], np.float32)
    return namespace.permute_dims(new, [order.index(axis) for axis in range(len(order))])


@native
def step(args: int, piece: int, pieces: int, memory: int) -> None:
    """Of each leaf the new parameters and moments; rate, root, keep, then of each leaf the old
    parameters, gradients and moments; betas, eps, how many leaves, the size of each.
    """
    n_leaves = numbers(args, 4)[3]
    a = numbers(args, 4 + n_leaves)
    at = words(args, (NEW + OLD) * n_leaves + 3)
    scalars, old = at[NEW * n_leaves :], at[NEW * n_leaves + 3 :]
    table, total = np.empty((n_leaves, SIZE + 1), np.int64), np.int64(0)
    for i in range(n_leaves):
        table[i, :OLD] = old[OLD * i : OLD * (i + 1)]
        table[i, OLD:SIZE] = at[NEW * i : NEW * (i + 1)]
        table[i, SIZE] = a[4 + i]
        total += a[4 + i]
    own = np.empty(8, np.float32)
    own[0], own[1], own[2], own[3] = real(a[0]), 1 - real(a[0]), real(a[1]), 1 - real(a[1])
    own[4], own[5] = float64s(scalars[0], (1,))[0], 1 / float64s(scalars[1], (1,))[0]
    own[6], own[7] = real(a[2]), float64s(scalars[2], (1,))[0]
    start, stop = part(total, piece, pieces, LINE)
    _steps(own, table, start, stop)


@rowwise
def _steps(numbers: Any, table: Any, start: int, stop: int) -> None:
    """A step of the numbers from start to stop, of all leaves behind each other.

    table (leaves, 8): where a leaf's parameters, gradients and moments are, and the new parameters
    and moments, and how many numbers.
    """
    first = 0
    for own in table:
        low, high = max(start - first, 0), min(stop - first, own[SIZE])
        if low < high:
            at, n = own[:SIZE] + 4 * low, (high - low,)
            old = floats(at[0], n), floats(at[1], n), floats(at[2], n), floats(at[3], n)
            _step_leaf(numbers, *old, floats(at[4], n), floats(at[5], n), floats(at[6], n))
        first += own[SIZE]


@elementwise
def _step_leaf(
    numbers: Any, p: Any, g: Any, m: Any, v: Any, new_p: Any, new_m: Any, new_v: Any
) -> None:
    if _same(p, new_p) and _same(m, new_m) and _same(v, new_v):
        for i in range(p.size):  # read by another name, it might depend on what was written before
            new_p[i], new_m[i], new_v[i] = _moved(numbers, new_p[i], g[i], new_m[i], new_v[i])
    else:
        for i in range(p.size):
            new_p[i], new_m[i], new_v[i] = _moved(numbers, p[i], g[i], m[i], v[i])


@elementwise
def _same(x: Any, y: Any) -> Any:
    return x.ctypes.data == y.ctypes.data


@inlined
def _moved(numbers: Any, p: Any, g: Any, m: Any, v: Any) -> Any:
    """What becomes of a parameter and its moments."""
    old1, share1, old2, share2, rate, root, eps, keep = numbers
    mean = old1 * m + share1 * g
    square = old2 * v + share2 * g * g
    return keep * p - rate * mean / (math.sqrt(square) * root + eps), mean, square
