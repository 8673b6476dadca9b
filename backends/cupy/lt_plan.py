"""What is kept of a kind of product by cuBLASLt: descriptors, and the algorithm that it advises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from xformer.typing import Array

WORKSPACE = 32 << 20  # bytes that an algorithm may ask for, as NVIDIA advises for Hopper
AUX_STEP = 8  # elements, of which its rows are a multiple
ALIGNMENT = 256  # bytes, which cuBLASLt takes for granted unless it is told otherwise
KEPT = 4096  # ways in which matrices lie

# Of library_types.h and cublas_api.h.
TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
WIDTHS = {0: 4, 2: 2, 14: 2}  # bytes
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77
SUCCESS, NOT_SUPPORTED = 0, 15


class Matrix(NamedTuple):
    """A matrix in memory as cuBLASLt counts, by columns: one by rows is its own transpose there."""

    type: int
    rows: int
    columns: int
    step: int  # elements from one column to the next
    as_it_is: bool  # else its transpose
    alignment: int  # bytes
    batch: int = 1  # how many of them there are
    apart: int = 0  # elements from one to the next

    def several(self, batch: int, apart: int) -> Matrix:
        """This and others like it behind it, or as many times this one where they are 0 apart."""
        aligned_too = self.alignment if not apart else aligned(apart * WIDTHS[self.type])
        return self._replace(batch=batch, apart=apart, alignment=min(self.alignment, aligned_too))


def layout(x: Array) -> tuple[bool, int] | None:
    """Whether x (N, M) lies by rows, else by columns, and elements from one to the next.

    None where the elements of neither are contiguous, or rows overlap.
    """
    return _layout(x.shape, x.strides, x.itemsize)


@functools.lru_cache(KEPT)  # a model has few, and to work them out takes longer than to look
def _layout(shape: tuple[int, int], strides: tuple[int, int], size: int) -> tuple[bool, int] | None:
    (n, m), (down, across) = shape, strides
    if (across == size or m == 1) and (n == 1 or down >= m * size):
        return True, m if n == 1 else down // size
    if (down == size or n == 1) and (m == 1 or across >= n * size):
        return False, n if m == 1 else across // size
    return None


def matrix(x: Array) -> Matrix:
    """x (N, M) for cuBLASLt; ValueError where it has no layout."""
    return _matrix(x.shape, x.strides, x.dtype, aligned(x.data.ptr))


@functools.lru_cache(KEPT)
def _matrix(shape: tuple[int, int], strides: tuple[int, int], dtype: Any, alignment: int) -> Matrix:
    found = _layout(shape, strides, dtype.itemsize)
    if found is None:
        raise ValueError(f"cuBLASLt needs contiguous rows or columns, got strides {strides}")
    by_rows, step = found
    n, m = reversed(shape) if by_rows else shape
    return Matrix(TYPES[dtype.name], n, m, step, not by_rows, alignment)


def aligned(address: int) -> int:
    """The power of two that an address is a multiple of, as far as it matters."""
    power = address & -address
    return power if power < ALIGNMENT else ALIGNMENT


def fits_aux(out: Array) -> bool:
    """Whether out (N, M), contiguous, may have an array of its shape beside it in an epilogue."""
    return bool(out.shape[1] % AUX_STEP == 0)


class Held(NamedTuple):
    """Memory of the host that cuBLASLt reads, and its address, for which NumPy takes long."""

    values: np.ndarray
    at: int


def held(values: np.ndarray) -> Held:
    """As the array lies."""
    return Held(values, values.ctypes.data)


class Plan(NamedTuple):
    """d = op(a) op(b) with an epilogue."""

    operation: int
    a: int
    b: int
    d: int
    algorithm: Held
    pointed: Held  # the addresses of the epilogue's vector, and of its matrix
    close: Callable[[], None]  # frees what cuBLASLt holds
    workspace: int = 0  # bytes that the algorithm needs

    def point(self, lt: Any, pointed: tuple[int, int]) -> None:
        """The epilogue's vector and matrix are those at these addresses, where there are any."""
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
    """The plan of a product of two matrices into a third; None where there is no algorithm.

    pointed: the addresses of the epilogue's vector and of its matrix, which lies as the third one,
    or 0; the heuristics see how they are aligned. vector_apart: elements from the vector of one of
    several products to that of the next.
    """
    with ExitStack() as stack:  # what was created, where anything raises
        plan = _plan(lt, stack, of, COMPUTE_32F_FAST_TF32 if tf32 else COMPUTE_32F)
        _describe(lt, plan, pointed, of, epilogue, vector_apart)
        if not _advised(lt, handle, plan, of):
            return None
        size = int(plan.algorithm.values["workspace_size"][0])
        return plan._replace(close=stack.pop_all().close, workspace=size)


def _plan(lt: Any, stack: ExitStack, of: tuple[Matrix, Matrix, Matrix], compute: int) -> Plan:
    """Descriptors, which `stack` frees, and room for an algorithm."""
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
        names.TRANSA: int(of[0].as_it_is),  # what is wanted is the transpose of each
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
    """The descriptor of a matrix, or of several."""
    made: int = lt.matrix_layout_create(x.type, x.rows, x.columns, x.step)
    stack.callback(lt.matrix_layout_destroy, made)
    if x.batch > 1:
        names = lt.MatrixLayoutAttribute
        several = {names.BATCH_COUNT: x.batch, names.STRIDED_BATCH_OFFSET: x.apart}
        _set(lt.matrix_layout_set_attribute, lt.get_matrix_layout_attribute_dtype, made, several)
    return made


def _advised(lt: Any, handle: int, plan: Plan, of: tuple[Matrix, Matrix, Matrix]) -> bool:
    """Whether there is an algorithm, which `plan.algorithm` then holds.

    What is split among blocks is added up in float32 in the workspace, by a step of its own: other
    schemes round parts to the type of d, or add them in the order in which they are ready.
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
    found = np.zeros(1, np.int32)
    preference = lt.matmul_preference_create()
    set_one, dtype = lt.matmul_preference_set_attribute, lt.get_matmul_preference_attribute_dtype
    try:
        _set(set_one, dtype, preference, attributes)
        descriptors = (plan.operation, plan.a, plan.b, plan.d, plan.d, preference)
        results = plan.algorithm.at, found.ctypes.data
        lt.matmul_algo_get_heuristic(handle, *descriptors, 1, *results)
    except lt.cuBLASLtError as error:
        if error.status != NOT_SUPPORTED:
            raise
        return False
    finally:
        lt.matmul_preference_destroy(preference)
    return bool(found[0]) and bool(plan.algorithm.values["state"][0] == SUCCESS)


def _set(
    set_one: Callable[..., None],
    dtype: Callable[[int], Any],
    descriptor: int,
    attributes: dict[int, int],
) -> None:
    """Each attribute in the bytes that the bindings say it has."""
    for name, number in attributes.items():
        held = np.array([number], dtype(name))
        set_one(descriptor, name, held.ctypes.data, held.nbytes)
