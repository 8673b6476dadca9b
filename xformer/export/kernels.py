"""Kernels of ops for arrays of an ONNX graph: where the reference reads values, or ONNX has a node.

All other ops record their references.
"""

from __future__ import annotations

from typing import Any

from xformer import ops
from xformer.arrays import onnx_functions
from xformer.arrays.onnx import NotExported, Size
from xformer.checks import in_range, require_ids
from xformer.dispatch import kernel
from xformer.layers import positions
from xformer.layers.constant import constant
from xformer.ops.erf import ErfCache
from xformer.ops.index_add import IndexAddCache
from xformer.typing import Array

MOST_ROWS = 1 << 16  # of a table of positions


@kernel(in_range, "onnx")
def _in_range(ids: Array, *, size: int) -> bool:
    return True  # known only in a run, where ONNX Runtime checks the ids


@kernel(constant, "onnx")
def _constant(like: Array, *, of: Any, args: tuple[Any, ...], dtype: Any = None) -> Array:
    """The reference's, of the largest length; of it, the first rows are those of a shorter one."""
    if of is positions._table and args[0] > MOST_ROWS:
        raise NotExported(
            f"onnx: a table of {args[0]} sinusoidal positions; give max_len, the most tokens"
        )
    if not any(isinstance(a, Size) for a in args):
        return constant.reference(like, of=of, args=args, dtype=dtype)
    if of is not positions._table:
        raise NotExported(f"onnx: the table {of.__name__} depends on a dynamic size")
    length, width = args
    table = constant.reference(like, of=of, args=(int(length), width), dtype=dtype)
    return table[:length, :]


@kernel(ops.index_add, "onnx")
def _index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, IndexAddCache]:
    ids = require_ids("index_add", "ids", ids, x.shape[0], x)
    return onnx_functions.index_add(x, ids, y), IndexAddCache(ids, x.shape)


def _in_float64(x: Array) -> str | None:
    return "ONNX Runtime has Erf of float32 only" if str(x.dtype) != "float32" else None


@kernel(ops.erf, "onnx", unsupported=_in_float64)
def _erf(x: Array) -> tuple[Array, ErfCache]:
    return onnx_functions.erf(x), ErfCache(x)
