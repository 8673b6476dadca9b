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

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.cupy.column_sums import row_sums
from xformer.backends.cupy.lt_plan import (
    TYPES,
    Plan,
    aligned,
    fits_aux,
    layout,
    matrix,
    planned,
)
from xformer.backends.cupy.module import contiguous
from xformer.backends.cupy.packed import distance
from xformer.backends.cupy.products import product_into
from xformer.backends.cupy.runtimes import Lent, Runtime, failed, runtime_of
from xformer.shapes import STORED, dtype_name
from xformer.typing import Array

KEPT = 1024  # plans: texts that grow have products of another kind for each length


class Place(NamedTuple):
    """Where work goes."""

    device: int
    stream: int  # its address
    tf32: bool  # whether factors of float32 may be rounded


RUNTIMES: dict[type, Runtime] = {}


class Plans(dict[Any, Plan | None]):
    """Of kinds of products; None: cuBLASLt has no algorithm, or failed. They are freed with it."""

    def forget(self) -> None:
        """Free what cuBLASLt holds."""
        for plan in filter(None, self.values()):
            _close(plan)
        self.clear()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # when a thread ends; else the process frees all
            self.forget()


def _close(plan: Plan) -> None:
    with suppress(Exception):  # a library that has failed may fail at this too: some bytes are lost
        plan.close()


class State(threading.local):
    """Of one thread: descriptors are written to before each product."""

    def __init__(self) -> None:
        self.handles: dict[Any, Lent] = {}  # of a device
        self.plans = Plans()
        self.failure = ""  # why cuBLASLt is not asked any more
        self.said: set[Any] = set()  # causes of failures


_state = State()
_FACTORS = np.array([0, 1], np.float32)  # of a product, and of what it is added to
ZERO, ONE = (_FACTORS[i:].ctypes.data for i in range(2))


def why_not(x: Array, w: Array) -> str | None:
    """Why products of x and w are not cuBLASLt's; None where they are."""
    lt = runtime_of(RUNTIMES, type(x)).library()
    if isinstance(lt, str):
        return lt
    if _state.failure:
        return _state.failure
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
    algorithm that does both; by cuBLAS where it has none at all, or failed.
    """
    name, vector = ("BIAS", bias) if sums is None else ("BGRAD", sums)
    if _ran(a, b, out, name if vector is not None else "DEFAULT", vector, add=add):
        return
    if vector is None or not _ran(a, b, out, add=add):
        product_into(a, b, out, add=add)
    if sums is not None:
        sums[...] = row_sums(contiguous(b))
    elif bias is not None:
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
    """Whether there is an algorithm with the epilogue of that name, which then was started.

    False too where cuBLASLt fails: it is not asked again for this kind of product.
    """
    if _state.failure:
        return False
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
    own = runtime_of(RUNTIMES, type(a))
    place = own.place([x for x in arrays if x is not None])
    tf32 = place.tf32 and of[0].type == TYPES["float32"]
    device, apart = (type(a), place.device), batch.vector_apart if batch else 0
    key = device, of, name, tf32, apart, *map(aligned, pointed)
    try:
        return _started(own, place, key, pointed, three, add)
    except MemoryError:  # of the device: no way of making products does without memory
        raise
    except Exception as error:
        # Whatever it is: bindings and cuda.core of other versions raise AttributeError and
        # TypeError, the library its own error with any status. Other ways can make the product.
        _fail(own.library(), key, error)
        return False


def _started(
    own: Runtime,
    place: Place,
    key: Any,
    pointed: tuple[int, int],
    three: tuple[Array, Array, Array],
    add: bool,
) -> bool:
    """Whether there is an algorithm for such a kind, which then was started."""
    lt, plan = own.library(), _plan(own.library(), key, pointed)
    if plan is None:
        return False
    plan.point(lt, pointed)
    # Back in the pool when this returns, it serves only what comes later on the same stream.
    held = own.memory(plan.workspace) if plan.workspace else None
    left, right, d = (x.data.ptr for x in three)
    lt.matmul(
        *(_state.handles[key[0]].handle, plan.operation, ONE, left, plan.a, right, plan.b),
        *(ONE if add else ZERO, d, plan.d, d, plan.d, plan.algorithm.at),
        *(0 if held is None else held.ptr, plan.workspace, place.stream),
    )
    return True


def _plan(lt: Any, key: Any, pointed: tuple[int, int]) -> Plan | None:
    """Kept, or made; all are forgotten where they would be too many. key: of `_ran`."""
    plans = _state.plans
    if key not in plans:
        if len(plans) >= KEPT:
            plans.forget()
        device, of, name, tf32, apart, *_ = key
        if device not in _state.handles:
            _state.handles[device] = Lent(lt, device[1], lt.create)
        handle = _state.handles[device].handle
        plans[key] = planned(lt, handle, pointed, of, name, tf32, apart)
    return plans[key]


def _fail(lt: Any, key: Any, error: Exception) -> None:
    """Do not ask cuBLASLt for such a kind again, or not at all, and say so once a cause."""
    device, _, name, *_ = key
    if plan := _state.plans.get(key):
        _close(plan)
    _state.plans[key] = None
    is_own = isinstance(error, getattr(lt, "cuBLASLtError", ()))
    if device in _state.handles and (is_own or name != "DEFAULT"):
        instead = "such products are made in another way from now on"
        failed(_state.said, "a product by cuBLASLt", error, instead)
    else:
        instead = "products are by cuBLAS from now on"
        _state.failure = failed(_state.said, "cuBLASLt", error, instead)
