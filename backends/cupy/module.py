"""CUDA source and its launch: the one seam between the kernels' Python and what runs them.

    SOURCE = Source(__file__, WIDE=(0, 1))  # softmax.cu beside softmax.py
    launch(SOURCE, "softmax_forward", x, grid=(rows,), block=(128,), args=(x, y, width), WIDE=1)

The arrays choose the launcher: CuPy's is in `driver`; the tests bring one that runs the same source
on the CPU. So nothing here and in the kernels' Python imports CuPy. How a kernel is written and
tested: docs/cuda-kernels.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from array_api_compat import array_namespace

from xformer.shapes import STORED, dtype_name
from xformer.typing import Array

# Compiled at the first launch; the names of REAL, the type of arithmetic and of the arrays, but for
# those of STORED, whose names storage.cuh has.
REALS = {"float32": "float", "float64": "double"}
EVERY = (*REALS, *STORED)
MAX_THREADS = 256  # of a block that works on one row

Launcher = Callable[..., None]
LAUNCHERS: dict[type, Launcher] = {}  # type of the arrays -> what launches on them
# -> what makes them from a shape and a dtype, where the standard's `empty` takes the host longer.
MAKERS: dict[type, Callable[..., Array]] = {}


class Source:
    """A .cu file, compiled for each type of numbers and choice of its macros that is launched.

    beside: the .py file of the same name   dtypes: of the arrays   macros: name -> the values that
    it may have.
    """

    def __init__(
        self, beside: str, *, dtypes: tuple[str, ...] = tuple(REALS), **macros: tuple[Any, ...]
    ) -> None:
        self.path = Path(beside).with_suffix(".cu")
        self.name = self.path.stem
        self.dtypes = dtypes
        self.macros = macros

    @cached_property
    def text(self) -> str:
        """The file with its headers in place: compilers that cache by source see all of it."""
        return "\n".join(_expanded(self.path, set()))

    def options(self, dtype: str, macros: dict[str, Any]) -> tuple[str, ...]:
        """Options of the compiler. TypeError, ValueError for a dtype, macros it does not have."""
        if dtype not in self.dtypes:
            raise TypeError(f"{self.path.name} is for {', '.join(self.dtypes)}, got {dtype}")
        if macros.keys() != self.macros.keys() or any(
            value not in self.macros[name] for name, value in macros.items()
        ):
            raise ValueError(f"{self.path.name} is compiled with {self.macros}, got {macros}")
        given = [f"-D{name}={value}" for name, value in macros.items()]
        if dtype in STORED:
            given.insert(0, f"-DSTORED={dtype}")
        return "-std=c++17", f"-DREAL={REALS[arithmetic(dtype)]}", *given

    def variants(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every dtype and choice of macros."""
        for dtype, *values in product(self.dtypes, *self.macros.values()):
            yield dtype, dict(zip(self.macros, values, strict=True))


def _expanded(path: Path, seen: set[Path]) -> Iterator[str]:
    seen.add(path)
    yield f'#line 1 "{path.name}"'
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith('#include "'):
            yield line
            continue
        header = path.parent / line.split('"')[1]
        if header not in seen:
            yield from _expanded(header, seen)
        yield f'#line {number + 1} "{path.name}"'


def launch(
    source: Source,
    name: str,
    like: Array,
    *,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: tuple[Any, ...],
    shared: int = 0,
    **macros: Any,
) -> None:
    """Run `name` of `source` on the current device, REAL, or STORED, the dtype of `like`.

    args: arrays, None for a null pointer, ints as long long, floats as REAL; a list of arrays and
    None, or of ints, as a struct of one array of as many, by value. shared: bytes of dynamic shared
    memory of a block. No blocks, no launch. ValueError for arrays of another device than the
    current one.
    """
    if 0 in grid:
        return
    run = LAUNCHERS.get(type(like)) or _launcher(type(like))
    run(source, name, like, grid, block, args, shared, macros)


def _launcher(array_type: type) -> Launcher:
    from xformer.backends.cupy import driver

    if issubclass(array_type, driver.ARRAY):
        return LAUNCHERS[driver.ARRAY]
    module = array_type.__module__
    raise TypeError(f"launch: arrays must be CuPy's, got {array_type.__name__} of {module}")


# ---- What the kernels' Python has in common ----


def arithmetic(dtype: str) -> str:
    """The name of the dtype in which arrays of `dtype` are computed with."""
    return "float32" if dtype in STORED else dtype


def real_size(x: Array) -> int:
    """Bytes of a number of `working_dtype(x)`."""
    return 4 if dtype_name(x) in STORED else int(x.dtype.itemsize)


def contiguous(x: Array) -> Array:
    """x, copied where it is not contiguous."""
    return x if x.flags.c_contiguous else array_namespace(x).ascontiguousarray(x)


def not_alike(leaves: Sequence[Array]) -> str | None:
    """Why one launcher cannot take them all; None where all are as the first, of a real dtype."""
    kind, dtype = type(leaves[0]), leaves[0].dtype
    if dtype_name(leaves[0]) in REALS and all(type(x) is kind and x.dtype == dtype for x in leaves):
        return None
    return "the leaves must all be of one library, and all float32 or all float64"


def empty(like: Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Array:
    """An array to be written to, of the shape and dtype of `like` unless given.

    On the current device: CuPy makes arrays on no other, whatever `device=` says.
    """
    shape = like.shape if shape is None else shape
    dtype = like.dtype if dtype is None else dtype
    make = MAKERS.get(type(like)) or array_namespace(like).empty
    return make(shape, dtype=dtype)


def wide(width: int, *arrays: Array | None) -> int:
    """1 where rows of `width` elements can be read and written 16 bytes at a time, else 0."""
    size = 16
    for a in arrays:  # in generators this would take twice as long
        if a is not None:
            if a.data.ptr % 16:
                return 0
            size = min(size, a.itemsize)
    return int(width * size % 16 == 0)


def threads(items: int, limit: int = MAX_THREADS) -> int:
    """Threads of a block for that many items: a power of two of whole warps, at most `limit`."""
    return min(limit, max(32, 1 << (items - 1).bit_length()))


def row_threads(width: int, is_wide: int, x: Array) -> int:
    """Threads of a block that works on one row of x, one access each at a time.

    As few whole warps as finish the row in as few turns as `MAX_THREADS` would.
    """
    accesses = width * x.dtype.itemsize // 16 if is_wide else width
    turns = blocks(accesses, MAX_THREADS)
    return 32 * blocks(accesses, 32 * max(1, turns))


def blocks(items: int, size: int) -> int:
    """Blocks of `size` that cover all items."""
    return -(-items // size)
