"""The stand-in of cuBLASLt beside NVIDIA's bindings, which need no GPU to be looked at."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from cuda_shim import CublasLt
from cuda_shim.cublaslt_parts import COMPUTE_32F, COMPUTE_32F_FAST_TF32, NAMES, RESULT

from xformer.backends.cupy import lt_plan

WHY = "NVIDIA's bindings of cuBLASLt are missing: extra nvmath"
nvmath = pytest.importorskip("nvmath", reason=WHY)
real = pytest.importorskip("nvmath.bindings.cublasLt", reason=WHY)
compute = pytest.importorskip("nvmath.bindings.cublas", reason=WHY).ComputeType

CODES = {"float32": "CUDA_R_32F", "float16": "CUDA_R_16F", "bfloat16": "CUDA_R_16BF"}
OWN = ("stream_of", "allocate")  # what is no function of the library
FUNCTIONS = [
    name
    for name, own in vars(CublasLt).items()
    if inspect.isfunction(own) and not name.startswith("_") and name not in OWN
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_have_their_names(name: str) -> None:
    _, *names = inspect.signature(getattr(CublasLt, name)).parameters
    assert names == list(inspect.signature(getattr(real, name)).parameters)


@pytest.mark.parametrize(
    "name",
    [
        "Epilogue",
        "ReductionScheme",
        "MatmulDescAttribute",
        "MatrixLayoutAttribute",
        "MatmulPreferenceAttribute",
    ],
)
def test_values_are_theirs(name: str) -> None:
    values = {member.name: member.value for member in getattr(real, name)}
    assert {
        member.name: member.value for member in getattr(CublasLt, name)
    }.items() <= values.items()


def test_attributes_have_their_sizes() -> None:
    own = CublasLt()
    for name in CublasLt.MatmulDescAttribute:
        wanted = real.get_matmul_desc_attribute_dtype(name)
        assert own.get_matmul_desc_attribute_dtype(name) == wanted, name
    for name in CublasLt.MatrixLayoutAttribute:
        wanted = real.get_matrix_layout_attribute_dtype(name)
        assert own.get_matrix_layout_attribute_dtype(name) == wanted, name
    for name in CublasLt.MatmulPreferenceAttribute:
        wanted = real.get_matmul_preference_attribute_dtype(name)
        assert own.get_matmul_preference_attribute_dtype(name) == wanted, name


def test_types_are_theirs() -> None:
    codes = {name: nvmath.CudaDataType[code].value for name, code in CODES.items()}
    assert codes == lt_plan.TYPES == {name: code for code, name in NAMES.items()}
    assert compute.COMPUTE_32F == COMPUTE_32F == lt_plan.COMPUTE_32F
    tf32 = COMPUTE_32F_FAST_TF32
    assert compute.COMPUTE_32F_FAST_TF32 == tf32 == lt_plan.COMPUTE_32F_FAST_TF32


def test_results_lie_as_theirs() -> None:
    theirs = np.dtype(real.matmul_heuristic_result_dtype)
    assert theirs.itemsize == RESULT.itemsize
    assert RESULT.fields is not None and theirs.fields is not None
    places = ({name: field[1] for name, field in d.fields.items()} for d in (RESULT, theirs))
    assert next(places) == next(places)
