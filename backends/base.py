"""The interface of all backends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from xformer import tree
from xformer.backends.arrays import refusal
from xformer.checks import require_sizes
from xformer.shapes import STORED, working_dtype
from xformer.typing import Array


class Unusable(ImportError):
    """A known backend that cannot be used here. The message says why, and what to do."""


class Memory(NamedTuple):
    """Memory in bytes; None if neither the library nor the system reports it."""

    in_use: int | None
    peak: int | None


@dataclass(frozen=True)
class Backend:
    """An array library on one device: creation, transfer, synchronisation, memory.

    name: as in `xformer.backends.NAMES`
    xp: the array API namespace
    device: None for the default device
    dtypes: floating dtypes for computation
    version: of the library
    """

    name: str
    xp: Any
    device: Any
    dtypes: tuple[str, ...]
    version: str

    hint = ""  # end of a message: what to do about a missing dtype
    compiles = False  # compiles again for every shape, which takes long
    graphs = False  # a compiled function owns its arrays, so it serves one caller at a time
    defers = False  # asynchronous: a call returns before the work is done; reading a number waits
    # Storage dtypes of weights and activations in kernels, which compute in float32.
    precisions: ClassVar[tuple[str, ...]] = ()

    def asarray(self, values: Any, dtype: str | None = None) -> Array:
        """An array of this backend from host data (numbers, sequences, NumPy arrays).

        dtype: a name of the standard ("float32", "int64"); None: the dtype of the values.

        ValueError for a dtype that is not boolean, integer or one of `dtypes`. TypeError for arrays
        with a mask or units, which would be lost.
        """
        if (why := refusal(type(values))) is not None:
            raise TypeError(f"backend {self.name}: values must be an array, got {why}")
        host = np.asarray(values)
        try:
            kind = host.dtype if dtype is None else np.dtype(dtype)
        except TypeError:
            raise ValueError(
                f"backend {self.name}: dtype must be a name like float32 or int64, got {dtype!r}"
            ) from None
        if kind.kind not in "biu":
            self._require_dtype(kind.name)
        return self._from_host(host.astype(kind.newbyteorder("="), copy=False))

    def to_numpy(self, array: Array) -> np.ndarray:
        """The values of an array as a NumPy array on the host."""
        return np.asarray(array)

    def cast_params(self, params: Any, precision: str | None) -> Any:
        """A copy of float32 parameters in the storage dtype `precision`, for forward and backward.

        Activations and their gradients then have this dtype too. Sums, statistics, losses and
        gradients of parameters are float32.

        precision: one of `precisions`; None: the parameters are returned unchanged.

        ValueError if the backend does not support the precision, or parameters are not float32.
        ImportError if ml_dtypes, the NumPy dtype of bfloat16, is not installed.
        """
        if precision is None:
            return params
        self.require_precision(precision)

        def require(p: Array) -> Array:
            if p.dtype != self.xp.float32:
                raise ValueError(f"precision {precision} is for float32 parameters, got {p.dtype}")
            return p

        return self._stored_as(tree.map(require, params), _stored(precision))

    def require_precision(self, precision: str) -> None:
        """ValueError for a precision that the backend does not support.

        ImportError if ml_dtypes, the NumPy dtype of bfloat16, is not installed.
        """
        if precision not in self.precisions:
            able = " and ".join((*self.dtypes, *self.precisions))
            but = "; backend cupy does" if precision in STORED and not self.precisions else ""
            raise ValueError(f"backend {self.name} stores numbers in {able}, not {precision}{but}")
        _stored(precision)

    def _stored_as(self, params: Any, dtype: Any) -> Any:
        """Copies of parameters in a dtype. Backends with `precisions` implement it."""
        raise NotImplementedError

    def upcast(self, array: Array) -> Array:
        """An array in the dtype to compute in: float32 if its dtype is one of `precisions`."""
        dtype = working_dtype(array)
        return array if array.dtype == dtype else self.xp.astype(array, dtype)

    def synchronize(self) -> None:
        """Wait until all work handed to the device is done (nothing to do on a CPU)."""

    def memory(self) -> Memory:
        """Bytes in use and their peak so far, of the process or of the device's allocator."""
        return process_memory()

    def active(self) -> AbstractContextManager[None]:
        """A context for work on this device. A MemoryError in it says how much is needed and free.

        Use it around one call, and never across a yield: the caller of the generator would run
        inside the context.
        """
        return nullcontext()

    def deterministic(self) -> AbstractContextManager[None]:
        """A context in which the same work gives bit-identical results on this device.

        Use it around one call. On a CPU results are always bit-identical.
        """
        return nullcontext()

    def compiled(
        self, fn: Callable[..., Any], donated: Sequence[int], *, lends: bool = False
    ) -> Callable[..., Any] | None:
        """`fn` compiled into one call, for arrays of this device; None if the library cannot.

        fn: a pure function, as for `xformer.compile`. Arrays of its closure are those of the first
            call.
        donated: indices of arguments whose arrays the call may overwrite.
        lends: the next call may overwrite all results except those that replace donated arrays.

        The returned function has `explain()`. It may have `repeated(n, *arguments)`, which runs n
        calls in one. The first results of each call replace the donated arguments of the next.
        """
        return None

    def records(self, dtype: Any) -> bool:
        """Whether functions of arrays of this dtype are compiled by default.

        True for a backend that compiles in milliseconds.
        """
        return False

    def generator(self, seed: int, dtype: str = "float32") -> Generator:
        """A generator that draws on the host, so that every backend gets the same numbers.

        ValueError for a dtype that is not in `dtypes`, and for a seed that is not an integer of at
        least 0.
        """
        self._require_dtype(dtype)
        (seed,) = require_sizes("generator", 0, seed=seed)
        return Generator(self, seed, dtype)

    def describe(self) -> str:
        """One line of text: library, version, device and floating dtypes."""
        return f"{self.name} {self.version} on {self.device_name()}, {', '.join(self.dtypes)}"

    def _require_dtype(self, dtype: str) -> None:
        if dtype not in self.dtypes:
            able = " and ".join(self.dtypes)
            raise ValueError(f"backend {self.name} computes in {able}, not {dtype}{self.hint}")

    def _from_host(self, host: np.ndarray) -> Array:
        return self.xp.asarray(host, device=self.device)

    def device_name(self) -> str:
        """The name of the device."""
        return "cpu" if self.device is None else str(self.device)


def _stored(precision: str) -> Any:
    if precision == "float16":
        return np.dtype(precision)
    try:
        import ml_dtypes
    except ImportError as error:
        extras = "'xformer-array[cuda13]', or [cuda12]"
        raise ImportError(f"ml_dtypes is not installed: pip install {extras}") from error
    return np.dtype(ml_dtypes.bfloat16)


class Generator:
    """Seeded random numbers: drawn on the host in float64, rounded to `dtype`, then transferred."""

    def __init__(self, backend: Backend, seed: int, dtype: str) -> None:
        self.backend, self.dtype = backend, dtype
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def normal(self, shape: Sequence[int], *, mean: float = 0.0, std: float = 1.0) -> Array:
        """Independent normal numbers of the given shape."""
        return self._move(self._rng.normal(mean, std, tuple(shape)))

    def uniform(self, shape: Sequence[int], *, low: float = 0.0, high: float = 1.0) -> Array:
        """Independent numbers uniform in [low, high)."""
        return self._move(self._rng.uniform(low, high, tuple(shape)))

    def integers(self, shape: Sequence[int], *, low: int = 0, high: int) -> Array:
        """Independent integers in [low, high), int64, or int32 if a library has no int64."""
        return self.backend.asarray(self._rng.integers(low, high, tuple(shape)))

    def full(self, shape: Sequence[int], value: float) -> Array:
        """An array of one value; it draws no random number."""
        return self._move(np.full(tuple(shape), value))

    def stack(self, draw: Callable[[], Array], n: int) -> Array:
        """`n` draws of one shape along a new first axis."""
        with self.backend.active():
            return self.backend.xp.stack([draw() for _ in range(n)])

    def _move(self, host: np.ndarray) -> Array:
        return self.backend.asarray(host, self.dtype)


def process_memory() -> Memory:
    """Resident bytes of this process and their peak; None if the system does not report them."""
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
