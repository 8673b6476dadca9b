"""The null device itself: what it counts, what it refuses, and what CuPy makes of that."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np

from null_device import device, stand_ins, work
from null_device.cases import case
from null_device.device import counting, cupy, held, refusing
from null_device.of_options import IDS, SMALL


@contextmanager
def raises(kind: type[BaseException], text: str) -> Any:
    try:
        yield
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}: {text}")


@case("device", "counts")
def counts() -> None:
    """Copies with their bytes, launches with their names, allocations, and waits."""
    host = np.ones((3, 5), np.float32)
    x = cupy.asarray(host)
    x + x  # compiles
    with counting(names=True) as seen:
        y = cupy.asarray(host) + x
        cupy.asnumpy(y)
        cupy.empty(10**8, np.float32)  # from CUDA, behind the pool
    assert (seen.calls("H2D"), seen.bytes("H2D")) == (1, 60)
    assert (seen.calls("D2H"), seen.bytes("D2H")) == (1, 60)
    assert seen.kernels == {"cupy_add__float32_float32_float32": 1}
    assert seen.calls("wait") == 1 and seen.calls("malloc") > 0
    assert seen.peak >= 4 * 10**8
    cupy.get_default_memory_pool().free_all_blocks()


@case("device", "values")
def values() -> None:
    """Numbers are 0, and what is true or false is true."""
    assert cupy.asnumpy(cupy.asarray([1.0, 2.0])).tolist() == [0, 0]
    assert bool(cupy.all(cupy.asarray([1.0, 2.0]) > 3))


@case("device", "a look is refused")
def looks() -> None:
    x = cupy.asarray([1.0])
    actions: list[Callable[[], Any]] = [
        lambda: float(x[0]),
        lambda: bool(x > 0),
        lambda: cupy.asnumpy(x),
        lambda: x[x > 0],
        lambda: cupy.cuda.Device().synchronize(),
        lambda: cupy.cuda.get_current_stream().synchronize(),
    ]
    with refusing(*work.LOOKS):
        for look in actions:
            with raises(AssertionError, "was refused"):
                look()


KERNEL = 'extern "C" __global__ void nothing(float* x) {}'


@case("device", "a launch that no device takes")
def geometry() -> None:
    kernel, x = cupy.RawKernel(KERNEL, "nothing"), cupy.zeros(1, np.float32)
    kernel((1,), (1024,), (x,), shared_mem=48 << 10)
    for grid, block, shared in (
        ((1,), (1025,), 0),
        ((1,), (32, 64), 0),
        ((1,), (1, 1, 65), 0),
        ((1, 65536), (1,), 0),
        ((1,), (32,), (48 << 10) + 1),
    ):
        with raises(AssertionError, "nothing cannot be launched"):
            kernel(grid, block, (x,), shared_mem=shared)
    kernel.max_dynamic_shared_size_bytes = 227 << 10
    kernel((1,), (32,), (x,), shared_mem=227 << 10)
    with raises(AssertionError, "no block has"):
        kernel.max_dynamic_shared_size_bytes = (227 << 10) + 1


@case("device", "a copy outside the allocations")
def outside() -> None:
    x = cupy.zeros(100, np.float32)
    longer = cupy.lib.stride_tricks.as_strided(x, (10**5,), (4,))
    with raises(cupy.cuda.runtime.CUDARuntimeError, "InvalidValue"):
        cupy.asnumpy(longer)
    with raises(cupy.cuda.runtime.CUDARuntimeError, "InvalidValue"):
        longer.data.memset_async(0, 4 * 10**5)


@case("device", "a capture")
def capture() -> None:
    """What waits ends it, and cuBLAS is refused; what is captured is one launch."""
    stream, x = cupy.cuda.Stream(non_blocking=True), cupy.zeros((4, 4), np.float32)
    x + x
    with stream:
        stream.begin_capture()
        y = x + x
        with raises(NotImplementedError, "during a capture"):
            x.dot(x)
        graph = stream.end_capture()
        with counting() as seen:
            graph.launch()
        assert (seen.calls("graph"), seen.bytes("graph"), seen.calls("launch")) == (1, 1, 0)
        for wait in (cupy.cuda.Device().synchronize, cupy.cuda.Stream.null.synchronize):
            stream.begin_capture()
            with raises(Exception, "apture"):
                wait()
            with raises(cupy.cuda.runtime.CUDARuntimeError, "apture"):
                stream.end_capture()
    del y


@case("device", "too little memory")
def too_little() -> None:
    """CuPy frees its pool and asks again; the backend says it in full."""
    cupy.get_default_memory_pool().free_all_blocks()
    before = held()["bytes"]
    device.set_capacity(before + 10**6)
    try:
        with raises(MemoryError, "smaller batches"), work.PLACE.active():
            cupy.empty(10**6, np.float32)
        kept = cupy.empty(200_000, np.float32)
        del kept
        cupy.empty(225_000, np.float32)  # in the place of what the pool held
    finally:
        device.set_capacity(80 * 10**9)


@case("device", "graphs that are gone leave nothing")
def graphs() -> None:
    """Neither memory nor streams, once cuBLASLt's workspaces are gone too."""
    left = []
    for _ in range(3):
        with stand_ins.using("cublaslt"):
            steps = work.Looped(SMALL, IDS, compiled=True, precision="bfloat16")
            for _ in range(3):
                steps()
            del steps
        gc.collect()
        work.PLACE.memory()
        pool = cupy.get_default_memory_pool().total_bytes()
        left.append((held()["bytes"] - pool, held()["streams"], held()["graphs"]))
    assert left == [(0, 0, 0)] * 3, left
