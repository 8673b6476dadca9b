"""CUDA sources and kernel launches: the only interface between kernels' Python and the launcher.

    SOURCE = Source(__file__, WIDE=(0, 1))  # softmax.cu beside softmax.py
    launch(SOURCE, "softmax_forward", x, grid=(rows,), block=(128,), args=(x, y, width), WIDE=1)

The type of the arrays selects the launcher (`driver_of`). CuPy's is in `driver`; the tests have
one that runs the same source on the CPU. So neither this module nor the kernels' Python imports
CuPy.
docs/cuda-kernels.md explains how to write and test a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.shapes import STORED, dtype_name

# dtype -> the C++ name of REAL, the type of arithmetic, and of arrays. storage.cuh has the names of
# the types in STORED.
REALS = {"float32": "float", "float64": "double"}
EVERY = (*REALS, *STORED)
MAX_THREADS = 256  # of a block that works on one row

# Type of the arrays -> what has the names of `driver` that kernels use: launch, empty, Graph,
# CUBLASLT and CUDNN. Of CuPy's arrays it is `driver` itself; tests have another one.
DRIVERS: dict[type, Any] = {}


class Source:
    """A .cu file, compiled for each dtype and each choice of macros that is launched.

    beside: the .py file of the same name
    dtypes: of the arrays that the kernels take
    macros: name -> all values
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
        """The file with its headers inserted: a compiler that caches by source needs all of it."""
        return "\n".join(_expanded(self.path, set()))

    def options(self, dtype: str, macros: dict[str, Any]) -> tuple[str, ...]:
        """Return the compiler's options.

        Raises TypeError for a dtype, and ValueError for macros, that the source does not have.
        """
        if dtype not in self.dtypes:
            raise TypeError(f"{self.path.name} is for {', '.join(self.dtypes)}, got {dtype}")
        if macros.keys() != self.macros.keys() or any(
            value not in self.macros[name] for name, value in macros.items()
        ):
            raise ValueError(f"{self.path.name} is compiled with {self.macros}, got {macros}")
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        if dtype in STORED:
            defines.insert(0, f"-DSTORED={dtype}")
        return "-std=c++17", f"-DREAL={REALS[arithmetic(dtype)]}", *defines

    def variants(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every combination of dtype and macros."""
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
    """Run the kernel `name` of `source` on the current device.

    like: an array; its dtype is REAL, or STORED for two-byte numbers
    grid, block: numbers of blocks, and of threads of a block; if there are no blocks, nothing runs
    args: arrays; None for a null pointer; ints, passed as long long; floats, passed as REAL; lists
        of arrays and None, or of ints, passed by value as a struct that holds one array
    shared: bytes of dynamic shared memory of a block
    macros: name -> value, for each macro of the source

    Raises ValueError if an array is not on the current device.
    """
    if 0 in grid:
        return
    driver_of(type(like)).launch(source, name, like, grid, block, args, shared, macros)


def driver_of(array_type: type) -> Any:
    """Return the entry of an array type in `DRIVERS`; CuPy's is added when it is first needed.

    Raises TypeError for an array of another library.
    """
    if array_type not in DRIVERS:
        from xformer.backends.cupy import driver

        if not issubclass(array_type, driver.ARRAY):
            module = array_type.__module__
            raise TypeError(f"launch: arrays must be CuPy's, got {array_type.__name__} of {module}")
        DRIVERS[array_type] = driver
    return DRIVERS[array_type]


# ---- Shared by the kernels' Python ----


def arithmetic(dtype: str) -> str:
    """Return the name of the dtype in which kernels compute for arrays of `dtype`."""
    return "float32" if dtype in STORED else dtype


def real_size(x: Array) -> int:
    """Return the bytes of a number of `working_dtype(x)`."""
    return 4 if dtype_name(x) in STORED else int(x.dtype.itemsize)


def contiguous(x: Array) -> Array:
    """Return x, or a copy if it is not contiguous."""
    return x if x.flags.c_contiguous else array_namespace(x).ascontiguousarray(x)


def not_alike(leaves: Sequence[Array]) -> str | None:
    """Return why one launcher cannot take all leaves, or None.

    All must have the library of the first and its dtype, which must be a key of `REALS`.
    """
    kind, dtype = type(leaves[0]), leaves[0].dtype
    if dtype_name(leaves[0]) in REALS and all(type(x) is kind and x.dtype == dtype for x in leaves):
        return None
    return "the leaves must all be of one library, and all float32 or all float64"


def empty(like: Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Array:
    """Return a new array without values, of the shape and dtype of `like` unless given.

    It is on the current device: CuPy makes arrays on no other device, whatever `device=` is.
    """
    shape = like.shape if shape is None else shape
    dtype = like.dtype if dtype is None else dtype
    array: Array = driver_of(type(like)).empty(shape, dtype=dtype)
    return array


def wide(width: int, *arrays: Array | None) -> int:
    """Return 1 if rows of `width` elements can be read and written 16 bytes at a time, else 0."""
    size = 16
    for a in arrays:  # generators would take twice as long
        if a is not None:
            if a.data.ptr % 16:
                return 0
            size = min(size, a.itemsize)
    return int(width * size % 16 == 0)


def threads(items: int, limit: int = MAX_THREADS) -> int:
    """Return the threads of a block for so many items: a power of two from 32 to `limit`."""
    return min(limit, max(32, 1 << (items - 1).bit_length()))


def row_threads(width: int, is_wide: int, x: Array) -> int:
    """Return the threads of a block that works on one row of x.

    In each pass over the block's threads, a thread makes one access. The result is the fewest whole
    warps that need as few passes as `MAX_THREADS` threads.
    """
    accesses = width * x.dtype.itemsize // 16 if is_wide else width
    passes = blocks(accesses, MAX_THREADS)
    return 32 * blocks(accesses, 32 * max(1, passes))


def blocks(items: int, size: int) -> int:
    """Return how many blocks of `size` items cover all items: the quotient, rounded up."""
    return -(-items // size)
