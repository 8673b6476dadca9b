"""One safetensors file: checked before it is read, mapped into memory when it is.

It holds 8 bytes with the length of its header, the header in JSON (name -> dtype, shape, place) and
the data.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from xformer.pretrained.reading import PretrainedError, opened, parse_json

HEADER_LIMIT = 4 << 20  # bytes: some 30,000 tensors in one file, read in about half a second
MAX_AXES, MAX_ELEMENTS = 8, 1 << 40
PIECE = 1 << 20  # elements converted at a time
AT_ONCE = 1 << 16  # bytes that Linux maps where one of them is asked for

DTYPES: dict[str, np.dtype[Any]] = {  # that weights may have; NumPy has no BF16, half a float32
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class Tensor(NamedTuple):
    """A tensor in a file, which is mapped: bytes start to end of `data`."""

    name: str
    path: Path
    data: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def read(self, dtype: str) -> np.ndarray:
        """The tensor as `dtype`: a read-only view of the file where that is its type, or a copy.

        ValueError unless `dtype` is a floating-point type; PretrainedError where the tensor holds
        no floating-point numbers, or some too large for `dtype`.
        """
        wanted = np.dtype(dtype)
        if wanted.kind != "f":
            raise ValueError(f"read: dtype must be a floating-point type, got {dtype}")
        raw = self._raw()
        if raw.dtype != wanted or not raw.flags.aligned:
            raw = self._converted(raw, wanted)
        return raw.reshape(self.shape)

    def equals(self, other: Tensor) -> bool:
        """Whether both hold the same numbers, in whichever types, NaN like NaN. Takes no memory."""
        a, b = self._raw(), other._raw()
        if self.shape != other.shape:
            return False
        for start in range(0, len(a), PIECE):
            piece = slice(start, start + PIECE)
            if not np.array_equal(self._wide(a, piece), other._wide(b, piece), equal_nan=True):
                return False
        return True

    def _wide(self, raw: np.ndarray, piece: slice) -> np.ndarray:
        """A piece as float64, which holds all that may be in it; the file is let go of."""
        out = np.empty(len(raw[piece]))
        _convert(raw[piece], out, self.dtype)
        self._let_go_of(piece, raw.itemsize)
        return out

    def release(self) -> None:
        """Let go of the memory that holds the tensor; views of it read the file again."""
        self._let_go(self.start, self.end)

    def _raw(self) -> np.ndarray:
        """The numbers as they lie in the file; PretrainedError for what is no floating-point."""
        if self.dtype not in DTYPES:
            raise PretrainedError(
                f"{self.path}: {self.name!r} must be one of {', '.join(DTYPES)} to be read as "
                f"weights, got {self.dtype}"
            )
        stored = DTYPES[self.dtype]
        if self.start == self.end:
            return np.empty(0, stored)
        count = (self.end - self.start) // stored.itemsize
        return np.frombuffer(self.data, stored, count, self.start)

    def _converted(self, raw: np.ndarray, wanted: np.dtype[Any]) -> np.ndarray:
        """In pieces, and letting go of them: nothing but the result stays in memory."""
        out = np.empty(raw.shape, wanted)
        try:
            for start in range(0, len(raw), PIECE):
                piece = slice(start, start + PIECE)
                _convert(raw[piece], out[piece], self.dtype)
                self._let_go_of(piece, raw.itemsize)
        except FloatingPointError as error:
            message = f"{self.path}: {self.name!r} holds numbers too large for {wanted}"
            raise PretrainedError(message) from error
        return out

    def _let_go_of(self, piece: slice, itemsize: int) -> None:
        start, end = (self.start + itemsize * place for place in (piece.start, piece.stop))
        self._let_go(start, min(end, self.end))

    def _let_go(self, start: int, end: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED") and start < end:
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, page, end - page)


def open_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; FileNotFoundError, or PretrainedError where it is damaged."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise PretrainedError(
                f"{path}: is cut short, or no safetensors file: of its {size} bytes {length} "
                "should be its header"
            )
        if length > HEADER_LIMIT:
            message = f"{path}: its header must have at most {HEADER_LIMIT} bytes, got {length}"
            raise PretrainedError(message)
        try:  # checks the header, and that the tensors cover the data without overlap
            with safetensors.safe_open(path, "np"):
                pass
        except (safetensors.SafetensorError, OSError) as error:
            raise PretrainedError(f"{path}: {error}") from error
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header = parse_json(data[8 : 8 + length].decode(), path)
    header.pop("__metadata__", None)
    return {name: _tensor(name, entry, path, data, 8 + length) for name, entry in header.items()}


def fetch(data: mmap.mmap) -> None:
    """Have all of a file at hand soon, by another thread: a gigabyte in the cache takes 40 ms."""
    places = np.frombuffer(data, np.uint8)[::AT_ONCE]
    others = _other_cores()

    def read() -> None:
        if others:
            with suppress(OSError):
                os.sched_setaffinity(0, others)  # of this thread alone
        places.max()

    with suppress(RuntimeError):  # where there can be no more threads, whoever needs it reads it
        threading.Thread(target=read, daemon=True).start()


def _other_cores() -> set[int]:
    """Those that the program may use, without the one that it is on; Linux alone tells.

    A new thread begins there, and would take turns with its maker while OpenBLAS's threads, as new,
    keep other cores busy with waiting: a start of two cores would take a tenth longer.
    """
    try:
        stat = Path("/proc/thread-self/stat").read_text(encoding="ascii", errors="replace")
        core = stat.rpartition(")")[2].split()[39 - 3]  # of proc(5)'s fields, from the third on
        return os.sched_getaffinity(0) - {int(core)}
    except (AttributeError, OSError, IndexError, ValueError):  # another system's, or a stand-in
        return set()


def _tensor(name: str, entry: Any, path: Path, data: mmap.mmap, base: int) -> Tensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    start, end = (base + offset for offset in entry["data_offsets"])
    # More axes or sizes (beside one that is 0) than NumPy has arrays for.
    fits = len(shape) <= MAX_AXES and math.prod(max(size, 1) for size in shape) <= MAX_ELEMENTS
    fits = fits and base <= start <= end <= len(data)
    if fits and dtype in DTYPES:
        fits = end - start == math.prod(shape) * DTYPES[dtype].itemsize
    if fits:
        return Tensor(name, path, data, dtype, shape, start, end)
    raise PretrainedError(
        f"{path}: {name!r:.100}, {dtype} of shape {shape!r:.100}, does not fit bytes {start} to "
        f"{end} of the file"
    )


def _convert(raw: np.ndarray, out: np.ndarray, dtype: str) -> None:
    """`raw`, of the file's type `dtype`, into `out`; FloatingPointError where it does not fit."""
    if dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore", over="raise"):
        out[...] = raw
