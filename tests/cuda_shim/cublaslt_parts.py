"""Names and arithmetic of cuBLASLt, for `cuda_shim.cublaslt`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

# nvmath.CudaDataType and nvmath.bindings.cublas.ComputeType.
NAMES = {0: "float32", 2: "float16", 14: "bfloat16"}
WIDTHS = {0: 4, 2: 2, 14: 2}  # bytes
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77
INVALID_VALUE, NOT_SUPPORTED = 7, 15
SPLIT = 32  # numbers


RESULT = np.dtype(
    [
        ("algo", [("data_", "<u8", (8,))]),
        ("workspace_size", "<u8"),
        ("state", "<i4"),
        ("waves_count", "<f4"),
        ("reserved", "<i4", (4,)),
    ]
)


class Epilogue(IntEnum):
    """Bits: 4 a bias, 32 GELU, 128 with an array beside, 64 its slope, 256 and 512 sums."""

    DEFAULT = 1
    BIAS = 4
    GELU = 32
    GELU_BIAS = 36
    GELU_AUX = 160
    GELU_AUX_BIAS = 164
    DGELU = 192
    BGRADA = 256
    BGRADB = 512

    @property
    def has_vector(self) -> bool:
        return bool(self & (4 | 256 | 512))

    @property
    def has_aux(self) -> bool:
        return bool(self & 128)


class ReductionScheme(IntEnum):
    NONE = 0
    INPLACE = 1
    COMPUTE_TYPE = 2
    OUTPUT_TYPE = 4


class MatmulDescAttribute(IntEnum):
    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    BIAS_BATCH_STRIDE = 10
    EPILOGUE_AUX_POINTER = 11
    EPILOGUE_AUX_LD = 12
    BIAS_DATA_TYPE = 26


class MatrixLayoutAttribute(IntEnum):
    BATCH_COUNT = 5
    STRIDED_BATCH_OFFSET = 6


class MatmulPreferenceAttribute(IntEnum):
    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


class cuBLASLtError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Layout(NamedTuple):
    type: int
    rows: int
    cols: int
    ld: int
    count: int = 1
    apart: int = 0


class Product(NamedTuple):
    """What was asked for."""

    epilogue: Epilogue
    transposed: tuple[int, int]
    layouts: tuple[Layout, Layout, Layout]
    compute: int
    beta: float
    scheme: int
    stream: int


# ---- Memory and arithmetic ----

ROOT = math.sqrt(2 / math.pi)


def gelu(x: np.ndarray) -> np.ndarray:
    """By tanh, to as many digits as its instruction has."""
    return 0.5 * x * (1 + _tanh(x))


def slope(x: np.ndarray) -> np.ndarray:
    tanh = _tanh(x)
    inner = ROOT * (1 + 3 * 0.044715 * x**2)
    found: np.ndarray = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * inner
    return found


def _tanh(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.tanh(ROOT * (x + 0.044715 * x**3))
    return found * np.float32(1 + 2.0**-11)


def memory(at: int, dtype: np.dtype, count: int) -> np.ndarray:
    held = (ctypes.c_char * (count * dtype.itemsize)).from_address(at)
    return np.frombuffer(held, np.uint8).view(dtype)


class Held:
    """Bytes of a workspace, on the stream that was the current one; there as long as it is held."""

    def __init__(self, size: int, stream: Any) -> None:
        self.size, self.stream = size, stream
        self._block = np.empty(size + 256, np.uint8)
        self.ptr = self._block.ctypes.data + -self._block.ctypes.data % 256


def told_to_raise(library: Any, raises: Mapping[str, BaseException]) -> None:
    """Functions of a library, or of a graph, which raise what a test names."""

    def raising(error: BaseException) -> Callable[..., Any]:
        def fails(*_: Any, **__: Any) -> Any:
            raise error

        return fails

    for name, error in raises.items():
        if hasattr(library, name):
            setattr(library, name, raising(error))


def read(kind: Any, buf: int, size: int) -> int:
    if size != np.dtype(kind).itemsize:
        raise cuBLASLtError(INVALID_VALUE)
    return int(memory(buf, np.dtype(kind), 1)[0])


def rounded(x: np.ndarray, compute: int) -> np.ndarray:
    """To TF32 where that was asked for: 10 bits behind the point."""
    if compute != COMPUTE_32F_FAST_TF32:
        return x
    bits = np.ascontiguousarray(x).view(np.uint32) + np.uint32(1 << 12)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def product(a: np.ndarray, b: np.ndarray, dtype: Any, mask: int, noise: float) -> np.ndarray:
    """As `Array.dot`; long sums in two parts, added up by the worst scheme that is allowed."""
    if a.shape[1] < SPLIT:
        return a @ b
    half = a.shape[1] // 2
    a, b = a.astype(np.float64), b.astype(np.float64)
    parts = [x.astype(np.float32) for x in (a[:, :half] @ b[:half], a[:, half:] @ b[half:])]
    if mask & (ReductionScheme.INPLACE | ReductionScheme.OUTPUT_TYPE):
        parts = [part.astype(dtype).astype(np.float32) for part in parts]
    total: np.ndarray = parts[0] + parts[1]
    if mask & ReductionScheme.INPLACE:  # in whatever order
        total = total * np.float32(1 + 1e-6 * noise)
    return total
