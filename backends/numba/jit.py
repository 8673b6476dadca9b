"""Decorators that compile loops, and 2^x for them: LLVM cannot vectorise calls of libm's exp2."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import sigutils
from numba.core.caching import IndexDataCacheFile
from numba.core.ccallback import CFunc

from xformer.backends.numba.linked import Function
from xformer.base.lock import locked
from xformer.dispatch.backend import Unusable

if numba.config.DISABLE_JIT:
    raise Unusable(
        "backend numba cannot be used: the environment variable NUMBA_DISABLE_JIT is set, so numba "
        "compiles nothing"
    )

# LLVM's fast-math flags. Both sets treat NaN and infinity exactly. ROWS lets LLVM reorder sums, but
# not fuse products with sums (a b - c must be 0 if c is a b), and not replace quotients by
# reciprocals.
ELEMENTS, ROWS = {"contract", "nsz", "afn"}, {"reassoc", "nsz", "afn"}
FEW = 32  # rows that are summed one after the other; adding up these sums is more exact
LOG = logging.getLogger(__name__)
LOG2_E = np.float32(math.log2(math.e))
DIGEST = 32  # bytes of a SHA-256
ROUND = np.float32(1.5 * 2**23 + 127)  # adding it to a small float32 rounds to a whole number


def elementwise(fn: Any) -> Any:
    """Compile `fn` at its first call, with fast-math flags ELEMENTS.

    LLVM may contract a product and a sum into one instruction. It may not reorder sums. The machine
    code is cached on disk and runs without the GIL.
    """
    return _compiled(fn, ELEMENTS)


def rowwise(fn: Any) -> Any:
    """Compile `fn` at its first call, with fast-math flags ROWS: for loops that sum over a row.

    LLVM may reorder the sums. It may not contract a product and a sum into one instruction. The
    machine code is cached on disk and runs without the GIL.
    """
    return _compiled(fn, ROWS)


def summing(fn: Any) -> Any:
    """Compile `fn` as `rowwise` does; LLVM may also fuse products with sums. For dot products."""
    return _compiled(fn, ROWS | {"contract"})


def callable_from_c(fn: Any, signature: Any) -> int:
    """Compile `fn` as a C function with flags ROWS, and return its address.

    Compiled loops that call it by address need not be recompiled with it.
    """
    function = CFunc(fn, sigutils.normalize_signature(signature), locals={}, options=_options(ROWS))
    with _folder():
        function.enable_caching()
    _adapt_cache(function._cache)
    function.compile()
    return int(function.address)


def _compiled(fn: Any, fastmath: set[str]) -> Any:
    """Return `fn` as a numba function with a cache on disk."""
    function = Function(fn, targetoptions=_options(fastmath) | {"nopython": True, "nogil": True})
    with _folder():
        function.enable_caching()
    _adapt_cache(function._cache)
    return function


def _options(fastmath: set[str]) -> dict[str, Any]:
    """Return numba's options: as in NumPy, a division by 0 does not raise."""
    return {"error_model": "numpy", "fastmath": fastmath}


@contextmanager
def _folder() -> Iterator[None]:
    """Raise Unusable if numba finds no folder for its cache of machine code."""
    try:
        yield
    except RuntimeError as error:
        raise Unusable(
            f"backend numba cannot be used: it finds no folder for machine code ({error}): set the "
            "environment variable NUMBA_CACHE_DIR to a folder that can be written to"
        ) from error


def _adapt_cache(cache: Any) -> None:
    """Change numba's disk cache of a function in place: lock writes, and detect all stale code.

    Writes take a lock, because several processes may write at once. Machine code on disk is valid
    while all Python files of this folder are unchanged. numba checks only the file of the function,
    but the machine code includes functions of other files. Damaged files count as missing.

    cache: the `_cache` of a numba dispatcher
    """
    _folders.append(Path(cache.cache_path))
    cache.load_overload = partial(_load, cache.load_overload)
    cache.save_overload = partial(_save, cache.save_overload, Path(cache.cache_path))
    cache._cache_file.__class__ = _CacheFile
    cache._cache_file._source_stamp = _sources()


class _CacheFile(IndexDataCacheFile):  # type: ignore[misc]
    """numba's files of a function, each with a digest of its bytes and numba's version at its end.

    Machine code of which a byte is wrong would end the process. A file that is empty, cut or
    changed, or cannot be read, counts as missing: numba compiles again, and writes it over.
    """

    def _load_index(self) -> dict[Any, str]:
        found = self._read(self._index_path)
        return found[1] if found is not None and found[0] == self._source_stamp else {}

    def _save_index(self, overloads: dict[Any, str]) -> None:
        self._write(self._index_path, (self._source_stamp, overloads))

    def _load_data(self, name: str) -> Any:
        return self._read(self._data_path(name))

    def _save_data(self, name: str, data: Any) -> None:
        self._write(self._data_path(name), data)

    def _digest(self, data: bytes) -> bytes:
        return hashlib.sha256(self._version.encode() + data).digest()

    def _read(self, path: str) -> Any:
        """Return what a file holds; None if it is missing or damaged."""
        try:
            data = Path(path).read_bytes()
        except OSError:
            return None
        data, digest = data[:-DIGEST], data[-DIGEST:]
        return pickle.loads(data) if self._digest(data) == digest else None

    def _write(self, path: str, value: Any) -> None:
        data = self._dump(value)
        with self._open_for_write(path) as file:
            file.write(data + self._digest(data))


_folders = list[Path]()  # of the machine code of each function
counts = {"compiled": 0}  # how many functions were compiled since they were not stored


@functools.cache
def _sources() -> list[tuple[str, float, int]]:
    """Return name, time of modification and size of all Python files in this folder."""
    folder = Path(__file__).parent
    files = [(file, file.stat()) for file in sorted(folder.rglob("*.py"))]
    return [(str(file.relative_to(folder)), stat.st_mtime, stat.st_size) for file, stat in files]


def _save(save: Callable[..., None], folder: Path, *overload: Any) -> None:
    """Call save(*overload), numba's writing of machine code to disk, unless another process does.

    Without this lock two processes could give the code for different argument types the same file
    number. A later process would then call code with arguments of the wrong types.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, "saves machine code"):
            save(*overload)
    except BlockingIOError:
        pass
    except OSError as error:
        _say_unstored(error.strerror or str(error))


def _load(load: Callable[..., Any], *signature: Any) -> Any:
    """Return load(*signature), a function's stored machine code; None if it must be compiled."""
    found = load(*signature)
    if found is None:
        counts["compiled"] += 1
        _say_compiling()
    return found


@functools.cache
def _say_compiling() -> None:
    LOG.info(
        "numba compiles kernels once, 5 to 60 s on an idle core; they are kept in %s", folder()
    )


@functools.cache
def _say_unstored(why: str) -> None:
    LOG.warning("machine code cannot be kept in %s: %s; the next process compiles", folder(), why)


def folder() -> Path:
    """Return the folder with the machine code, in folders of its files of Python code.

    By default these are the folders `__pycache__` of this package.
    """
    path = _folders[0]
    return Path(__file__).parent if path.name == "__pycache__" else path.parent


def inlined(fn: Any) -> Any:
    """Compile `fn` into each loop that calls it."""
    return Function(fn, targetoptions=_options(ELEMENTS) | {"nopython": True, "forceinline": True})


@inlined
def less(x: Any, y: Any) -> Any:
    """Return x - y, rounded to float32.

    A `rowwise` loop that subtracts directly may reorder the difference with its sums.
    """
    return x - y


@inlined
def exp2(x: Any) -> Any:
    """Return 2^x in float32, to a relative error of 1e-7; at most 2^127, and 0 below 2^-126.

    2^x = 2^i 2^f with i whole and |f| <= 1/2; a minimax polynomial computes 2^f. NaN gives NaN.
    """
    x = np.float32(-127) if x < np.float32(-127) else x  # NaN fails both comparisons
    x = np.float32(127) if x > np.float32(127) else x
    t = np.float32(x + ROUND)  # i + 127 in its last bits
    f = x - (t - ROUND)
    p = np.float32(0.00015345811754806547)
    p = p * f + np.float32(0.0013399931217237316)
    p = p * f + np.float32(0.009618488958032047)
    p = p * f + np.float32(0.055503287769710634)
    p = p * f + np.float32(0.24022646890625604)
    p = p * f + np.float32(0.6931472057372641)
    p = p * f + np.float32(1)
    # The float32 with the biased exponent i + 127 is 2^i; for i = -127 it is 0.
    return p * np.int32(t.view(np.int32) << np.int32(23)).view(np.float32)
