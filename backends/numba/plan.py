"""The tables of `token` and `tokens`: made once of a model, since that takes Python long."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba import layer
from xformer.backends.numba.known import Known, Pin, gather, pinned
from xformer.backends.numpy.advance import other_blocks, other_model
from xformer.backends.numpy.products import AS_IT_IS, leading

from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.blocks import order_of
from xformer.layers.norm import NormParams
from xformer.layers.past import Past
from xformer.layers.rotary import Rotary
from xformer.layers.stack import StackParams
from xformer.tree import Frozen, value
from xformer.typing import Array

ACTIVATIONS = {
    "silu": layer.SILU,
    "gelu": layer.GELU,
    "gelu_tanh": layer.GELU_TANH,
    "relu": layer.RELU,
}
NO_MAP = [0] * layer.PIECES  # of a layer that is not gated
PAIR, MOST = 1 << 17, 16  # weights of two pieces of a product, and pieces, which are sums to add


class Tables(NamedTuple):
    """Of all layers, as the loops read them."""

    maps: Array
    norms: Array
    sizes: Array
    numbers: Array  # of norms
    scales: Array  # of scores


class Plan(NamedTuple):
    """Of a model: tables, and how many numbers of a text, or of a token, are in memory."""

    configs: Sequence[BlockConfig]
    refusal: str | None  # why there is none
    params: StackParams | None = None  # which lives as long
    frozen: bool = False  # whether a part of them is
    large: bool = False  # whether a product has several pieces
    tables: Tables | None = None
    heads: tuple[tuple[int, int, int], ...] = ()  # of each layer G, K and M
    ctx: int = 0
    hidden: int = 0
    mapped: int = 0  # queries, keys and values
    parts: int = 0
    weights: int = 0  # numbers of all maps
    pins: Sequence[Pin] = ()  # which keep arrays of `params` where they are


class Unfit(ValueError):
    """Parameters that the loops cannot read."""


def planned(params: StackParams, configs: Sequence[BlockConfig], past: Sequence[Past]) -> Plan:
    """The plan that the past remembers, or a new one."""
    room = past[0].place.room if past[0].place else None
    known: Plan | None = None if room is None else room.plan
    if known is None or known.params is not params or known.configs is not configs:
        why = other_model(params, configs) or unplanned(params.blocks, configs)
        known = Plan(configs, why) if why else _made(params.blocks, configs, params.norm)
        known = known._replace(params=params, pins=pins_of(params))
        if room is not None:
            room.plan = known
    return known


def remembered(blocks: tuple[BlockParams, ...], configs: Sequence[BlockConfig]) -> Plan:
    """The plan of blocks alone."""
    given: Any = blocks
    if not isinstance(given, tuple):
        return Plan(configs, unplanned(blocks, configs))
    leaves: list[Any] = []
    gather(blocks, leaves)
    known: Plan | None = _known.of(leaves)
    if known is not None and known.configs == configs:
        return known
    why = unplanned(blocks, configs)
    plan = Plan(configs, why) if why else _made(blocks, configs, None)
    plan = plan._replace(frozen=any(isinstance(x, Frozen) for x in leaves))
    if all(x is None or isinstance(x, np.ndarray | Frozen) for x in leaves):
        _known.keep(leaves, plan)
    return plan


_known = Known()


def pins_of(params: Any) -> list[Pin]:
    """Of all arrays of parameters."""
    leaves: list[Any] = []
    gather(params, leaves)
    return pinned(x for x in leaves if isinstance(x, np.ndarray))


def unplanned(blocks: tuple[BlockParams, ...], configs: Sequence[BlockConfig]) -> str | None:
    """Why there is no plan of these blocks, whatever their arrays."""
    if not isinstance(blocks, tuple) or not isinstance(configs, tuple) or not configs:
        return "only tuples of blocks, which stay what they are"
    why = other_blocks(blocks, configs)
    if why is None and any(c.d_model != configs[0].d_model for c in configs):
        why = "only blocks of the same width"
    if why is None and len({c.norm == "post" for c in configs}) > 1:
        why = "only blocks whose norms stand in one place"
    if why is None and any(c.activation not in ACTIVATIONS for c in configs):
        why = f"only {', '.join(ACTIVATIONS)}"
    return why


def unturned(rotary: Rotary | None, plan: Plan, n_texts: int, n_tokens: int) -> str | None:
    """Why the loops cannot turn queries and keys by these tables."""
    if rotary is None:
        return None
    cos, sin, why = rotary.cos, rotary.sin, "rotary positions of another kind"
    for table in (cos, sin):
        if type(table) is not np.ndarray or table.dtype != np.float32 or table.ndim not in (2, 3):
            return why
    one_for_all = cos.shape[:-1] == (n_tokens,)
    if cos.shape != sin.shape or not (one_for_all or cos.shape[:-1] == (n_texts, n_tokens)):
        return why
    return None if 0 < 2 * cos.shape[-1] <= min(k for _, k, _ in plan.heads) else why


def _made(
    blocks: tuple[BlockParams, ...], configs: Sequence[BlockConfig], ending: NormParams | None
) -> Plan:
    """ending: the norm that ends the stack."""
    order = order_of(blocks, configs)
    layers = [(blocks[order[i]], config) for i, config in enumerate(configs)]
    try:
        maps = np.array([_maps(*layer) for layer in layers], np.int64)
        norms = _norms(layers, ending)
    except Unfit as unfit:
        return Plan(configs, str(unfit))
    heads = tuple((c.kv_heads, *_widths(c)) for c in configs)
    sizes = [
        (c.n_heads, *own, ACTIVATIONS[c.activation]) for c, own in zip(configs, heads, strict=True)
    ]
    scales = [_widths(c)[0] ** -0.5 if c.scale is None else c.scale for c in configs]
    tables = Tables(
        maps,
        np.array([row[:3] for row in norms], np.int64),
        np.array(sizes, np.int64),
        np.array([row[3:] for row in norms], np.float32),
        np.array(scales, np.float32),
    )
    return Plan(
        configs,
        None,
        large=bool((maps[:, :, layer.PIECES] > 1).any()),
        tables=tables,
        heads=heads,
        ctx=max(c.n_heads * _widths(c)[1] for c in configs),
        hidden=max(c.d_ff for c in configs),
        mapped=int(maps[:, : layer.OUT, layer.N_OUT].sum(axis=1).max()),
        parts=int(
            (maps[:, :, layer.START] + maps[:, :, layer.PARTS] * maps[:, :, layer.ROW]).max()
        ),
        weights=int((maps[:, :, layer.N_IN] * maps[:, :, layer.N_OUT]).sum()),
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
    maps: list[list[int]] = [
        map_of(params.attn.q, d, queries),
        map_of(kv.k, d, config.kv_heads * width),
        map_of(kv.v, d, config.kv_heads * value_width),
        map_of(params.attn.o, out, d),
        map_of(ffn.up, d, f),
        NO_MAP if ffn.gate is None else map_of(ffn.gate, d, f),
        map_of(ffn.down, f, d),
    ]
    bounds = layer.QUERY, layer.OUT, layer.UP, layer.DOWN, len(maps)
    stages = (maps[start:stop] for start, stop in itertools.pairwise(bounds))
    return [row for stage in stages for row in _cut(stage)]


def map_of(own: Any, n_in: int, n_out: int) -> list[int]:
    """A linear map's place, step, order, sizes and bias. Unfit where the loops cannot read it."""
    w, b = value(own.w), value(own.b)
    require(w, (n_in, n_out))
    found = leading(w)
    if found is None:
        raise Unfit("weights of other strides")
    order, step = found
    return [w.ctypes.data, step, order == AS_IT_IS, n_in, n_out, _vector(b, n_out)]


def _cut(maps: list[list[int]]) -> list[list[int]]:
    """Rows of the table, of maps of one x; where rows go on in the next map's both are one product.

    Packed queries, keys and values are: read one by one, a token of char-GPT takes a sixth longer.
    """
    groups: list[list[list[int]]] = []
    for own in maps:
        if groups and _goes_on(groups[-1][-1], own):
            groups[-1].append(own)
        else:
            groups.append([own])
    table, start = [], 0
    for group in groups:
        by_rows, n_in = group[0][layer.BY_ROWS], group[0][layer.N_IN]
        row, first = sum(own[layer.N_OUT] for own in group), 0
        pieces = min(2 * (n_in * row // PAIR), MOST) or min(row, 1)
        parts = pieces if by_rows else min(row, 1)
        for own in group:
            table.append([*own, 0 if first else pieces, parts, start, row, first])
            first += own[layer.N_OUT]
        start += parts * row
    return table


def _goes_on(one: list[int], other: list[int]) -> bool:
    same = (layer.STEP, layer.BY_ROWS, layer.N_IN)
    end = one[layer.WEIGHT] + 4 * one[layer.N_OUT]
    return bool(
        one[layer.BY_ROWS] and all(one[i] == other[i] for i in same) and other[layer.WEIGHT] == end
    )


def _norms(
    layers: Sequence[tuple[BlockParams, BlockConfig]], ending: NormParams | None
) -> list[list[Any]]:
    """Of each layer four, and the last, in the order in which they stand."""
    post = layers[0][1].norm == "post"
    norms = [norm_of(None, layers[0][1])] if post else []
    for own, config in layers:
        for before, out in ((own.attn_norm, own.attn_out_norm), (own.ffn_norm, own.ffn_out_norm)):
            pair = (out, before) if post else (before, out)  # post-LN has it behind the sum
            norms += [norm_of(x, config) for x in pair]
    return norms if post else [*norms, norm_of(ending, layers[-1][1])]


def norm_of(own: Any, config: BlockConfig) -> list[Any]:
    """GAIN, SHIFT and RMS of a norm, then EPS and OFFSET, as `layer` has them; zeros of none."""
    if own is None:
        return [0, 0, 0, 0.0, 0.0]
    rms, d = config.norm_kind == "rms", config.d_model
    if rms and own.b is not None:
        raise Unfit("a bias of RMSNorm")
    if own.w is None:
        raise Unfit("a norm without a gain")
    gain, shift = _vector(value(own.w), d), _vector(value(own.b), d)
    return [gain, shift, rms, config.eps, config.norm_offset if rms else 0.0]


def _vector(x: Array | None, n: int) -> int:
    if x is None:
        return 0
    require(x, (n,))
    if not x.flags.c_contiguous:
        raise Unfit("vectors of other strides")
    return int(x.ctypes.data)


def require(x: Any, shape: tuple[int, ...]) -> None:
    if type(x) is not np.ndarray or x.dtype != np.float32 or not x.flags.aligned:
        raise Unfit("only NumPy's own arrays of float32")
    if x.shape != shape:
        raise Unfit(f"an array of shape {x.shape} in the place of {shape}")
