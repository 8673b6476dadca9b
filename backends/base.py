"""What every backend offers, whichever its library."""

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
    """A backend that is known but cannot be used here; the message says why and what to do."""


class Memory(NamedTuple):
    """Bytes of memory; None where the library or the system does not tell."""

    in_use: int | None
    peak: int | None


@dataclass(frozen=True)
class Backend:
    """An array library on one device: creation, transfer, synchronisation, memory.

    name: as in `xformer.backends.NAMES`   xp: its array API namespace   device: None for the
    default   dtypes: floating types it computes in   version: the library's.
    """

    name: str
    xp: Any
    device: Any
    dtypes: tuple[str, ...]
    version: str

    hint = ""  # what to do about a dtype that is missing
    compiles = False  # anew for every shape, which takes long
    graphs = False  # a compiled function owns its arrays: one caller at a time
    defers = False  # work is under way when a call returns; to read a number is to wait for it
    # Dtypes in which its kernels may store weights and activations, while they compute in float32.
    precisions: ClassVar[tuple[str, ...]] = ()

    def asarray(self, values: Any, dtype: str | None = None) -> Array:
        """An array of this backend from host data (numbers, sequences, NumPy arrays).

        `dtype` is a name of the standard ("float32", "int64"); without it the values' own stays.
        Raises ValueError for a dtype that is neither boolean nor integer nor one of `dtypes`, and
        TypeError for arrays that have a mask or units, which would be lost.
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
        """The parameters as a model computes with them: rounded to one of `precisions`.

        Activations and their gradients are stored so too; sums, statistics, losses and gradients of
        parameters are float32, as the parameters stay. None: the parameters themselves. ValueError
        where the backend has no such precision, or parameters are not float32; ImportError where
        the NumPy dtype of bfloat16 is missing.
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
        """ValueError for one that the backend has not; ImportError as `cast_params`."""
        if precision not in self.precisions:
            able = " and ".join((*self.dtypes, *self.precisions))
            but = "; backend cupy does" if precision in STORED and not self.precisions else ""
            raise ValueError(f"backend {self.name} stores numbers in {able}, not {precision}{but}")
        _stored(precision)

    def _stored_as(self, params: Any, dtype: Any) -> Any:
        """Copies of parameters, of a backend that has `precisions`."""
        raise NotImplementedError

    def upcast(self, array: Array) -> Array:
        """An array in the dtype to compute in: float32 of what is stored in a precision."""
        dtype = working_dtype(array)
        return array if array.dtype == dtype else self.xp.astype(array, dtype)

    def synchronize(self) -> None:
        """Wait until all work handed to the device is done (nothing to do on a CPU)."""

    def memory(self) -> Memory:
        """Bytes in use now and at most so far: of the process, or of the device's allocator."""
        return process_memory()

    def active(self) -> AbstractContextManager[None]:
        """A context for work on this device; MemoryError there says what is wanted and free.

        Around one call, and never across a yield: a generator would leave its caller in it.
        """
        return nullcontext()

    def deterministic(self) -> AbstractContextManager[None]:
        """A context in which the same work gives the same bits each time, on this device.

        Around one call, as `active`. On a CPU it always does.
        """
        return nullcontext()

    def compiled(
        self, fn: Callable[..., Any], donated: Sequence[int], *, lends: bool = False
    ) -> Callable[..., Any] | None:
        """`fn` as one call of the library; None where the library cannot do that.

        As `xformer.compile`, for arrays of this device. lends: the next call may write over all
        results except those that replace donated arrays. Arrays of a closure are those of the first
        call. The returned function has `explain()`. It may have `repeated(n, *arguments)`: n calls
        in one, where the first results of each call replace the donated arguments of the next.
        """
        return None

    def records(self, dtype: Any) -> bool:
        """Whether functions of arrays of a dtype are compiled unasked: it takes milliseconds."""
        return False

    def generator(self, seed: int, dtype: str = "float32") -> Generator:
        """Random numbers drawn on the host and transferred: the same on every backend.

        Raises ValueError for a floating dtype the backend does not compute in, and a seed that is
        no integer of at least 0.
        """
        self._require_dtype(dtype)
        (seed,) = require_sizes("generator", 0, seed=seed)
        return Generator(self, seed, dtype)

    def describe(self) -> str:
        """One line: library, version, device, floating types."""
        return f"{self.name} {self.version} on {self.device_name()}, {', '.join(self.dtypes)}"

    def _require_dtype(self, dtype: str) -> None:
        if dtype not in self.dtypes:
            able = " and ".join(self.dtypes)
            raise ValueError(f"backend {self.name} computes in {able}, not {dtype}{self.hint}")

    def _from_host(self, host: np.ndarray) -> Array:
        return self.xp.asarray(host, device=self.device)

    def device_name(self) -> str:
        """What the device is called."""
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
    """Seeded draws on the host in float64, rounded to `dtype`, moved to a backend."""

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
        """Independent integers in [low, high), int64 (int32 where a library has no int64)."""
        return self.backend.asarray(self._rng.integers(low, high, tuple(shape)))

    def full(self, shape: Sequence[int], value: float) -> Array:
        """One value everywhere: no draw."""
        return self._move(np.full(tuple(shape), value))

    def stack(self, draw: Callable[[], Array], n: int) -> Array:
        """`n` draws of one shape along a new first axis."""
        with self.backend.active():
            return self.backend.xp.stack([draw() for _ in range(n)])

    def _move(self, host: np.ndarray) -> Array:
        return self.backend.asarray(host, self.dtype)


def process_memory() -> Memory:
    """Resident bytes of this process, now and at most, where the system tells."""
    try:
        # Not getrusage: on Linux its peak includes that of the process which started this one.
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
