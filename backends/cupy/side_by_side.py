"""Matrices side by side in one array: views of adjacent slices, and copies.

    dq, dk, dv = heads_beside(q, (q.shape, k.shape, v.shape))  # slices of one array
    whole([dq, dk, dv])                                        # (N, H K + G K + G M), a view
    beside([w_q, w_k, w_v])                                    # (D, H K + G K + G M), a copy

So dx = dq w_q^T + dk w_k^T + dv w_v^T is one matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from xformer.backends.cupy.cublaslt import why_not
from xformer.backends.cupy.lt_plan import layout
from xformer.backends.cupy.module import EVERY, Source, blocks, empty, launch
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array

SOURCE = Source(__file__, dtypes=EVERY, WIDE=(0, 1))
MOST = 4  # matrices of a launch, as in side_by_side.cu
BLOCK = 256  # threads
PACK = 16  # bytes; each slice begins at a multiple of it

Shape = tuple[int, ...]


# ---- The gradients of queries, keys and values ----


def joined(like: Array) -> bool:
    """Return whether matmuls read slices in place: cuBLASLt does, cuBLAS needs copies."""
    return why_not(like, like) is None


def widths_beside(shapes: Sequence[Shape], size: int) -> list[int]:
    """Return the elements from one token to the next, for each of dq, dk and dv.

    shapes: (B, H, T, K), (B, G, S, K), (B, G, S, M)
    size: bytes of a number

    One array holds all three if T = S, else one holds dk and dv. If a slice would not be aligned to
    `PACK`, each has a separate array.
    """
    widths = [shape[1] * shape[3] for shape in shapes]
    if any(width * size % PACK for width in widths):
        return widths
    if shapes[0][2] == shapes[1][2]:
        return [sum(widths)] * 3
    return [widths[0], widths[1] + widths[2], widths[1] + widths[2]]


def heads_beside(
    like: Array, shapes: Sequence[Shape], *, beside: bool | None = None
) -> list[Array]:
    """Return new arrays without values, (B, T, H, K) for each shape (B, H, T, K).

    beside: whether they are slices of common arrays, see `widths_beside`, else separate arrays;
        None: `joined(like)`
    """
    steps = [shape[1] * shape[3] for shape in shapes]
    if joined(like) if beside is None else beside:
        steps = widths_beside(shapes, like.dtype.itemsize)
    views: list[Array] = []
    storage, start = like, 0
    for (n_batch, n_heads, n_rows, width), step in zip(shapes, steps, strict=True):
        if start == 0:
            storage = empty(like, (n_batch, n_rows, step))
        columns = storage[:, :, start : start + n_heads * width]
        views.append(array_namespace(like).reshape(columns, (n_batch, n_rows, n_heads, width)))
        start = (start + n_heads * width) % step if step else 0
    return views


def step_of(x: Array) -> int:
    """Return the stride of axis T of x (B, T, H, K) in elements: from one token to the next.

    x: an array of `heads_beside`, whose B * T tokens all have this distance. If T = 1 it is the
        stride of axis B. If B * T < 2 it is H * K.
    """
    n_batch, n_rows, n_heads, width = x.shape
    if n_batch * n_rows < 2:
        return int(n_heads * width)
    return int(x.strides[1 if n_rows > 1 else 0] // x.dtype.itemsize)


def whole(parts: Sequence[Array]) -> Array | None:
    """Return adjacent column slices (N, O_i) of one array as one view (N, sum of O_i).

    Returns None if they are not adjacent slices of one array. Separate arrays may be adjacent by
    chance: then the last bits of a matmul would depend on the allocator.
    """
    held = parts[0].base
    n_rows = parts[0].shape[0]
    if held is None or n_rows < 2 or held.size % n_rows or not held.flags.c_contiguous:
        return None
    size, at = held.dtype.itemsize, held.data.ptr
    steps = (held.size // n_rows * size, size)
    starts = [x.data.ptr - at for x in parts]
    ends = [start + x.shape[1] * size for start, x in zip(starts, parts, strict=True)]
    same = all(
        x.base is not None
        and (x.base.data.ptr, x.base.nbytes, x.dtype) == (at, held.nbytes, held.dtype)
        and (x.shape[0], x.strides) == (n_rows, steps)
        for x in parts
    )
    if not same or ends[:-1] != starts[1:] or not 0 <= starts[0] < ends[-1] <= steps[0]:
        return None
    rows = array_namespace(held).reshape(held, (n_rows, held.size // n_rows))
    return rows[:, starts[0] // size : ends[-1] // size]


# ---- Weights ----


def beside(ws: Sequence[Array]) -> Array | None:
    """Return a copy of matrices (I, O_i) side by side: (I, sum of O_i), in their layout.

    Returns None if some are by rows and others by columns, if columns have gaps between them, or if
    there are more than `MOST` matrices.
    """
    layouts = [x for x in map(layout, ws) if x is not None]
    by_rows = layouts[0][0] if layouts else False
    if len(ws) > MOST or len(layouts) < len(ws) or any(x[0] != by_rows for x in layouts):
        return None
    n_rows, widths = ws[0].shape[0], [w.shape[1] for w in ws]
    steps = [step for _, step in layouts]
    if by_rows:
        y = empty(ws[0], (n_rows, sum(widths)))
        _launch(ws, y, widths, steps)
        return y
    if any(step != n_rows for step in steps):
        return None
    y = empty(ws[0], (sum(widths), n_rows))  # its rows are the columns of all matrices
    sizes = [width * n_rows for width in widths]
    _launch(ws, y, sizes, sizes)
    return y.T


def _launch(xs: Sequence[Array], y: Array, widths: list[int], steps: list[int]) -> None:
    ends = list(accumulate(widths))
    size, lacking = y.dtype.itemsize, MOST - len(xs)
    by = PACK // size
    wide = int(not any(n % by for n in (*ends, *steps)))
    wide &= int(not any(x.data.ptr % PACK for x in (*xs, y)))
    lists = [*xs, *[None] * lacking], [*ends, *[ends[-1]] * lacking], [*steps, *[0] * lacking]
    grid = blocks(y.size // (by if wide else 1), BLOCK)
    launch(
        *(SOURCE, "side_by_side", y),
        grid=(grid,),
        block=(BLOCK,),
        args=(*lists, y, y.size),
        WIDE=wide,
    )
