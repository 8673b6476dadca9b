"""One safetensors file: checked, then mapped into memory.

The file has 8 bytes with the length of the header, the header in JSON (name -> dtype, shape,
offsets), and the data.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.base.printing import size as in_units
from xformer.pretrained.reading import PretrainedError, opened, parse_json

HEADER_LIMIT = 4 << 20  # bytes: some 30,000 tensors in one file, read in about half a second
MAX_AXES, MAX_ELEMENTS = 8, 1 << 40
PIECE = 1 << 20  # elements converted at a time
AT_ONCE = 1 << 16  # bytes that Linux maps for each page fault

DTYPES: dict[str, np.dtype[Any]] = {  # of weights; NumPy has no BF16, the high half of a float32
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class Tensor(NamedTuple):
    """A tensor in a memory-mapped file: the bytes from `start` to `end` of `data`."""

    name: str
    path: Path
    data: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def read(self, dtype: str = "float32") -> np.ndarray:
        """The tensor as `dtype`: a read-only view of the file if that is its type, else a copy.

        ValueError unless `dtype` is a floating-point type of NumPy. PretrainedError if the tensor's
        dtype is not one of `DTYPES` (integers, and FP8), or if a number is too large for `dtype`.
        """
        wanted = np.dtype(dtype)
        if wanted.kind != "f":
            raise ValueError(f"read: dtype must be a floating-point type, got {dtype}")
        raw = self._raw()
        if raw.dtype != wanted or not raw.flags.aligned:
            raw = self._converted(raw, wanted)
        return raw.reshape(self.shape)

    def equals(self, other: Tensor) -> bool:
        """Whether both have the same numbers, in any types. NaN equals NaN. It works in pieces."""
        a, b = self._raw(), other._raw()
        if self.shape != other.shape:
            return False
        for start in range(0, len(a), PIECE):
            piece = slice(start, start + PIECE)
            if not np.array_equal(self._wide(a, piece), other._wide(b, piece), equal_nan=True):
                return False
        return True

    def _wide(self, raw: np.ndarray, piece: slice) -> np.ndarray:
        """A piece as float64, which represents all types exactly. Its pages are released."""
        out = np.empty(len(raw[piece]))
        _convert(raw[piece], out, self.dtype)
        self._let_go_of(piece, raw.itemsize)
        return out

    def release(self) -> None:
        """Release the memory pages of the tensor, after it was copied.

        Views of it stay valid; they read the file again.
        """
        self._let_go(self.start, self.end)

    def _raw(self) -> np.ndarray:
        """A flat read-only view of the file in the tensor's format: BF16 as uint16 bits.

        PretrainedError if its dtype is not one of `DTYPES`; these do not include FP8.
        """
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
        """A copy as `wanted`. It releases each piece of the file, so only the copy uses memory."""
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
        start, end = (self.start + itemsize * index for index in (piece.start, piece.stop))
        self._let_go(start, min(end, self.end))

    def _let_go(self, start: int, end: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED") and start < end:
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, page, end - page)


def open_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name.

    FileNotFoundError if there is no file, PretrainedError if it is damaged.
    """
    import safetensors  # not at the start: generation works without it, in a browser for instance

    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8:
            raise PretrainedError(f"{path}: is cut short, it has {size} bytes; download it again")
        if length > HEADER_LIMIT:
            raise PretrainedError(
                f"{path}: is no safetensors file: its header must have at most {HEADER_LIMIT} "
                f"bytes, its first 8 bytes say {length}"
            )
        if length > size - 8:
            raise PretrainedError(
                f"{path}: is cut short, it has {size} bytes, and its header alone has {length}; "
                "download it again"
            )
        try:  # checks the header, and that the tensors cover the data without overlap
            with safetensors.safe_open(path, "np"):
                pass
        except (safetensors.SafetensorError, OSError) as error:
            why = _of_another_size(file.read(length), 8 + length, size, path) or error
            raise PretrainedError(f"{path}: {why}") from error
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header = parse_json(data[8 : 8 + length].decode(), path)
    header.pop("__metadata__", None)
    return {name: _tensor(name, entry, path, data, 8 + length) for name, entry in header.items()}


def _of_another_size(header: bytes, start: int, size: int, path: Path) -> str:
    """Text: that the file is cut short or too long; empty if not, or if its header is damaged.

    start: of the data   size: of the file, in bytes
    """
    try:
        entries = parse_json(header.decode(), path)
        entries.pop("__metadata__", None)
        wanted = start + max(entry["data_offsets"][1] for entry in entries.values())
        if size > wanted:
            return f"has {size - wanted} bytes more than its header describes; download it again"
        part = f"{in_units(size)} of {in_units(wanted)} are there"
        return f"is cut short, {part}; download it again" if size < wanted else ""
    except (ValueError, TypeError, LookupError):
        return ""


def ends_in_zeros(tensors: Collection[Tensor]) -> bool:
    """Whether the last 64 KiB that tensors of one file have are zeros; False for less data."""
    start, end = min(t.start for t in tensors), max(t.end for t in tensors)
    if end - start < AT_ONCE:
        return False
    with opened(next(iter(tensors)).path) as file:  # the map would load megabytes around them
        file.seek(end - AT_ONCE)
        return not any(file.read(AT_ONCE))


def fetch(data: mmap.mmap) -> None:
    """Start a thread that reads all of a file. It takes 40 ms for a gigabyte in the page cache."""
    bytes_read = np.frombuffer(data, np.uint8)[::AT_ONCE]
    cores = _other_cores()

    def read() -> None:
        if cores:
            with suppress(OSError):
                os.sched_setaffinity(0, cores)  # for this thread only
        bytes_read.max()

    with suppress(RuntimeError):  # without a further thread, the first access reads the file
        threading.Thread(target=read, daemon=True).start()


def _other_cores() -> set[int]:
    """The cores that the program may use, except the current one. Empty outside Linux.

    A new thread starts on the current core and would share it with its parent. Meanwhile the new
    threads of OpenBLAS keep the other cores busy with waiting. On two cores the start would take
    10 % longer.
    """
    try:
        stat = Path("/proc/thread-self/stat").read_text(encoding="ascii", errors="replace")
        core = stat.rpartition(")")[2].split()[39 - 3]  # field 39 of proc(5); the list starts at 3
        return os.sched_getaffinity(0) - {int(core)}
    except (AttributeError, OSError, IndexError, ValueError):  # another system, or no real /proc
        return set()


def _tensor(name: str, entry: Any, path: Path, data: mmap.mmap, base: int) -> Tensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    start, end = (base + offset for offset in entry["data_offsets"])
    # NumPy limits the number of axes and elements, even if one size is 0.
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
    """Convert `raw`, of the file's type `dtype`, into `out`. FloatingPointError on overflow."""
    if dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore", over="raise"):
        out[...] = raw
