"""How loops are compiled, and the powers of 2 in them: none of libm's that LLVM could vectorise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import sigutils
from numba.core.ccallback import CFunc

from xformer.backends.base import Unusable
from xformer.lock import locked

# NaN and infinity stay as they are. Of rows: sums in any order, but no fused products, with which
# a b - c would not be 0 where c is a b, nor reciprocals in the place of quotients.
ELEMENTS, ROWS = {"contract", "nsz", "afn"}, {"reassoc", "nsz", "afn"}
FEW = 32  # rows that are summed one after the other: sums of such sums are more exact
LOG2_E = np.float32(math.log2(math.e))
TO_WHOLE = np.float32(1.5 * 2**23 + 127)  # added, only whole numbers are left in float32


def elementwise(fn: Any) -> Any:
    """`fn` as machine code, made at its first call and kept on disk; it runs without the GIL."""
    return _kept(fn, ELEMENTS)


def rowwise(fn: Any) -> Any:
    """The same for sums over rows."""
    return _kept(fn, ROWS)


def summing(fn: Any) -> Any:
    """The same where products are only added up, and may be fused with their sums."""
    return _kept(fn, ROWS | {"contract"})


def callable_from_c(fn: Any, signature: Any) -> int:
    """Where the same is as a function of C: loops that call it are not compiled with it."""
    made = CFunc(fn, sigutils.normalize_signature(signature), locals={}, options=_options(ROWS))
    with _folder():
        made.enable_caching()
    _kept_by_one(made._cache)
    made.compile()
    return int(made.address)


def _kept(fn: Any, fastmath: set[str]) -> Any:
    with _folder():
        made = numba.njit(nogil=True, cache=True, **_options(fastmath))(fn)
    if hasattr(made, "_cache"):  # unless NUMBA_DISABLE_JIT is set
        _kept_by_one(made._cache)
    return made


def _options(fastmath: set[str]) -> dict[str, Any]:
    return {"error_model": "numpy", "fastmath": fastmath}


@contextmanager
def _folder() -> Iterator[None]:
    """Unusable where there is none to keep machine code in."""
    try:
        yield
    except RuntimeError as error:
        raise Unusable(
            f"backend numba cannot be used: it finds no folder for machine code ({error}): name "
            "one that can be written to in the environment variable NUMBA_CACHE_DIR"
        ) from error


def _kept_by_one(kept: Any) -> None:
    kept.save_overload = partial(_save, kept.save_overload, Path(kept.cache_path))
    # numba looks at the function's own file, but has compiled with it what it calls.
    kept._cache_file._source_stamp = _sources()


@functools.cache
def _sources() -> list[tuple[str, float, int]]:
    """All files of loops: names, times and sizes."""
    folder = Path(__file__).parent
    files = sorted(folder.rglob("*.py"))
    found = [(file, file.stat()) for file in files]
    return [(str(file.relative_to(folder)), of.st_mtime, of.st_size) for file, of in found]


def _save(save: Callable[..., None], folder: Path, *overload: Any) -> None:
    """One process at a time; where another does, this one's code is not kept.

    numba numbers a function's files by those that it finds: two processes at once would give two
    kinds of arguments the same number, and whoever came next would run one's code with the other's.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, "keeps machine code"):
            save(*overload)


def inlined(fn: Any) -> Any:
    """`fn`, a part of each loop that calls it."""
    return numba.njit(forceinline=True, error_model="numpy", fastmath=ELEMENTS)(fn)


@inlined
def less(x: Any, y: Any) -> Any:
    """x - y, rounded before it is added to a sum: sums of rows may be taken in any order."""
    return x - y


@inlined
def exp2(x: Any) -> Any:
    """2^x in float32 to 1e-7; at most 2^127, and 0 below 2^-126. NaN stays.

    2^i 2^f, i whole and |f| <= 1/2: a polynomial of least relative error for 2^f.
    """
    x = np.float32(-127) if x < np.float32(-127) else x  # as they stand, NaN is neither
    x = np.float32(127) if x > np.float32(127) else x
    t = np.float32(x + TO_WHOLE)  # i + 127 in its last bits
    f = x - (t - TO_WHOLE)
    p = np.float32(0.00015345811754806547)
    p = p * f + np.float32(0.0013399931217237316)
    p = p * f + np.float32(0.009618488958032047)
    p = p * f + np.float32(0.055503287769710634)
    p = p * f + np.float32(0.24022646890625604)
    p = p * f + np.float32(0.6931472057372641)
    p = p * f + np.float32(1)
    # The bits of 2^i: an exponent of i + 127, 0 for i = -127.
    return p * np.int32(t.view(np.int32) << np.int32(23)).view(np.float32)
