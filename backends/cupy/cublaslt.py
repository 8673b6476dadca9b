"""Products by cuBLASLt, through NVIDIA's bindings (extra `nvmath`), where they are installed.

    multiply(x, w, y, bias=b)              # y = x w + b
    multiply(x.T, dy, dw, sums=db)         # dw = x^T dy, db = sums of dy over its rows
    multiply(more_dy, w.T, dx, add=True)   # dx += more_dy w^T
    multiply_gelu(x, w, y, b, aux)         # y = gelu(aux), aux = x w + b
    multiply_slope(dy, w.T, dx, aux)       # dx = dy w^T gelu'(aux)
    multiply_each(x, [w, w2], ys, [b, b2]) # ys[i] = x w_i + b_i

Of float32 matrices, or of two bytes, whose products are summed in float32, and rounded unless `out`
is float32. `lt_plan` has what is kept of each kind of product.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.cupy.column_sums import row_sums
from xformer.backends.cupy.lt_plan import (
    TYPES,
    WORKSPACE,
    Plan,
    aligned,
    fits_aux,
    layout,
    matrix,
    planned,
)
from xformer.backends.cupy.module import contiguous
from xformer.backends.cupy.packed import distance
from xformer.backends.cupy.runtimes import Runtime, runtime_of

from xformer import ops
from xformer.shapes import STORED, dtype_name
from xformer.typing import Array

KEPT = 1024  # plans: texts that grow have products of another kind for each length


class Place(NamedTuple):
    """Where work goes."""

    device: int
    stream: int  # its address
    tf32: bool  # whether factors of float32 may be rounded


RUNTIMES: dict[type, Runtime] = {}


class State(threading.local):
    """Of one thread: descriptors are written to before each product."""

    def __init__(self) -> None:
        self.handles: dict[Any, int] = {}  # of a device
        self.plans: dict[Any, Plan | None] = {}  # None: there is no algorithm
        self.workspaces: dict[Any, Any] = {}  # of a stream, on which one product follows another


_state = State()
_FACTORS = np.array([0, 1], np.float32)  # of a product, and of what it is added to
ZERO, ONE = (_FACTORS[i:].ctypes.data for i in range(2))


def why_not(x: Array, w: Array) -> str | None:
    """Why products of x and w are not cuBLASLt's; None where they are."""
    lt = runtime_of(RUNTIMES, type(x)).library()
    if isinstance(lt, str):
        return lt
    if dtype_name(x) not in TYPES:
        return f"by cuBLASLt are products of {', '.join(TYPES)}, not {x.dtype.name}"
    return None if x.size and w.size else "an array has no elements"


def readable(x: Array) -> Array:
    """x (N, M), copied where neither its rows nor its columns are contiguous, or they overlap."""
    return contiguous(x) if layout(x) is None else x


def multiply(
    a: Array,
    b: Array,
    out: Array,
    *,
    add: bool = False,
    bias: Array | None = None,
    sums: Array | None = None,
) -> None:
    """out (M, N) = a (M, K) b (K, N), or with `add` out + a b; all of them `readable`.

    Of the dtype of `out` one of bias (N,), which is added, where rows of `out` are contiguous, and
    sums (N,), written to: those of b over its rows. By a launch of their own where cuBLASLt has no
    algorithm that does both.
    """
    name, vector = ("BIAS", bias) if sums is None else ("BGRAD", sums)
    if _ran(a, b, out, name if vector is not None else "DEFAULT", vector, add=add):
        return
    if vector is None or not _ran(a, b, out, add=add):
        raise RuntimeError(
            f"cuBLASLt has no algorithm for a product of {a.shape} and {b.shape} in {a.dtype.name}"
        )
    if sums is not None:
        sums[...] = row_sums(contiguous(b))
    else:
        out += bias


def multiply_gelu(a: Array, b: Array, out: Array, bias: Array | None, aux: Array | None) -> None:
    """out = gelu(aux), aux = a b + bias, by tanh in few digits: enough for bfloat16.

    out and aux are contiguous, from 16 bytes on; without aux nothing is kept.
    """
    name = "GELU" + ("" if aux is None else "_AUX") + ("" if bias is None else "_BIAS")
    if (aux is None or fits_aux(out)) and _ran(a, b, out, name, bias, aux):
        return
    before = out if aux is None else aux
    multiply(a, b, before, bias=bias)
    y, _ = ops.gelu(before, approximate="tanh")
    out[...] = y


def multiply_slope(a: Array, b: Array, out: Array, aux: Array) -> None:
    """out = a b gelu'(aux), as of `multiply_gelu`."""
    if fits_aux(out) and _ran(a, b, out, "DGELU", None, aux):
        return
    multiply(a, b, out)
    _, cache = ops.gelu(aux, approximate="tanh")
    out[...] = cache.backward(out)


def multiply_each(
    a: Array, several: Sequence[Array], out: Array, biases: Sequence[Array | None]
) -> bool:
    """out[i] = a several[i] + biases[i] in one launch; False where there is no such algorithm.

    several, biases: as `distances` has them. out: (len(several), M, N), contiguous.
    """
    steps = distances(several, biases)
    if steps is None:
        raise ValueError("multiply_each: the matrices do not lie as `packed` places them")
    name = "DEFAULT" if biases[0] is None else "BIAS"
    batch = Batch(len(several), *steps, (out, *several[1:], *biases[1:]))
    return _ran(a, several[0], out[0], name, biases[0], batch=batch)


def distances(several: Sequence[Array], biases: Sequence[Array | None]) -> tuple[int, int] | None:
    """From each matrix to the next, and from each bias, as `packed` places those of two bytes.

    None where they lie otherwise: by chance others do too, and their last bits would hang on it.
    """
    if dtype_name(several[0]) not in STORED or layout(several[0]) is None:
        return None
    if biases[0] is not None and not biases[0].flags.c_contiguous:
        return None
    steps = distance(several), distance(biases)
    return None if None in steps else steps  # type: ignore[return-value]


class Batch(NamedTuple):
    """Several products of one first factor."""

    size: int
    apart: int  # elements from one second factor to the next; results follow each other
    vector_apart: int
    beside: tuple[Array | None, ...]  # whose memory it is, but for the first of each


def _ran(
    a: Array,
    b: Array,
    out: Array,
    name: str = "DEFAULT",
    vector: Array | None = None,
    aux: Array | None = None,
    *,
    add: bool = False,
    batch: Batch | None = None,
) -> bool:
    """Whether there is an algorithm with the epilogue of that name, which then was started."""
    own = runtime_of(RUNTIMES, type(a))
    lt = own.library()
    result = matrix(out)
    by_rows = not result.as_it_is
    if name == "BGRAD":  # of b, which is the first factor where rows are
        name += "A" if by_rows else "B"
    # A matrix by rows is made as its transpose, of transposed factors in the other order.
    three = (b, a, out) if by_rows else (a.T, b.T, out.T)
    of = matrix(three[0]), matrix(three[1]), result if by_rows else matrix(three[2])
    if batch is not None:  # by rows, as all that is contiguous is taken to be
        n = batch.size
        of = of[0].several(n, batch.apart), of[1].several(n, 0), of[2].several(n, out.size)
    pointed = 0 if vector is None else vector.data.ptr, 0 if aux is None else aux.data.ptr
    arrays = (a, b, out, vector, aux, *(batch.beside if batch else ()))
    place = own.place([x for x in arrays if x is not None])
    device = type(a), place.device
    if device not in _state.handles:
        _state.handles[device] = lt.create()
    tf32 = place.tf32 and of[0].type == TYPES["float32"]
    kind = of, name, tf32, batch.vector_apart if batch else 0
    plan = _plan(lt, device, kind, pointed)
    if plan is None:
        return False
    plan.point(lt, pointed)
    left, right, d = (x.data.ptr for x in three)
    lt.matmul(
        *(_state.handles[device], plan.operation, ONE, left, plan.a, right, plan.b),
        *(ONE if add else ZERO, d, plan.d, d, plan.d, plan.algorithm.at),
        *(_workspace(own, (*device, place.stream)), WORKSPACE, place.stream),
    )
    return True


def _plan(lt: Any, device: Any, kind: Any, pointed: tuple[int, int]) -> Plan | None:
    """Kept, or made; all are forgotten where they would be too many. kind: as `planned` takes it"""
    key = device, kind, *map(aligned, pointed)
    if key not in _state.plans:
        if len(_state.plans) == KEPT:
            for kept in filter(None, _state.plans.values()):
                kept.close(lt)
            _state.plans.clear()
        _state.plans[key] = planned(lt, _state.handles[device], pointed, *kind)
    return _state.plans[key]


def _workspace(own: Runtime, stream: Any) -> int:
    """The address of a stream's own, on which one product follows another."""
    if stream not in _state.workspaces:
        _state.workspaces[stream] = own.memory(WORKSPACE)
    address: int = _state.workspaces[stream].ptr
    return address
