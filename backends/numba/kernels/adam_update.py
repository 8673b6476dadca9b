"""`adam_update` of all leaves by one instruction; each element is read and written once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.backends.numba.atomic import floats
from xformer.backends.numba.jit import elementwise, inlined, rowwise
from xformer.backends.numba.kernels.layout import fresh_in, in_order, order_of
from xformer.backends.numba.program.copies import astype
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
from xformer.backends.numba.program.program import common_program, program_of
from xformer.backends.numba.program.traced import Traced, constant
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.optim.adam import adam_update as op

NEW, OLD = 3, 4  # arrays of a leaf: outputs (p, m, v) and inputs (p, g, m, v)
SIZE = NEW + OLD  # column of the size in the table of leaves, after seven addresses


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
    """Return why the numba kernel of `adam_update` cannot run, or None if it can.

    It needs recorded arrays in float32, not all constants of the program. Gradients and moments
    must have the shapes of their parameters.
    """
    leaves = [*params, *grads, *m, *v]
    if not all(isinstance(x, Traced) and x.dtype == np.float32 for x in leaves):
        return "only float32"
    shapes = [x.shape for x in params]
    if any([x.shape for x in trees] != shapes for trees in (grads, m, v)):
        return "gradients and moments must have the shapes of their parameters"
    return None if common_program(leaves) else "all arrays are constants"


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
    """Return the new (params, m, v) of one Adam step, of all leaves.

    m <- beta1 m + (1 - beta1) g, v <- beta2 v + (1 - beta2) g^2, and then
    p <- keep p - rate m / (sqrt(v) / root + eps). rate, root and keep may be arrays, whose values
    are known only in a run.
    """
    recorder = program_of(*params, *grads, *m, *v)
    orders = [order_of(x) for x in params]
    leaves = zip(orders, zip(params, grads, m, v, strict=True), strict=True)
    old = [[in_order(x, order) for x in leaf] for order, leaf in leaves]
    new = [
        [fresh_in(recorder, order, p.shape, np.float32) for _ in range(NEW)]
        for order, p in zip(orders, params, strict=True)
    ]
    scalars = [_scalar(x) for x in (rate, root, keep)]
    sizes = [leaf[0].size for leaf in old]
    constants = *map(bits, (*betas, eps)), len(old), *sizes
    outs, ins = [x for leaf in new for x in leaf], [*scalars, *(x for leaf in old for x in leaf)]
    pieces = recorder.pieces(sum(sizes))
    # An output may reuse the memory of the inputs of its own leaf.
    of_leaf = [range(3 + OLD * i, 3 + OLD * (i + 1)) for i in range(len(old)) for _ in range(NEW)]
    recorder.emit("adam", outs, ins, Native(step, constants, pieces), in_place=of_leaf)
    new_p, new_m, new_v = (list(leaves) for leaves in zip(*new, strict=True))
    return new_p, new_m, new_v


def _scalar(x: Any) -> Any:
    """Return a number, or an array of one element, as a float64 array ()."""
    x = x if isinstance(x, Traced) else constant(np.asarray(x, np.float64))
    return astype(x, np.dtype(np.float64))


@native
def step(args: int, piece: int, pieces: int, memory: int) -> None:
    """Update a piece of all elements of all leaves.

    outputs: new p, m and v of the first leaf, then of the next leaf, and so on; inputs: rate, root,
    keep (() float64), then old p, g, m and v of each leaf. integers: bits of beta1, beta2 and eps,
    number of leaves, size of each leaf.
    """
    n_leaves = numbers(args, 4)[3]
    a = numbers(args, 4 + n_leaves)
    at = words(args, (NEW + OLD) * n_leaves + 3)
    scalars, old = at[NEW * n_leaves :], at[NEW * n_leaves + 3 :]
    table, total = np.empty((n_leaves, SIZE + 1), np.int64), np.int64(0)
    for i in range(n_leaves):
        for j in range(OLD):
            table[i, j] = old[OLD * i + j]
        for j in range(NEW):
            table[i, OLD + j] = at[NEW * i + j]
        table[i, SIZE] = a[4 + i]
        total += a[4 + i]
    # beta1, 1 - beta1, beta2, 1 - beta2, rate, 1 / root, eps, keep
    options = np.empty(8, np.float32)
    options[0], options[1] = real(a[0]), 1 - real(a[0])
    options[2], options[3] = real(a[1]), 1 - real(a[1])
    options[4], options[5] = float64s(scalars[0], (1,))[0], 1 / float64s(scalars[1], (1,))[0]
    options[6], options[7] = real(a[2]), float64s(scalars[2], (1,))[0]
    start, stop = part(total, piece, pieces, LINE)
    _update(options, table, start, stop)


@rowwise
def _update(options: Any, table: Any, start: int, stop: int) -> None:
    """Update the elements `start` to `stop` of all leaves, counted from the first leaf on.

    options: the eight numbers of `_updated`. table (leaves, 8): addresses of old p, g, m and v, and
    of new p, m and v, then the size of the leaf.
    """
    first = 0
    for leaf in table:
        low, high = max(start - first, 0), min(stop - first, leaf[SIZE])
        if low < high:
            ptr, n = leaf[:SIZE] + 4 * low, (high - low,)
            old = floats(ptr[0], n), floats(ptr[1], n), floats(ptr[2], n), floats(ptr[3], n)
            _update_leaf(options, *old, floats(ptr[4], n), floats(ptr[5], n), floats(ptr[6], n))
        first += leaf[SIZE]


@elementwise
def _update_leaf(
    options: Any, p: Any, g: Any, m: Any, v: Any, new_p: Any, new_m: Any, new_v: Any
) -> None:
    """Write new_p, new_m and new_v (n,) from p, g, m and v (n,), which may be the same memory.

    options: the eight numbers of `_updated`.
    """
    if _same(p, new_p) and _same(m, new_m) and _same(v, new_v):
        # Read as new_p[i]: the compiler would assume that p[i] depends on earlier writes to new_p.
        for i in range(p.size):
            new_p[i], new_m[i], new_v[i] = _updated(options, new_p[i], g[i], new_m[i], new_v[i])
    else:
        for i in range(p.size):
            new_p[i], new_m[i], new_v[i] = _updated(options, p[i], g[i], m[i], v[i])


@elementwise
def _same(x: Any, y: Any) -> Any:
    """Return whether two arrays begin at the same address."""
    return x.ctypes.data == y.ctypes.data


@inlined
def _updated(options: Any, p: Any, g: Any, m: Any, v: Any) -> Any:
    """Return the new (p, m, v) of one element."""
    beta1, rest1, beta2, rest2, rate, inverse_root, eps, keep = options
    mean = beta1 * m + rest1 * g
    square = beta2 * v + rest2 * g * g
    return keep * p - rate * mean / (math.sqrt(square) * inverse_root + eps), mean, square
