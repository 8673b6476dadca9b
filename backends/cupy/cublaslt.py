"""Matmuls by cuBLASLt, through NVIDIA's bindings (extra `nvmath`) if they are installed.

    multiply(x, w, y, bias=b)              # y = x w + b
    multiply(x.T, dy, dw, sums=db)         # dw = x^T dy, db = sum of dy over its rows
    multiply(more_dy, w.T, dx, add=True)   # dx += more_dy w^T
    multiply_gelu(x, w, y, b, aux)         # y = gelu(aux), aux = x w + b
    multiply_slope(dy, w.T, dx, aux)       # dx = dy w^T gelu'(aux)
    multiply_each(x, [w, w2], ys, [b, b2]) # ys[i] = x w_i + b_i

Matrices are float32, float16 or bfloat16. Sums are in float32; they are rounded to the dtype of
`out` if it has two bytes. `lt_plan` describes the plan that is kept for each kind of matmul.
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
from xformer.backends.cupy.module import contiguous, driver_of
from xformer.backends.cupy.packed import distance
from xformer.backends.cupy.products import product_into
from xformer.backends.cupy.runtimes import Lent, MatmulStream, Runtime, failed
from xformer.base.typing import Array
from xformer.dispatch.shapes import STORED, dtype_name

KEPT = 1024  # plans: a growing sequence needs another kind of matmul for each length


class Plans(dict[Any, Plan | None]):
    """Kind of matmul -> plan, or None if cuBLASLt has no algorithm or failed.

    The plans are freed when the dictionary is deleted.
    """

    def forget(self) -> None:
        """Free the descriptors of all plans, and remove the plans."""
        for plan in filter(None, self.values()):
            _close(plan)
        self.clear()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # a thread ends; when the process ends, it frees all
            self.forget()


def _close(plan: Plan) -> None:
    with suppress(Exception):  # a library that failed may fail here too: some bytes are lost
        plan.close()


class State(threading.local):
    """The state of one thread, since each matmul writes to the descriptors of its plan."""

    def __init__(self) -> None:
        self.handles: dict[Any, Lent] = {}  # device -> handle
        self.plans = Plans()
        self.failure = ""  # why cuBLASLt is no longer called; "" while it is
        self.said: set[Any] = set()  # causes of failures that were reported


_state = State()
_FACTORS = np.array([0, 1], np.float32)  # of the matmul, and of the matrix it is added to
ZERO, ONE = (_FACTORS[i:].ctypes.data for i in range(2))


def runtime_of(like: Array) -> Runtime:
    """Return what the library of an array provides for cuBLASLt."""
    runtime: Runtime = driver_of(type(like)).CUBLASLT
    return runtime


def why_not(x: Array, w: Array) -> str | None:
    """Return why cuBLASLt cannot multiply x and w, or None if it can."""
    lt = runtime_of(x).library()
    if isinstance(lt, str):
        return lt
    if _state.failure:
        return _state.failure
    if dtype_name(x) not in TYPES:
        return f"by cuBLASLt are products of {', '.join(TYPES)}, not {x.dtype.name}"
    return None if x.size and w.size else "an array has no elements"


def readable(x: Array) -> Array:
    """Return x (N, M), or a copy if cuBLASLt cannot read it (see `lt_plan.layout`)."""
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
    """Write out = a b, or out + a b if `add`, with a bias or the sums of b.

    a: (M, K)   b: (K, N)   out: (M, N); all three are `readable`
    bias: (N,), of the dtype of `out`, added to each row; rows of `out` must be contiguous
    sums: (N,), of the dtype of `out`, written: the sum of b over its rows. At most one of `bias`
        and `sums` is given.

    If cuBLASLt has no algorithm with the bias or sums, another launch computes them. If it has no
    algorithm at all or failed, cuBLAS computes the matmul.
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
    """Write aux = a b + bias and out = gelu(aux).

    GELU uses a tanh of low precision, which suffices for bfloat16.
    a: (M, K)   b: (K, N)   bias: (N,)
    out, aux: (M, N), contiguous, aligned to 16 bytes; aux None: it is not written
    """
    name = "GELU" + ("" if aux is None else "_AUX") + ("" if bias is None else "_BIAS")
    if (aux is None or fits_aux(out)) and _ran(a, b, out, name, bias, aux):
        return
    before = out if aux is None else aux
    multiply(a, b, before, bias=bias)
    y, _ = ops.gelu(before, approximate="tanh")
    out[...] = y


def multiply_slope(a: Array, b: Array, out: Array, aux: Array) -> None:
    """Write out (M, N) = a (M, K) b (K, N) times gelu'(aux), elementwise.

    out, aux: (M, N), contiguous, aligned to 16 bytes; aux: from `multiply_gelu`
    """
    if fits_aux(out) and _ran(a, b, out, "DGELU", None, aux):
        return
    multiply(a, b, out)
    _, cache = ops.gelu(aux, approximate="tanh")
    out[...] = cache.backward(out)


def multiply_each(
    a: Array, several: Sequence[Array], out: Array, biases: Sequence[Array | None]
) -> bool:
    """Write out[i] = a several[i] + biases[i] in one launch; return False if no algorithm does it.

    several, biases: stored at equal distances, see `distances`
    out: (len(several), M, N), contiguous
    Raises ValueError if the distances are not equal.
    """
    steps = distances(several, biases)
    if steps is None:
        raise ValueError("multiply_each: the matrices do not lie as `packed` places them")
    name = "DEFAULT" if biases[0] is None else "BIAS"
    batch = Batch(len(several), *steps, (out, *several[1:], *biases[1:]))
    return _ran(a, several[0], out[0], name, biases[0], batch=batch)


def distances(several: Sequence[Array], biases: Sequence[Array | None]) -> tuple[int, int] | None:
    """Return the elements from each matrix to the next, and from each bias to the next.

    Returns None unless the arrays have two bytes a number and are stored as `packed` stores them.
    Other arrays may be at equal distances by chance; the last bits of results would depend on it.
    """
    if dtype_name(several[0]) not in STORED or layout(several[0]) is None:
        return None
    if biases[0] is not None and not biases[0].flags.c_contiguous:
        return None
    steps = distance(several), distance(biases)
    return None if None in steps else steps  # type: ignore[return-value]


class Batch(NamedTuple):
    """A batch of matmuls with the same first factor."""

    size: int
    apart: int  # elements from one second factor to the next; results are adjacent
    vector_apart: int  # elements from one bias to the next
    beside: tuple[Array | None, ...]  # all results, and the second factors and biases but the first


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
    """Start the matmul with the epilogue `name`; return whether cuBLASLt has an algorithm for it.

    vector: the bias or sums of the epilogue   aux: its matrix
    Returns False also if cuBLASLt fails; it is then not called again for this kind of matmul.
    """
    if _state.failure:
        return False
    result = matrix(out)
    by_rows = not result.as_it_is
    if name == "BGRAD":  # the sums of b, which is cuBLASLt's first factor if `out` is by rows
        name += "A" if by_rows else "B"
    # If `out` is by rows, its transpose is computed: transposed factors in the other order.
    three = (b, a, out) if by_rows else (a.T, b.T, out.T)
    of = matrix(three[0]), matrix(three[1]), result if by_rows else matrix(three[2])
    if batch is not None:  # `out` is by rows, since it is contiguous
        n = batch.size
        of = of[0].several(n, batch.apart), of[1].several(n, 0), of[2].several(n, out.size)
    pointed = 0 if vector is None else vector.data.ptr, 0 if aux is None else aux.data.ptr
    arrays = (a, b, out, vector, aux, *(batch.beside if batch else ()))
    runtime = runtime_of(a)
    stream = runtime.stream_of([x for x in arrays if x is not None])
    tf32 = stream.tf32 and of[0].type == TYPES["float32"]
    device, apart = (type(a), stream.device), batch.vector_apart if batch else 0
    key = device, of, name, tf32, apart, *map(aligned, pointed)
    try:
        return _started(runtime, stream, key, pointed, three, add)
    except MemoryError:  # of the device: every other matmul needs memory too
        raise
    except Exception as error:
        # Bindings and cuda.core of other versions raise AttributeError and TypeError; cuBLASLt
        # raises cuBLASLtError with any status. Another library can compute the matmul.
        _fail(runtime.library(), key, error)
        return False


def _started(
    runtime: Runtime,
    stream: MatmulStream,
    key: Any,
    pointed: tuple[int, int],
    three: tuple[Array, Array, Array],
    add: bool,
) -> bool:
    """Start the matmul if the kind `key` has a plan; return whether it has one.

    pointed: addresses of the epilogue's vector and matrix, or 0
    three: the factors and the result, in cuBLASLt's order   add: whether to add to the result
    """
    lt, plan = runtime.library(), _plan(runtime.library(), key, pointed)
    if plan is None:
        return False
    plan.point(lt, pointed)
    # When this returns, the workspace is free for later work of this stream, but of no other.
    workspace = runtime.allocate(plan.workspace) if plan.workspace else None
    left, right, d = (x.data.ptr for x in three)
    lt.matmul(
        *(_state.handles[key[0]].handle, plan.operation, ONE, left, plan.a, right, plan.b),
        *(ONE if add else ZERO, d, plan.d, d, plan.d, plan.algorithm.at),
        *(0 if workspace is None else workspace.ptr, plan.workspace, stream.address),
    )
    return True


def _plan(lt: Any, key: Any, pointed: tuple[int, int]) -> Plan | None:
    """Return the plan of the kind `key`, from `_ran`; it is made if it is not kept.

    If there are already `KEPT` plans, all are freed before another is made.
    """
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
    """Stop calling cuBLASLt for the kind `key`, or for all kinds; warn once for each cause."""
    device, _, name, *_ = key
    if plan := _state.plans.get(key):
        _close(plan)
    _state.plans[key] = None
    is_lt = isinstance(error, getattr(lt, "cuBLASLtError", ()))
    if device in _state.handles and (is_lt or name != "DEFAULT"):
        instead = "such products are made in another way from now on"
        failed(_state.said, "a product by cuBLASLt", error, instead)
    else:
        instead = "products are by cuBLAS from now on"
        _state.failure = failed(_state.said, "cuBLASLt", error, instead)
