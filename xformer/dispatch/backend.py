"""The interface of all backends, and their generators of random arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from xformer.base import tree
from xformer.base.typing import Array
from xformer.dispatch.checks import require_sizes
from xformer.dispatch.shapes import STORED, working_dtype
from xformer.dispatch.subclasses import refusal

INSTALL_CUDA = (
    "pip install 'xformer-array[cuda13]', or for CUDA 12: pip install 'xformer-array[cuda12]'"
)


class Unusable(ImportError):
    """A known backend that cannot be used here. The message says why, and what to do."""


class Memory(NamedTuple):
    """Bytes of memory. A field is None if neither the library nor the system reports it."""

    in_use: int | None
    peak: int | None


@dataclass(frozen=True)
class Backend:
    """An array library on one device: creation, transfer, synchronisation, memory.

    name: the backend's name, as in `xformer.backends.NAMES`
    xp: the library's array API namespace
    device: the library's device object; None for its default device
    dtypes: names of the floating dtypes to compute in
    version: the version of the library
    """

    name: str
    xp: Any
    device: Any
    dtypes: tuple[str, ...]
    version: str

    hint = ""  # appended to the message about a missing dtype: what to do about it
    compiles = False  # whether it compiles again for every shape, which takes long
    graphs = False  # whether a compiled function owns its arrays, so that callers must take turns
    defers = False  # whether calls are asynchronous: they return before the work is done
    # Dtypes in which kernels can store weights and activations. They compute in float32.
    precisions: ClassVar[tuple[str, ...]] = ()

    def asarray(self, values: Any, dtype: str | None = None) -> Array:
        """Return an array of this backend from host data: numbers, sequences, NumPy arrays.

        dtype: a name of the array API standard ("float32", "int64"); None: the dtype of `values`

        Raises ValueError if the dtype is not boolean, integer or one of `dtypes`, and TypeError
        for arrays with a mask or units, which would be lost.
        """
        if (why := refusal(type(values))) is not None:
            raise TypeError(f"backend {self.name}: values must be an array, got {why}")
        host = np.asarray(values)
        try:
            new_dtype = host.dtype if dtype is None else np.dtype(dtype)
        except TypeError:
            raise ValueError(
                f"backend {self.name}: dtype must be a name like float32 or int64, got {dtype!r}"
            ) from None
        if new_dtype.kind not in "biu":
            self._require_dtype(new_dtype.name)
        return self._from_host(host.astype(new_dtype.newbyteorder("="), copy=False))

    def to_numpy(self, array: Array) -> np.ndarray:
        """Return `array` as a NumPy array on the host. It may share memory with `array`."""
        return np.asarray(array)

    def cast_params(self, params: Any, precision: str | None) -> Any:
        """Return a copy of float32 parameters in the dtype `precision`, for forward and backward.

        Activations and their gradients then have this dtype too. Sums, statistics, losses and
        gradients of parameters are float32.

        params: a tree of arrays
        precision: one of `precisions`; None: the parameters are returned unchanged

        Raises ValueError if the backend does not support the precision, or if a parameter is not
        float32; ImportError if bfloat16 needs the package ml_dtypes and it is not installed.
        """
        if precision is None:
            return params
        self.require_precision(precision)

        def require(p: Array) -> Array:
            if p.dtype != self.xp.float32:
                raise ValueError(f"precision {precision} is for float32 parameters, got {p.dtype}")
            return p

        return self._stored_as(tree.map(require, params), _storage_dtype(precision))

    def require_precision(self, precision: str) -> None:
        """Raise ValueError if the backend does not support the storage dtype `precision`.

        Raises ImportError if bfloat16 needs the package ml_dtypes and it is not installed.
        """
        if precision not in self.precisions:
            supported = " and ".join((*self.dtypes, *self.precisions))
            hint = "; backend cupy does" if precision in STORED and not self.precisions else ""
            raise ValueError(
                f"backend {self.name} stores numbers in {supported}, not {precision}{hint}"
            )
        _storage_dtype(precision)

    def _stored_as(self, params: Any, dtype: Any) -> Any:
        """Return a copy of `params` in `dtype`. Backends with `precisions` implement it."""
        raise NotImplementedError

    def upcast(self, array: Array) -> Array:
        """Return `array` in the dtype to compute in: float32 if it is stored in less precision."""
        dtype = working_dtype(array)
        return array if array.dtype == dtype else self.xp.astype(array, dtype)

    def synchronize(self) -> None:
        """Wait until the device has finished all its work. On a CPU it returns at once."""

    def memory(self) -> Memory:
        """Return the bytes in use and their peak: of the process or of the device's allocator."""
        return process_memory()

    def active(self) -> AbstractContextManager[None]:
        """Return a context for work on this device.

        A MemoryError inside it says how much memory is needed and how much is free. Use the context
        around one call, and never across a `yield`: the generator's caller would run inside it.
        """
        return nullcontext()

    def deterministic(self) -> AbstractContextManager[None]:
        """Return a context in which the same work gives bit-identical results on this device.

        Use the context around one call. On a CPU results are always bit-identical.
        """
        return nullcontext()

    def compiled(
        self, fn: Callable[..., Any], donated: Sequence[int], *, lends: bool = False
    ) -> Callable[..., Any] | None:
        """Return `fn` compiled into one call on this device; None if the library cannot compile.

        fn: a pure function, as for `xformer.compile`. Arrays of its closure keep the values of the
            first call.
        donated: indices of the arguments whose arrays the call may overwrite
        lends: whether the next call may overwrite the results that do not replace donated arrays

        The returned function has `explain()`. It may have `repeated(n, *arguments)`, which runs n
        calls in one. The first results of each call replace the donated arguments of the next
        (`next_arguments`). It returns the results of the last call.
        """
        return None

    def records(self, dtype: Any) -> bool:
        """Return whether functions of arrays of this dtype are compiled by default.

        True if the backend compiles them in milliseconds.
        """
        return False

    def generator(self, seed: int, dtype: str = "float32") -> Generator:
        """Return a generator of random arrays, whose numbers are equal on all backends.

        Raises ValueError if dtype is not in `dtypes`, or if seed is not an integer >= 0.
        """
        self._require_dtype(dtype)
        (seed,) = require_sizes("generator", 0, seed=seed)
        return Generator(self, seed, dtype)

    def describe(self) -> str:
        """Return one line of text: library, version, device and floating dtypes."""
        return f"{self.name} {self.version} on {self.device_name()}, {', '.join(self.dtypes)}"

    def _require_dtype(self, dtype: str) -> None:
        if dtype not in self.dtypes:
            supported = " and ".join(self.dtypes)
            got = dtype if isinstance(dtype, str) else f"{dtype!r}: give the name of the dtype"
            raise ValueError(f"backend {self.name} computes in {supported}, not {got}{self.hint}")

    def _from_host(self, host: np.ndarray) -> Array:
        return self.xp.asarray(host, device=self.device)

    def device_name(self) -> str:
        """Return the name of the device."""
        return "cpu" if self.device is None else str(self.device)


def summary(error: Exception) -> str:
    """Return an error in one line: its type, unless it is a TypeError, and its message."""
    message = next(iter(str(error).splitlines()), "") or type(error).__name__
    return message if isinstance(error, TypeError) else f"{type(error).__name__}: {message}"


def next_arguments(
    arguments: Sequence[Any], donated: Collection[int], results: Sequence[Any]
) -> list[Any]:
    """The arguments of the next call of `Compiled.repeated`.

    donated: indices of arguments; the first of `results`, in this order, replace them.
    """
    following = list(arguments)
    for i, new in zip(sorted(donated), results, strict=False):
        following[i] = new
    return following


def _storage_dtype(precision: str) -> Any:
    if precision == "float16":
        return np.dtype(precision)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"ml_dtypes is not installed: {INSTALL_CUDA}") from error
    return np.dtype(ml_dtypes.bfloat16)


class Generator:
    """A source of random arrays with a seed.

    Numbers are drawn on the host in float64, rounded to `dtype`, then moved to the device.
    """

    def __init__(self, backend: Backend, seed: int, dtype: str) -> None:
        self.backend, self.dtype = backend, dtype
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def normal(self, shape: Sequence[int], *, mean: float = 0.0, std: float = 1.0) -> Array:
        """Return an array of independent normal numbers."""
        return self._move(self._rng.normal(mean, std, tuple(shape)))

    def uniform(self, shape: Sequence[int], *, low: float = 0.0, high: float = 1.0) -> Array:
        """Return an array of independent numbers, uniform in [low, high)."""
        return self._move(self._rng.uniform(low, high, tuple(shape)))

    def integers(self, shape: Sequence[int], *, low: int = 0, high: int) -> Array:
        """Return independent integers in [low, high): int64, or int32 if there is no int64."""
        return self.backend.asarray(self._rng.integers(low, high, tuple(shape)))

    def full(self, shape: Sequence[int], value: float) -> Array:
        """Return an array filled with `value`. It draws no random number."""
        return self._move(np.full(tuple(shape), value))

    def stack(self, draw: Callable[[], Array], n: int) -> Array:
        """Call `draw` n times and stack the results, of one shape, along a new first axis."""
        with self.backend.active():
            return self.backend.xp.stack([draw() for _ in range(n)])

    def _move(self, host: np.ndarray) -> Array:
        return self.backend.asarray(host, self.dtype)


def process_memory() -> Memory:
    """Return the resident bytes of this process and their peak; None for what is not reported."""
    try:
        # Not getrusage: on Linux its peak includes the peak of the parent process.
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            fields = dict(line.split(":", 1) for line in status)
        in_use, peak = (1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM"))
        return Memory(in_use, peak)
    except (OSError, KeyError):  # no such file, as on macOS
        pass
    try:
        import resource
    except ImportError:  # not a Unix
        return Memory(None, None)
    unit = 1 if sys.platform == "darwin" else 1024
    return Memory(None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
