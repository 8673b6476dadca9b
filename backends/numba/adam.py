"""A step of Adam over all leaves, each element once through all of its formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import addressof, c_char
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba.atomic import floats, place
from xformer.backends.numba.compiled import BLOCK, elementwise, inlined, rowwise
from xformer.backends.numpy.leaves import Leaf, apart, unlike
from xformer.backends.numpy.threads import n_threads, run

from xformer.typing import Array

REPLACED = 0, 2, 3  # of parameters, gradients and moments
SIZE = 7  # column of a leaf's row, after seven places
_at, _byte = addressof, c_char.from_buffer  # of an array's first byte: where it is


def not_float32(
    params: Sequence[Array],
    grads: Sequence[Array],
    m: Sequence[Array],
    v: Sequence[Array],
    *,
    rate: Any,
    root: float,
    keep: Any,
    betas: tuple[float, float],
    eps: float,
    donate: bool = False,
) -> str | None:
    """Why the kernel cannot run: it reads memory as it is said to be."""
    if params[0].dtype != np.float32:
        return "only float32"
    shapes, others = [x.shape for x in params], (grads, m, v)
    if any([x.shape for x in leaves] != shapes for leaves in others):
        return "gradients and moments must have the shapes of their parameters"
    return unlike([*params, *chain(*others)])


def adam_update(
    params: Sequence[Array],
    grads: Sequence[Array],
    m: Sequence[Array],
    v: Sequence[Array],
    *,
    rate: Any,
    root: float,
    keep: Any,
    betas: tuple[float, float],
    eps: float,
    donate: bool = False,
) -> tuple[list[Array], list[Array], list[Array]]:
    """p <- keep p - rate m / (sqrt(v) / root + eps); each thread's numbers in one call."""
    beta1, beta2 = betas
    given = beta1, 1 - beta1, beta2, 1 - beta2, float(rate), 1 / float(root), eps, float(keep)
    numbers = np.array(given, np.float32)
    table, made, _owners = _table(params, grads, m, v, donate)
    total = sum([p.size for p in params])
    size = max(1, -(-total // (n_threads() if total > BLOCK else 1)))
    step = partial(_some, numbers, table)
    run([partial(step, start, start + size) for start in range(0, total, size)])
    return made


def _table(
    params: Sequence[Array],
    grads: Sequence[Array],
    m: Sequence[Array],
    v: Sequence[Array],
    donate: bool,
) -> tuple[Array, tuple[list[Array], list[Array], list[Array]], Any]:
    """That of `_some`, what will be the new parameters and moments, and whose memory it is."""
    donate = donate and apart((*params, *m, *v))
    leaves = [_leaf(arrays, donate) for arrays in zip(params, grads, m, v, strict=True)]
    table = np.array([leaf.places for leaf in leaves], np.int64)
    new_p, new_m, new_v = (list(new) for new in zip(*(leaf.made for leaf in leaves), strict=True))
    return table, (new_p, new_m, new_v), leaves


class _Leaf(NamedTuple):
    """Of parameters, gradients and moments."""

    places: tuple[int, ...]  # a row of the table of `_some`
    made: tuple[Array, ...]  # which will be the new parameters and moments
    owners: Sequence[Array]  # of the memory that is read


def _leaf(arrays: Sequence[Array], donate: bool) -> _Leaf:
    p, g, m, v = arrays
    if donate:
        try:  # in a quarter of `place`'s time, where memory can be written to as it lies
            at_p, at_m, at_v = _at(_byte(p)), _at(_byte(m)), _at(_byte(v))
            old = at_p, _at(_byte(g)), at_m, at_v
            return _Leaf((*old, at_p, at_m, at_v, p.size), (p, m, v), arrays)
        except (TypeError, ValueError):
            pass  # what is read-only, empty, or lies otherwise
    leaf = Leaf(arrays, REPLACED, donate)
    owners = [np.ascontiguousarray(x) for x in leaf.old]
    made = tuple(leaf.shaped(i) for i in range(len(REPLACED)))
    return _Leaf((*map(place, (*owners, *leaf.new)), leaf.size), made, owners)


@rowwise
def _some(numbers: Any, table: Any, start: int, stop: int) -> None:
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
            _step(numbers, *old, floats(at[4], n), floats(at[5], n), floats(at[6], n))
        first += own[SIZE]


@elementwise
def _step(numbers: Any, p: Any, g: Any, m: Any, v: Any, new_p: Any, new_m: Any, new_v: Any) -> None:
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
