"""Kernels of ops for arrays of an ONNX graph: where the reference reads values, or ONNX has a node.

All other ops record their references.
"""

from __future__ import annotations

import math
from typing import Any

from xformer import ops
from xformer.arrays import onnx_functions
from xformer.arrays.onnx import NotExported, Size
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import in_range, require_ids
from xformer.layers import positions, relative
from xformer.layers.constant import constant
from xformer.layers.rope_tables import cos_sin
from xformer.ops.erf import ErfCache
from xformer.ops.index_add import IndexAddCache

MOST_ROWS = 1 << 16  # of a table of positions


@kernel(in_range, "onnx")
def _in_range(ids: Array, *, size: int, name: str = "ids") -> bool:
    return True  # known only in a run, where ONNX Runtime checks the ids


@kernel(constant, "onnx")
def _constant(like: Array, *, of: Any, args: tuple[Any, ...], dtype: Any = None) -> Array:
    """The reference's; of a table for a dynamic length, the rows of the table for the longest."""
    size = next((a for a in args if isinstance(a, Size)), None)
    if of is positions._table:
        n_rows, width = args
        n_rows = n_rows if size is None else size.graph.most
        if n_rows > MOST_ROWS:
            raise NotExported(
                "onnx: the table of sinusoidal positions has no last row; give max_len, the most "
                "tokens"
            )
        table = constant.reference(like, of=of, args=(n_rows, width), dtype=dtype)
        return table if size is None else table[:size, :]
    if of is relative._buckets and size is not None:  # of the distances -size, ..., size
        config, most = args[0], args[0].max_distance
        table = constant.reference(like, of=of, args=(config, most), dtype=dtype)
        return table[most - size : most + size + 1]
    if size is not None:
        raise NotExported(f"onnx: the table {of.__name__} depends on a dynamic size")
    return constant.reference(like, of=of, args=args, dtype=dtype)


def _any_length(position_ids: Array, *, config: Any, **_: Any) -> str | None:
    graph = position_ids.graph
    if graph is None or not graph.most or config.max_unscaled_len == math.inf:
        return "the frequencies are the same for every length of the graph"
    return None


@kernel(cos_sin, "onnx", unsupported=_any_length)
def _cos_sin(position_ids: Array, **options: Any) -> tuple[Array, Array]:
    """Rows of a table up to the largest length: ONNX Runtime refuses longer texts.

    They would have other frequencies, which the graph does not compute.
    """
    assert position_ids.graph is not None
    rows = onnx_functions.arange(position_ids.graph.most)
    cos, sin = cos_sin.reference(rows, **options)
    take = onnx_functions.take
    return take(cos, position_ids, axis=0), take(sin, position_ids, axis=0)


def _known(x: Array, y: Array, *, ids: Array) -> str | None:
    is_known = all(array.value is not None for array in (x, y, ids))
    return "the reference computes constants at once" if is_known else None


@kernel(ops.index_add, "onnx", unsupported=_known)
def _index_add(x: Array, y: Array, *, ids: Array) -> tuple[Array, IndexAddCache]:
    ids = require_ids("index_add", "ids", ids, x.shape[0], x)
    return onnx_functions.index_add(x, ids, y), IndexAddCache(ids, x.shape)


def _in_float64(x: Array) -> str | None:
    return "ONNX Runtime has Erf of float32 only" if str(x.dtype) != "float32" else None


@kernel(ops.erf, "onnx", unsupported=_in_float64)
def _erf(x: Array) -> tuple[Array, ErfCache]:
    return onnx_functions.erf(x), ErfCache(x)
