"""Graphs of cuDNN's attention, forward and backward, and the plan for each kind of attention."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from xformer.backends.cupy.side_by_side import widths_beside

# The numbers of the arrays in a graph.
Q, K, V, CTX, LSE, DCTX, DQ, DK, DV = range(1, 10)
TYPES = {"bfloat16": "BFLOAT16", "float16": "HALF"}
BYTES = 2  # of a number of each type


class Layout(NamedTuple):
    """The shape and strides of an array of four axes; strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Kind(NamedTuple):
    """All that a graph depends on. Results are stored as (B, T, H, M), so heads merge as a view."""

    dtype: str
    q: Layout  # (B, H, T, K)
    k: Layout  # (B, G, S, K)
    v: Layout  # (B, G, S, M)
    left: int | None  # keys before the query's position that it attends to; None: all
    right: int | None  # keys after the query's position that it attends to; None: all
    scale: float
    deterministic: bool
    backward: bool  # which of the two graphs
    joined: bool = False  # whether dq, dk and dv are slices of one array, see `heads_beside`


class Plan(NamedTuple):
    """A graph that is ready to run, and the bytes of its workspace."""

    graph: Any
    workspace: int


def by_rows(*shape: int) -> Layout:
    """Return the layout of a contiguous array, the last axis fastest, with strides in elements."""
    return Layout(shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))))


def by_token(b: int, h: int, t: int, k: int, *, step: int | None = None) -> Layout:
    """Return the layout of an array (B, H, T, K) that is stored as (B, T, H, K).

    step: elements from one token to the next; None: H K
    """
    step = h * k if step is None else step
    return Layout((b, h, t, k), (t * step, k, step, 1))


def planned(cudnn: Any, handle: Any, kind: Kind) -> Plan | str:
    """Return the plan of a kind, or a sentence if cuDNN does not support it.

    Any other error of cuDNN is raised.
    """
    graph_of = backward_graph if kind.backward else forward_graph
    try:
        return _built(cudnn, graph_of(cudnn, handle, kind))
    except cudnn.cudnnGraphNotSupportedError as error:
        return f"cuDNN refuses: {error}"


def forward_graph(cudnn: Any, handle: Any, kind: Kind) -> Any:
    """Return the graph that computes ctx (B, H, T, M) and lse (B, H, T, 1), for a kind.

    lse = log(sum(exp(scores)))
    """
    graph = _graph(cudnn, handle, kind)
    q, k, v = _inputs(cudnn, graph, kind)
    b, h, t, _ = kind.q.shape
    ctx, lse = graph.sdpa(name="sdpa", q=q, k=k, v=v, generate_stats=True, **_options(cudnn, kind))
    _output(ctx, CTX, by_token(b, h, t, kind.v.shape[3]))
    _output(lse, LSE, by_rows(b, h, t, 1)).set_data_type(cudnn.data_type.FLOAT)
    return graph


def backward_graph(cudnn: Any, handle: Any, kind: Kind) -> Any:
    """Return the graph that computes dq, dk and dv, for a kind; dctx is stored as (B, T, H, M)."""
    graph = _graph(cudnn, handle, kind)
    q, k, v = _inputs(cudnn, graph, kind)
    b, h, t, _ = kind.q.shape
    like_ctx = by_token(b, h, t, kind.v.shape[3])
    ctx, dctx = (_tensor(cudnn, graph, uid, like_ctx, kind.dtype) for uid in (CTX, DCTX))
    grads = graph.sdpa_backward(
        name="sdpa_backward",
        q=q,
        k=k,
        v=v,
        o=ctx,
        dO=dctx,
        stats=_tensor(cudnn, graph, LSE, by_rows(b, h, t, 1)),
        use_deterministic_algorithm=kind.deterministic,
        **_options(cudnn, kind),
    )
    shapes = kind.q.shape, kind.k.shape, kind.v.shape
    steps = widths_beside(shapes, BYTES) if kind.joined else [None] * 3
    for dx, uid, shape, step in zip(grads, (DQ, DK, DV), shapes, steps, strict=True):
        _output(dx, uid, by_token(*shape, step=step))
    return graph


def _graph(cudnn: Any, handle: Any, kind: Kind) -> Any:
    real = cudnn.data_type.FLOAT
    stored = getattr(cudnn.data_type, TYPES[kind.dtype])
    return cudnn.pygraph(
        io_data_type=stored, intermediate_data_type=real, compute_data_type=real, handle=handle
    )


def _inputs(cudnn: Any, graph: Any, kind: Kind) -> list[Any]:
    layouts = (Q, kind.q), (K, kind.k), (V, kind.v)
    return [_tensor(cudnn, graph, uid, layout, kind.dtype) for uid, layout in layouts]


def _tensor(cudnn: Any, graph: Any, uid: int, layout: Layout, dtype: str | None = None) -> Any:
    """Return an input of the graph; float32 if `dtype` is None."""
    return graph.tensor(
        dim=list(layout.shape),
        stride=list(layout.strides),
        data_type=getattr(cudnn.data_type, TYPES[dtype] if dtype else "FLOAT"),
        uid=uid,
    )


def _output(tensor: Any, uid: int, layout: Layout) -> Any:
    tensor.set_output(True).set_uid(uid)
    return tensor.set_dim(list(layout.shape)).set_stride(list(layout.strides))


def _options(cudnn: Any, kind: Kind) -> dict[str, Any]:
    """Return the options for scale and band. cuDNN's left bound includes the query's own position.

    If T = S, both alignments have the same diagonal. Top-left is then requested, because more of
    cuDNN's engines support it; bottom-right is requested only if it makes a difference.
    """
    differs = kind.q.shape[2] != kind.k.shape[2] and (kind.left, kind.right) != (None, None)
    alignments = cudnn.diagonal_alignment
    return {
        "attn_scale": kind.scale,
        "diagonal_alignment": alignments.BOTTOM_RIGHT if differs else alignments.TOP_LEFT,
        "diagonal_band_left_bound": None if kind.left is None else kind.left + 1,
        "diagonal_band_right_bound": kind.right,
    }


def _built(cudnn: Any, graph: Any) -> Plan:
    """Return the first of the library's plans that can be built.

    Plans of the frontend itself are skipped: other packages compile them when they are needed.
    Raises the last error if no plan can be built.
    """
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    refused: Exception = cudnn.cudnnGraphNotSupportedError("it has no plan of its own")
    for index, plan in enumerate(graph.plans):
        if plan.cpp_index is None:
            continue
        try:
            graph.select_plan(index).build_plans()
        except Exception as error:  # of any type: the next plan may be built
            refused = error
        else:
            return Plan(graph, graph.get_workspace_size())
    raise refused
