"""The plan of a kind of matmul by cuBLASLt: descriptors, and the algorithm of its heuristics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from xformer.base.typing import Array

WORKSPACE = 32 << 20  # bytes that an algorithm may use, as NVIDIA recommends for Hopper
AUX_STEP = 8  # rows of an epilogue's matrix have a multiple of so many elements
ALIGNMENT = 256  # bytes; cuBLASLt assumes this alignment unless another one is set
KEPT = 4096  # layouts that are cached

# Constants of library_types.h and cublas_api.h.
TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
WIDTHS = {0: 4, 2: 2, 14: 2}  # bytes
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77
SUCCESS, NOT_SUPPORTED = 0, 15


class Matrix(NamedTuple):
    """A matrix in memory as cuBLASLt reads it: by columns. A matrix by rows is read transposed."""

    type: int
    rows: int
    columns: int
    step: int  # elements from one column to the next
    as_it_is: bool  # whether it is read as it is, else transposed
    alignment: int  # bytes
    batch: int = 1  # number of matrices
    apart: int = 0  # elements from one matrix to the next

    def several(self, batch: int, apart: int) -> Matrix:
        """Return a batch of matrices of this layout. This matrix is the first.

        batch: number of matrices
        apart: elements from one to the next; 0: each is this matrix
        """
        aligned_too = self.alignment if not apart else aligned(apart * WIDTHS[self.type])
        return self._replace(batch=batch, apart=apart, alignment=min(self.alignment, aligned_too))


def layout(x: Array) -> tuple[bool, int] | None:
    """Return (whether x (N, M) is stored by rows, elements from one row or column to the next).

    Returns None if neither rows nor columns are contiguous, or they overlap.
    """
    return _matrix_layout(x.shape, x.strides, x.itemsize)


@functools.lru_cache(KEPT)  # a model has few layouts, and a look-up is faster than computing them
def _matrix_layout(
    shape: tuple[int, int], strides: tuple[int, int], size: int
) -> tuple[bool, int] | None:
    """Return `layout` of a matrix. strides: in bytes. size: bytes of an element."""
    (n, m), (row_stride, column_stride) = shape, strides
    if (column_stride == size or m == 1) and (n == 1 or row_stride >= m * size):
        return True, m if n == 1 else row_stride // size
    if (row_stride == size or n == 1) and (m == 1 or column_stride >= n * size):
        return False, n if m == 1 else column_stride // size
    return None


def matrix(x: Array) -> Matrix:
    """Return x (N, M) as cuBLASLt reads it. Raises ValueError if it has no layout."""
    return _matrix(x.shape, x.strides, x.dtype, aligned(x.data.ptr))


@functools.lru_cache(KEPT)
def _matrix(shape: tuple[int, int], strides: tuple[int, int], dtype: Any, alignment: int) -> Matrix:
    layout_of_x = _matrix_layout(shape, strides, dtype.itemsize)
    if layout_of_x is None:
        raise ValueError(f"cuBLASLt needs contiguous rows or columns, got strides {strides}")
    by_rows, step = layout_of_x
    n, m = reversed(shape) if by_rows else shape
    return Matrix(TYPES[dtype.name], n, m, step, not by_rows, alignment)


def aligned(address: int) -> int:
    """Return the largest power of two that divides the address, at most `ALIGNMENT`."""
    power = address & -address
    return power if power < ALIGNMENT else ALIGNMENT


def fits_aux(out: Array) -> bool:
    """Return whether an epilogue may read or write a matrix of the shape of out (N, M)."""
    return bool(out.shape[1] % AUX_STEP == 0)


class Held(NamedTuple):
    """Host memory that cuBLASLt reads, and its address, which NumPy takes long to return."""

    values: np.ndarray
    at: int


def held(values: np.ndarray) -> Held:
    """Return the pair of a host array and its address. The pair keeps the array alive."""
    return Held(values, values.ctypes.data)


class Plan(NamedTuple):
    """Descriptors and the algorithm of d = op(a) op(b) with an epilogue."""

    operation: int
    a: int
    b: int
    d: int
    algorithm: Held
    pointed: Held  # the addresses of the epilogue's vector, and of its matrix
    close: Callable[[], None]  # frees the descriptors
    workspace: int = 0  # bytes that the algorithm needs

    def point(self, lt: Any, pointed: tuple[int, int]) -> None:
        """Set the addresses of the epilogue's vector and matrix; 0: there is none."""
        names = lt.MatmulDescAttribute
        for i, name in enumerate((names.BIAS_POINTER, names.EPILOGUE_AUX_POINTER)):
            if pointed[i]:
                self.pointed.values[i] = pointed[i]
                lt.matmul_desc_set_attribute(self.operation, name, self.pointed.at + 8 * i, 8)


def planned(
    lt: Any,
    handle: int,
    pointed: tuple[int, int],
    of: tuple[Matrix, Matrix, Matrix],
    epilogue: str,
    tf32: bool,
    vector_apart: int = 0,
) -> Plan | None:
    """Return the plan of a matmul, or None if cuBLASLt has no algorithm for it.

    pointed: addresses of the epilogue's vector and matrix, or 0; the heuristics use their
        alignment. The matrix has the layout of the result.
    of: the two factors and the result
    epilogue: a name of `Epilogue`
    tf32: whether float32 factors may be rounded to TF32
    vector_apart: of a batch, the elements from one vector to the next
    """
    with ExitStack() as stack:  # frees the descriptors if anything raises
        plan = _plan(lt, stack, of, COMPUTE_32F_FAST_TF32 if tf32 else COMPUTE_32F)
        _describe(lt, plan, pointed, of, epilogue, vector_apart)
        if not _advised(lt, handle, plan, of):
            return None
        size = int(plan.algorithm.values["workspace_size"][0])
        return plan._replace(close=stack.pop_all().close, workspace=size)


def _plan(lt: Any, stack: ExitStack, of: tuple[Matrix, Matrix, Matrix], compute: int) -> Plan:
    """Return a plan with descriptors, which `stack` frees, and an empty algorithm."""
    operation = lt.matmul_desc_create(compute, TYPES["float32"])
    stack.callback(lt.matmul_desc_destroy, operation)
    a, b, d = (_described(lt, stack, x) for x in of)
    algorithm = held(np.zeros(1, lt.matmul_heuristic_result_dtype))
    pointed = held(np.zeros(2, np.int64))
    return Plan(operation, a, b, d, algorithm, pointed, stack.close)


def _describe(
    lt: Any,
    plan: Plan,
    pointed: tuple[int, int],
    of: tuple[Matrix, Matrix, Matrix],
    epilogue: str,
    vector_apart: int,
) -> None:
    names = lt.MatmulDescAttribute
    attributes = {
        names.TRANSA: int(of[0].as_it_is),  # the matmul needs the transpose of each factor
        names.TRANSB: int(of[1].as_it_is),
        names.EPILOGUE: lt.Epilogue[epilogue],
    }
    if pointed[0]:
        attributes[names.BIAS_DATA_TYPE] = of[2].type
        if of[2].batch > 1:
            attributes[names.BIAS_BATCH_STRIDE] = vector_apart
    if pointed[1]:
        attributes[names.EPILOGUE_AUX_LD] = of[2].step
    plan.point(lt, pointed)
    set_one, dtype = lt.matmul_desc_set_attribute, lt.get_matmul_desc_attribute_dtype
    _set(set_one, dtype, plan.operation, attributes)


def _described(lt: Any, stack: ExitStack, x: Matrix) -> int:
    """Return the descriptor of a matrix, or of a batch; `stack` frees it."""
    descriptor: int = lt.matrix_layout_create(x.type, x.rows, x.columns, x.step)
    stack.callback(lt.matrix_layout_destroy, descriptor)
    if x.batch > 1:
        names = lt.MatrixLayoutAttribute
        several = {names.BATCH_COUNT: x.batch, names.STRIDED_BATCH_OFFSET: x.apart}
        _set(
            lt.matrix_layout_set_attribute,
            lt.get_matrix_layout_attribute_dtype,
            descriptor,
            several,
        )
    return descriptor


def _advised(lt: Any, handle: int, plan: Plan, of: tuple[Matrix, Matrix, Matrix]) -> bool:
    """Store the best algorithm of the heuristics in `plan.algorithm`; return whether there is one.

    If blocks split a sum, a separate step adds the parts in float32 in the workspace. Other schemes
    are excluded: they round parts to the type of d, or add them in the order of completion.
    """
    names = lt.MatmulPreferenceAttribute
    attributes = {
        names.MAX_WORKSPACE_BYTES: WORKSPACE,
        names.REDUCTION_SCHEME_MASK: lt.ReductionScheme.COMPUTE_TYPE,
        names.MIN_ALIGNMENT_A_BYTES: of[0].alignment,
        names.MIN_ALIGNMENT_B_BYTES: of[1].alignment,
        names.MIN_ALIGNMENT_C_BYTES: of[2].alignment,
        names.MIN_ALIGNMENT_D_BYTES: of[2].alignment,
    }
    count = np.zeros(1, np.int32)
    preference = lt.matmul_preference_create()
    set_one, dtype = lt.matmul_preference_set_attribute, lt.get_matmul_preference_attribute_dtype
    try:
        _set(set_one, dtype, preference, attributes)
        descriptors = (plan.operation, plan.a, plan.b, plan.d, plan.d, preference)
        results = plan.algorithm.at, count.ctypes.data
        lt.matmul_algo_get_heuristic(handle, *descriptors, 1, *results)
    except lt.cuBLASLtError as error:
        if error.status != NOT_SUPPORTED:
            raise
        return False
    finally:
        lt.matmul_preference_destroy(preference)
    return bool(count[0]) and bool(plan.algorithm.values["state"][0] == SUCCESS)


def _set(
    set_one: Callable[..., None],
    dtype: Callable[[int], Any],
    descriptor: int,
    attributes: dict[int, int],
) -> None:
    """Set the attributes of a descriptor, each in the type that the bindings name for it."""
    for name, number in attributes.items():
        held = np.array([number], dtype(name))
        set_one(descriptor, name, held.ctypes.data, held.nbytes)
