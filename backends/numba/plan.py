"""The tables of `token`: made of a model once for a text, since to make them takes Python long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba import token
from xformer.backends.numpy.advance import other_model

from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.blocks import order_of
from xformer.layers.past import Past
from xformer.layers.stack import StackParams
from xformer.tree import value
from xformer.typing import Array

ACTIVATIONS = {
    "silu": token.SILU,
    "gelu": token.GELU,
    "gelu_tanh": token.GELU_TANH,
    "relu": token.RELU,
}
PAIR, MOST = 1 << 17, 16  # weights of two pieces of a product, and pieces, which are sums to add


class Tables(NamedTuple):
    """Of all layers, as `token` reads them."""

    maps: Array
    norms: Array
    sizes: Array
    numbers: Array  # of norms
    scales: Array  # of scores


class Plan(NamedTuple):
    """Of a model, which lives as long: tables, and how many numbers of a text are in memory."""

    params: StackParams
    configs: Sequence[BlockConfig]
    refusal: str | None  # why there is none
    large: bool = False  # whether a product has several pieces
    tables: Tables | None = None
    heads: tuple[tuple[int, int, int], ...] = ()  # of each layer G, K and M
    ctx: int = 0
    hidden: int = 0
    parts: int = 0


class Unfit(ValueError):
    """Parameters that the loops cannot read."""


def planned(params: StackParams, configs: Sequence[BlockConfig], past: Sequence[Past]) -> Plan:
    """The plan that the past remembers, or a new one."""
    room = past[0].room[0] if past[0].room else None
    known: Plan | None = None if room is None else room.plan
    if known is None or known.params is not params or known.configs is not configs:
        known = _made(params, configs)
        if room is not None:
            room.plan = known
    return known


def _made(params: StackParams, configs: Sequence[BlockConfig]) -> Plan:
    if not isinstance(params.blocks, tuple) or not isinstance(configs, tuple):
        return Plan(params, configs, "only tuples of blocks, which stay what they are")
    why = other_model(params, configs)
    if why is None and any(c.d_model != configs[0].d_model for c in configs):
        why = "only blocks of the same width"
    if why is None and any(c.activation not in ACTIVATIONS for c in configs):
        why = f"only {', '.join(ACTIVATIONS)}"
    if why is not None:
        return Plan(params, configs, why)
    order = order_of(params.blocks, configs)
    layers = [(params.blocks[order[i]], config) for i, config in enumerate(configs)]
    try:
        maps = np.array([_maps(*layer) for layer in layers], np.int64)
        norms = [row for layer in layers for row in _norms(*layer)]
        norms.append(_norm(params.norm, configs[-1]))
    except Unfit as unfit:
        return Plan(params, configs, str(unfit))
    heads = tuple((c.kv_heads, *_widths(c)) for c in configs)
    sizes = [
        (c.n_heads, *own, ACTIVATIONS[c.activation]) for c, own in zip(configs, heads, strict=True)
    ]
    scales = [_widths(c)[0] ** -0.5 if c.scale is None else c.scale for c in configs]
    parts = maps[:, :, token.PARTS] * maps[:, :, token.N_OUT]
    stages = (
        slice(token.QUERY, token.OUT),
        slice(token.OUT, token.UP),
        slice(token.UP, token.DOWN),
        slice(token.DOWN, None),
    )
    tables = Tables(
        maps,
        np.array([row[:3] for row in norms], np.int64),
        np.array(sizes, np.int64),
        np.array([row[3:] for row in norms], np.float32),
        np.array(scales, np.float32),
    )
    return Plan(
        params,
        configs,
        None,
        large=bool((maps[:, :, token.PIECES] > 1).any()),
        tables=tables,
        heads=heads,
        ctx=max(c.n_heads * _widths(c)[1] for c in configs),
        hidden=max(c.d_ff for c in configs),
        parts=max(int(parts[:, stage].sum(axis=1).max()) for stage in stages),
    )


def _widths(config: BlockConfig) -> tuple[int, int]:
    """K and M."""
    width = config.d_head or config.d_model // config.n_heads
    return width, config.d_value or width


def _maps(params: BlockParams, config: BlockConfig) -> list[list[int]]:
    ffn: Any = params.ffn
    kv: Any = params.attn.kv
    d, f, (width, value_width) = config.d_model, config.d_ff, _widths(config)
    queries, out = config.n_heads * width, config.n_heads * value_width
    return [
        _map(params.attn.q, d, queries),
        _map(kv.k, d, config.kv_heads * width),
        _map(kv.v, d, config.kv_heads * value_width),
        _map(params.attn.o, out, d),
        _map(ffn.up, d, f),
        [0] * 8 if ffn.gate is None else _map(ffn.gate, d, f),
        _map(ffn.down, f, d),
    ]


def _map(own: Any, n_in: int, n_out: int) -> list[int]:
    w, b = value(own.w), value(own.b)
    _require(w, (n_in, n_out))
    down, across = w.strides
    by_rows = across == 4 and down >= 4 * n_out
    step = down if by_rows else across
    if not (by_rows or (down == 4 and across >= 4 * n_in)):
        raise Unfit("weights of other strides")
    pieces = min(2 * (n_in * n_out // PAIR), MOST) or 1
    return [
        w.ctypes.data,
        step // 4,
        by_rows,
        n_in,
        n_out,
        _vector(b, n_out),
        pieces,
        pieces if by_rows else 1,
    ]


def _norms(params: BlockParams, config: BlockConfig) -> list[list[Any]]:
    own = params.attn_norm, params.attn_out_norm, params.ffn_norm, params.ffn_out_norm
    return [_norm(x, config) for x in own]


def _norm(own: Any, config: BlockConfig) -> list[Any]:
    if own is None:
        return [0, 0, 0, 0.0, 0.0]
    rms, d = config.norm_kind == "rms", config.d_model
    gain, shift = _vector(value(own.w), d), 0 if rms else _vector(value(own.b), d)
    return [gain, shift, rms, config.eps, config.norm_offset if rms else 0.0]


def _vector(x: Array | None, n: int) -> int:
    if x is None:
        return 0
    _require(x, (n,))
    if not x.flags.c_contiguous:
        raise Unfit("vectors of other strides")
    return int(x.ctypes.data)


def _require(x: Any, shape: tuple[int, ...]) -> None:
    if type(x) is not np.ndarray or x.dtype != np.float32 or not x.flags.aligned:
        raise Unfit("only NumPy's own arrays of float32")
    if x.shape != shape:
        raise Unfit(f"an array of shape {x.shape} in the place of {shape}")
