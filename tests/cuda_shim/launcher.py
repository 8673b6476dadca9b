"""`module.launch` for arrays of the stand-in: the same source, run on the CPU."""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any

import numpy as np

from cuda_shim.array import Array, Fault, addresses
from cuda_shim.build import Library, line_of, load
from cuda_shim.graph import note
from xformer.backends.cupy.module import Source, arithmetic

seeds = itertools.count()  # a launch's: blocks and threads run in another order each time
_libraries: dict[Any, Library] = {}


class Argument(ctypes.Structure):
    """As shim::Arg."""

    _fields_ = (
        ("kind", ctypes.c_char),
        ("type", ctypes.c_char),
        ("bits", ctypes.c_uint64),
        ("low", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
        ("items", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
    )


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
    """Run a kernel. Raises Fault, saying what it did, which thread, and in which line."""
    key = (source.path, like.dtype.name, *macros.values())
    library = _libraries.get(key)
    if library is None:
        library = _libraries[key] = load(source, like.dtype.name, macros)

    def run() -> None:
        _run(library, name, like, (grid, block), args, shared)

    if not note(name, (grid, block, *(_noted(arg) for arg in args)), run):
        run()


def _noted(arg: Any) -> Any:
    return [_noted(x) for x in arg] if isinstance(arg, list) else addresses(arg)[0]


def _run(
    library: Library,
    name: str,
    like: Array,
    geometry_of: tuple[tuple[int, ...], tuple[int, ...]],
    args: tuple[Any, ...],
    shared: int,
) -> None:
    grid, block = geometry_of
    real = np.dtype(arithmetic(like.dtype.name))
    kept: list[Any] = []  # what lists point to
    plain = (Argument * max(1, len(args)))(*(_argument(arg, real, kept) for arg in args))
    ones = (1, 1, 1)
    geometry = (ctypes.c_uint * 6)(*(*grid, *ones)[:3], *(*block, *ones)[:3])
    text = ctypes.create_string_buffer(1000)
    failed = library.launch(
        name.encode(),
        geometry,
        ctypes.c_uint64(shared),
        plain,
        len(args),
        library.shared,
        library.n_shared,
        ctypes.c_uint64(next(seeds)),
        text,
        ctypes.c_size_t(len(text)),
    )
    if failed:
        raise Fault(_with_lines(text.value.decode(), library))


def _argument(arg: Any, real: np.dtype, kept: list[Any]) -> Argument:
    if isinstance(arg, list):
        items = (Argument * len(arg))(*(_argument(item, real, kept) for item in arg))
        words = (ctypes.c_uint64 * len(arg))(*(item.bits for item in items))
        kept += items, words
        addresses = ctypes.addressof(words), ctypes.addressof(items)
        return Argument(b"l", b"*", addresses[0], 0, 0, addresses[1], len(arg))
    if arg is None:
        return Argument(b"p", b"*", 0, 0, 0)
    if isinstance(arg, Array):
        low, high = np.lib.array_utils.byte_bounds(arg.host) if arg.size else (0, 0)
        code = {"l": "q", "L": "Q"}.get(arg.dtype.char, arg.dtype.char)
        return Argument(b"p", code.encode(), arg.data.ptr, low, high)
    if isinstance(arg, float):
        bits = int.from_bytes(real.type(arg).tobytes(), "little")
        return Argument(b"r", real.char.encode(), bits, 0, 0)
    if isinstance(arg, int):
        return Argument(b"i", b"q", arg & (1 << 64) - 1, 0, 0)
    kind = type(arg).__name__
    raise TypeError(f"a kernel takes arrays, None, ints, floats and lists of them, got {kind}")


def _with_lines(text: str, library: Library) -> str:
    """The message, with lines of the source for addresses of the library."""
    return re.sub(r"@(\d+)", lambda found: line_of(library.path, int(found[1])), text)
