"""Kernels that are declared by their arrays: a line of text gives addresses, sizes and pieces.

    @declared("y (N, D), norm (N, 1) <- x (N, D)")
    def forward(y: Any, norm: Any, x: Any, eps: float) -> None: ...

The function gets arrays, outputs before inputs, that are C-contiguous. A dtype may follow a shape;
without one it is float32. An array () is passed as one of shape (1,). The array whose name ends
with "?" may be absent; it is then empty.

One axis is cut into pieces: N, the first axis of the first output. Of an array that begins with N,
the function gets the rows of its piece; other arrays are whole. P is the number of pieces: of an
array that begins with P, the function gets its own row, as (1, ...).

The parameters after the arrays are numbers of the instruction, `int` or `float` as annotated,
except `start` and `stop`, the range of the piece. The function is compiled as by `rowwise`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from zlib import crc32

from xformer.backends.numba.jit import callable_from_c, rowwise
from xformer.backends.numba.program import native
from xformer.backends.numba.program.native import KERNELS, SIGNATURE, Kernel, bits

ARRAY = re.compile(r"(\w+)(\??) \(([\w, ]*)\) ?(\w*)")
VIEWS = {"float32": ("float32s", 4), "float64": ("float64s", 8), "int64": ("words", 8)}
RANGE, REAL = ("start", "stop"), (float, "float")


class Operand(NamedTuple):
    """An array of a declaration."""

    name: str
    axes: tuple[str, ...]
    dtype: str
    is_optional: bool


class Declared(Kernel):
    """A native kernel with its declaration.

    outs, ins: its arrays. cut: the axis that is cut into pieces, at multiples of `unit`.
    axes: the names of the axes whose sizes are the first numbers of an instruction.
    scalars: the names of the numbers after them, and their types.
    """

    def __init__(self, loops: Callable[..., None], text: str, cut: str | None, unit: int) -> None:
        self.outs, self.ins = map(_operands, text.split("<-"))
        arrays = [*self.outs, *self.ins]
        self.cut, self.unit = cut or (*self.outs[0].axes, "1")[0], unit
        axes = [axis for x in arrays for axis in x.axes if axis not in ("P", "1")]
        self.axes = tuple(dict.fromkeys(axes))
        others = list(inspect.signature(loops).parameters.values())[len(arrays) :]
        self.scalars = {x.name: x.annotation for x in others if x.name not in RANGE}
        self.others = [x.name for x in others]
        super().__init__(loops)

    def numbers(self, sizes: dict[str, int], **scalars: Any) -> tuple[int, ...]:
        """Return the numbers of an instruction. sizes: of `axes`. scalars: of `self.scalars`."""
        kinds = self.scalars.items()
        values = [(bits if kind in REAL else int)(scalars[name]) for name, kind in kinds]
        return *(sizes[axis] for axis in self.axes), *values

    @functools.cached_property
    def address(self) -> int:
        """The address of the compiled function of a piece."""
        return callable_from_c(self._of_piece(), SIGNATURE)

    def _of_piece(self) -> Callable[..., None]:
        """Return the function of (args, piece, pieces, memory) that calls the loops on arrays.

        It is compiled from text, as numba needs a function with this number of arrays.
        """
        arrays = [*self.outs, *self.ins]
        kinds = dict.fromkeys(self.axes, int) | self.scalars
        optional = [i for i, x in enumerate(arrays) if x.is_optional] or [len(arrays)]
        lines = [
            f"addresses, integers = words(args, {len(arrays)}), numbers(args, {len(kinds)})",
            f"present = int(operands(args) == {len(arrays)})",
        ]
        for i, (name, kind) in enumerate(kinds.items()):
            lines += [f"{name} = {'real' if kind in REAL else ''}(integers[{i}])"]
        lines += [f"start, stop = part({self.cut}, piece, pieces, {self.unit})"]
        for i, x in enumerate(arrays):
            at = f"addresses[{i}]" if i <= optional[0] else f"addresses[{i - 1} + present]"
            lines += [f"{x.name} = {self._view(x, at)}"]
        lines += [f"loops({', '.join([*(x.name for x in arrays), *self.others])})"]
        body = "\n    ".join(lines)
        # numba finds machine code on disk by the file, name and line of the function.
        name, place = f"{self.__name__}_{crc32(body.encode()):08x}", self.fn.__code__
        text = "\n" * (place.co_firstlineno - 1) + f"def {name}(args, piece, pieces, memory):"
        scope = vars(native) | {"loops": rowwise(self.fn), "__name__": self.fn.__module__}
        exec(compile(f"{text}\n    {body}", place.co_filename, "exec"), scope)
        of_piece: Callable[..., None] = scope[name]
        return of_piece

    def _view(self, x: Operand, at: str) -> str:
        """Return the text of the array of a piece. at: the text of its address."""
        (view, itemsize), (first, *rest) = VIEWS[x.dtype], x.axes or ("1",)
        begin = {self.cut: "start", "P": "piece"}.get(first, "0")
        size = {self.cut: "stop - start", "P": "1"}.get(first, first)
        size = f"present * ({size})" if x.is_optional else size
        address = " * ".join([str(itemsize), begin, *rest])
        return f"{view}({at} + {address}, ({', '.join([size, *rest])},))"


def declared(text: str, *, cut: str | None = None, unit: int = 1) -> Callable[..., Declared]:
    """Return a decorator that makes a kernel of the arrays in `text`, as described above.

    cut: the axis that is cut into pieces, if it is not the first axis of the first output.
    unit: pieces begin at a multiple of it.
    """

    def decorate(loops: Callable[..., None]) -> Declared:
        KERNELS.append(kernel := Declared(loops, text, cut, unit))
        return kernel

    return decorate


def _operands(text: str) -> list[Operand]:
    """Return the arrays of one side of a declaration."""
    return [
        Operand(name, tuple(axes.split(", ")) if axes else (), dtype or "float32", bool(mark))
        for name, mark, axes, dtype in ARRAY.findall(text)
    ]
