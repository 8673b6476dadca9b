"""Where products of the stand-in's arrays are by cuBLASLt: where a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from xformer.backends.cupy import cublaslt
from xformer.backends.cupy.cublaslt import Runtime, State

from cuda_shim.array import Array
from cuda_shim.cublaslt import CublasLt

NOT_ASKED_FOR = "on the stand-in cuBLASLt is called where a test asks for it"
_now: list[CublasLt] = []


@contextmanager
def calling(lt: CublasLt) -> Iterator[CublasLt]:
    """Within this context products are by cuBLASLt's stand-in."""
    before, cublaslt._state = cublaslt._state, State()
    _now.append(lt)
    try:
        yield lt
    finally:
        _now.pop()
        cublaslt._state = before


cublaslt.RUNTIMES[Array] = Runtime(
    lambda: _now[-1] if _now else NOT_ASKED_FOR,
    lambda arrays: _now[-1].place(arrays),
    lambda size: _now[-1].memory(size),
)
