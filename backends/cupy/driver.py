"""Launches kernels on CuPy's arrays. NVRTC compiles a kernel at its first launch."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from xformer.backends.cupy import packages
from xformer.backends.cupy.cudnn_support import OLDEST
from xformer.backends.cupy.runtimes import AttentionStream, MatmulStream, Runtime
from xformer.base.typing import Array

if TYPE_CHECKING:
    from xformer.backends.cupy.module import Source

FREELY = 48 << 10  # bytes of dynamic shared memory that a kernel has without a request

ARRAY = cupy.ndarray
empty = cupy.empty
_NULL = np.uint64(0)
_modules: dict[Any, Any] = {}
_kernels: dict[Any, tuple[Any, type]] = {}  # kernel, and the type of its floating-point arguments
_granted: dict[Any, int] = {}  # (kernel, device) -> bytes of dynamic shared memory requested


def launch(
    source: Source,
    name: str,
    like: Array,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: tuple[Any, ...],
    shared: int,
    macros: dict[str, Any],
) -> None:
    """Run a kernel on CuPy's current device and stream; the arguments are those of `module.launch`.

    Raises ValueError if an array is on another device.
    """
    current = cupy.cuda.runtime.getDevice()
    _require_current(name, args, current)
    key = (source.name, name, like.dtype, *macros.values())
    known = _kernels.get(key)
    if known is None:
        known = _kernels[key] = _kernel(source, name, like.dtype.name, macros)
    kernel, real = known
    plain = tuple([_argument(arg, real) for arg in args])
    if shared > _granted.get((key, current), FREELY):  # requested once for each device
        kernel.max_dynamic_shared_size_bytes = _granted[key, current] = shared
    kernel(grid, block, plain, shared_mem=shared)


@contextmanager
def rounding_to_tf32() -> Iterator[None]:
    """Return a context in which CuPy rounds float32 factors of matmuls to TF32."""
    linalg = _linalg()
    before = linalg.get_compute_type(np.float32)
    linalg.set_compute_type(np.float32, linalg.COMPUTE_TYPE_TF32)
    try:
        yield
    finally:
        linalg.set_compute_type(np.float32, before)


@functools.cache
def _linalg() -> Any:
    from cupy._core import _routines_linalg  # CuPy has no public access to it

    return _routines_linalg


# ---- For cuBLASLt ----


@functools.cache
def bindings() -> Any:
    """Return NVIDIA's bindings of cuBLASLt, or a sentence that says why they cannot be used."""
    try:
        from nvmath.bindings import cublasLt

        cublasLt.get_version()  # it loads the library
    except Exception as error:  # another cuda.core raises AttributeError or TypeError at import
        why = packages.missing("nvmath") or packages.no_library("cublasLt", error)
        return _cannot_be_called("cuBLASLt", why, error)
    return cublasLt


def _cannot_be_called(name: str, why: str, error: Exception) -> str:
    """Return a sentence; give a RuntimeWarning too if a package is installed but does not fit."""
    sentence = f"{name} cannot be called: {why}"
    if not isinstance(error, ImportError | OSError | RuntimeError):  # something is missing
        warnings.warn(f"backend cupy: {sentence}", RuntimeWarning, stacklevel=2)
    return sentence


def stream_of(arrays: list[Array]) -> MatmulStream:
    """Return CuPy's current stream and device, and whether `rounding_to_tf32` is active.

    Raises ValueError if an array is on another device.
    """
    current = cupy.cuda.runtime.getDevice()
    _require_current("linear", arrays, current)
    linalg = _linalg()
    tf32 = linalg.get_compute_type(np.float32) == linalg.COMPUTE_TYPE_TF32
    return MatmulStream(current, cupy.cuda.get_current_stream().ptr, tf32)


def allocate(size: int) -> Any:
    """Return `size` bytes from CuPy's memory pool."""
    return cupy.cuda.alloc(size)


# ---- For cuDNN ----


@functools.cache
def frontend() -> Any:
    """Return NVIDIA's frontend of cuDNN, or a sentence that says why it cannot be used."""
    if (why := packages.missing("cudnn")) is not None:  # it imports some packages in later calls
        return f"cuDNN cannot be called: {why}"
    try:
        import cudnn

        version = cudnn.backend_version()
    except Exception as error:  # OSError of the library, AttributeError of other versions, ...
        return _cannot_be_called("cuDNN", packages.no_library("cudnn", error), error)
    if version < OLDEST:
        return (
            f"cuDNN is too old: its version is {version}, {OLDEST} is needed: "
            f"{packages.LIBRARIES['cudnn']}"
        )
    return cudnn


def attention_stream_of(arrays: list[Array]) -> AttentionStream:
    """Return CuPy's current stream, its device and the device's compute capability.

    Raises ValueError if an array is on another device.
    """
    current = cupy.cuda.runtime.getDevice()
    _require_current("sdpa", arrays, current)
    capability = int(cupy.cuda.Device(current).compute_capability)  # CuPy caches it
    return AttentionStream(current, cupy.cuda.get_current_stream().ptr, capability)


def beside() -> dict[str, str]:
    """Return, for each NVIDIA library that kernels call, its version or why it cannot be called."""
    versions = {}
    for name, library in (("cuBLASLt", bindings()), ("cuDNN", frontend())):
        if not isinstance(library, str):
            get = library.get_version if name == "cuBLASLt" else library.backend_version
            library = str(get())
        versions[name] = library
    return versions


# ---- For graphs ----


class Graph:
    """A CUDA graph on CuPy's current device, for `captured`."""

    def __init__(self) -> None:
        _free_left()
        self._pool = cupy.cuda.MemoryPool()
        weakref.finalize(self, _leave, self._pool).atexit = False  # CuPy may be gone then
        _graphs.add(self)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._graph: Any = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Return a context that uses the graph's memory pool and stream.

        It waits for the current stream before, and for the graph's stream after, even if the body
        raises.
        """
        cupy.cuda.get_current_stream().synchronize()
        cupy.get_default_memory_pool().free_all_blocks()  # the graph's pool cannot use these
        with cupy.cuda.using_allocator(self._pool.malloc), self._stream:
            try:
                yield
            except BaseException:
                with suppress(Exception):  # the first error is the one to show
                    self._stream.synchronize()
                raise
        self._stream.synchronize()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Return a context that records work into the graph and runs nothing.

        An error ends the recording.
        """
        with cupy.cuda.using_allocator(self._pool.malloc), self._stream:
            self._stream.begin_capture()
            try:
                yield
            except BaseException:
                # CUDA has discarded the graph, and raises another error about it. The first error
                # is the one to show. In any case the stream no longer records.
                with suppress(Exception):
                    self._stream.end_capture()
                raise
            self._graph = self._stream.end_capture()

    def launch(self) -> None:
        """Run the recorded work on the current stream."""
        self._graph.launch()


def pools() -> list[Any]:
    """Return CuPy's pool of device memory and the pools of all graphs."""
    _free_left()
    return [cupy.get_default_memory_pool(), *(graph._pool for graph in list(_graphs)), *_left]


def _leave(pool: Any) -> None:
    """Free the memory of a deleted graph. Otherwise its pool would keep the memory for ever.

    The arrays of the graph's state may outlive the graph. The pool is kept until they are deleted.
    """
    _left.append(pool)
    _free_left()


def _free_left() -> None:
    for pool in list(_left):
        pool.free_all_blocks()
        if pool.total_bytes() == 0 and pool in _left:
            _left.remove(pool)


_graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
_left: list[Any] = []  # pools of deleted graphs


# ---- For kernels ----


def _require_current(name: str, args: Sequence[Any], current: int) -> None:
    for arg in args:
        if isinstance(arg, ARRAY):
            if arg.data.device_id != current:
                raise ValueError(
                    f"{name}: arrays must lie on the current device, cuda:{current}, got one on "
                    f"cuda:{arg.data.device_id}: call it within backend.active()"
                )
        elif isinstance(arg, list):
            _require_current(name, arg, current)


def _argument(arg: Any, real: type) -> Any:
    if isinstance(arg, ARRAY) or type(arg) is int:  # CuPy passes an int as a long long
        return arg
    if arg is None:
        return _NULL
    if isinstance(arg, list):
        words = [x if isinstance(x, int) else 0 if x is None else x.data.ptr for x in arg]
        return np.array(words, np.int64).view(f"V{8 * len(words)}")  # one value of this many bytes
    return real(arg) if isinstance(arg, float) else np.int64(arg)


def _kernel(source: Source, name: str, dtype: str, macros: dict[str, Any]) -> tuple[Any, type]:
    key = (source.name, dtype, *macros.values())
    module = _modules.get(key)
    if module is None:
        options = source.options(dtype, macros)
        module = _modules[key] = cupy.RawModule(code=source.text, options=options)
    # Arithmetic of two-byte numbers is in float32, as REAL of `Source.options`.
    return module.get_function(name), np.float64 if dtype == "float64" else np.float32


CUBLASLT = Runtime(bindings, stream_of, allocate)
CUDNN = Runtime(frontend, attention_stream_of, allocate)
