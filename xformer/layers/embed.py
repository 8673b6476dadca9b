"""From tokens to vectors: embedding, positions, and a projection if the widths differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from array_api_compat import device

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.tree import Frozen, value
from xformer.base.typing import Array
from xformer.dispatch import saved
from xformer.dispatch.backend import Generator
from xformer.dispatch.checks import (
    number,
    plain_numbers,
    require_integers,
    require_shape,
    require_sizes,
    require_tokens,
)
from xformer.dispatch.shapes import require_array
from xformer.initializers import Draw, normal
from xformer.layers.linear import LinearParams, linear
from xformer.layers.norm import NormConfig, NormParams, norm
from xformer.layers.positions import sinusoidal
from xformer.ops.sum_to import sum_to


@dataclass(frozen=True)
class EmbedConfig:
    """The configuration of an embedding. ValueError for options that do not fit together.

    positions: "sinusoidal", "learned" or "none"
    mode: how positions enter: "add": added to the embeddings; "concat": appended to them; "qkv":
        returned, to be added to queries, keys and values
    """

    vocab_size: int
    width: int  # of an embedding
    d_model: int  # of the output; vectors of another width get a learned projection
    max_len: int | None = None  # the most tokens; None, with positions "none": any number
    positions: str = "sinusoidal"
    mode: str = "add"
    d_positions: int | None = None  # "concat": None: d_model - width; "qkv": the head width
    offset: int = 0  # "learned": the table's row of position 0 (RoBERTa: 2)
    scale: float = 1.0  # of the embeddings of tokens (Gemma: sqrt(d_model))
    n_types: int = 0  # token types, which have embeddings too (BERT: 2); 0: none
    norm: NormConfig | None = None  # of the sum (BERT)
    project: bool | None = None  # whether to project; None: if the widths differ
    project_bias: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_sizes(
            "embed",
            1,
            vocab_size=self.vocab_size,
            width=self.width,
            d_model=self.d_model,
        )
        if self.max_len is not None or self.positions != "none":
            require_sizes("embed", 1, max_len=self.max_len)
        require_sizes("embed", 0, n_types=self.n_types, offset=self.offset)
        number("embed", "dropout", self.dropout, low=0, high=1)
        number("embed", "scale", self.scale)
        if self.positions not in ("sinusoidal", "learned", "none"):
            raise ValueError(
                'embed: positions must be "sinusoidal", "learned" or "none", '
                f"got {self.positions!r}"
            )
        if self.mode not in ("add", "concat", "qkv"):
            raise ValueError(f'embed: mode must be "add", "concat" or "qkv", got {self.mode!r}')
        if self.project is False and self.joined_width != self.d_model:
            raise ValueError(
                f"embed: without project the width {self.joined_width} must be d_model = "
                f"{self.d_model}"
            )
        if self.offset and (self.positions != "learned" or self.offset >= self.rows):
            raise ValueError(
                f"embed: offset needs learned positions and must be below max_len = "
                f"{self.max_len}, got {self.offset}"
            )
        if self.n_types and self.mode == "concat":
            raise ValueError('embed: n_types needs mode "add" or "qkv", got "concat"')
        if self.positions != "none" and self.position_width < 1:
            raise ValueError(
                f"embed: positions in mode {self.mode!r} need d_positions, with width = "
                f"{self.width} and d_model = {self.d_model}"
            )

    @property
    def position_width(self) -> int:
        """P, the width of the vector of a position.

        "add": width. "concat" and "qkv": d_positions; if that is None, d_model - width for "concat"
        and 0 for "qkv".
        """
        if self.mode == "add":
            return self.width
        if self.d_positions is not None:
            return self.d_positions
        return self.d_model - self.width if self.mode == "concat" else 0

    @property
    def joined_width(self) -> int:
        """The width of the vectors before the projection."""
        concat = self.mode == "concat" and self.positions != "none"
        return self.width + (self.position_width if concat else 0)

    @property
    def table_rows(self) -> int:
        """The rows of the table of tokens: V. A part of an embedding has fewer."""
        return self.vocab_size

    def lookup(self, table: Array, ids: Array) -> tuple[Array, Any]:
        """The rows `ids` of the table, and their cache."""
        return ops.embedding(table, ids=ids)

    @property
    def rows(self) -> int:
        """L, the rows of a table of positions."""
        return 0 if self.max_len is None else self.max_len

    @property
    def context(self) -> int | None:
        """The most tokens of a sequence; None if only memory limits it."""
        return None if self.max_len is None else self.max_len - self.offset

    @property
    def projects(self) -> bool:
        """Whether there is a projection."""
        return self.joined_width != self.d_model if self.project is None else self.project

    def init(self, rng: Generator, *, draw: Draw = normal) -> EmbedParams:
        """Initial parameters. draw: the distribution of the weights."""
        table = draw(rng, (self.vocab_size, self.width))
        learned = self.positions == "learned"
        positions = draw(rng, (self.rows, self.position_width)) if learned else None
        project = None
        if self.projects:
            shape = (self.joined_width, self.d_model)
            project = LinearParams.init(rng, shape, draw=draw, bias=self.project_bias)
        types = draw(rng, (self.n_types, self.width)) if self.n_types else None
        gains = None if self.norm is None else self.norm.init(rng, self.joined_width)
        return EmbedParams(table, positions, project, types, gains)


@short
class EmbedParams(NamedTuple):
    """Parameters of an embedding."""

    table: Array  # (V, E)
    positions: Array | None  # (L, P), if learned
    project: LinearParams | None  # (E, D) or (E + P, D)
    types: Array | None = None  # (N, E)
    norm: NormParams | None = None  # (E,) or (E + P,)


def embed(
    params: EmbedParams,
    *,
    ids: Array,
    config: EmbedConfig,
    positions: Array | None = None,
    types: Array | None = None,
    start: int | Array = 0,
    dropout_key: ops.RandomKey | None = None,
) -> tuple[tuple[Array, Array | None], EmbedCache]:
    """x = project(dropout(norm(scale * table[ids] + p + type))), and positions for attention.

    Mode "add" is this formula. Mode "concat" appends p instead. Mode "qkv" returns p (T, P) beside
    x, for `layers.attention`; other modes return None.

    ids: (B, T)   x: (B, T, D)
    positions: (B, T) or (T,) position ids, mode "add" only; None: start, start + 1, ...
    types: (B, T) token types; None: 0
    start: the position of the first token, an int or an integer array (), whose value is not read
    dropout_key: None: no dropout
    ValueError for ids out of range, too many ids, and params that do not fit config.
    """
    require_tokens("embed", "ids", ids)
    _require_params(params, config)
    _require_options(ids, positions, types, config, start)
    n_batch, n_tokens = ids.shape
    table = value(params.table)
    xp = array_namespace(table)
    x, table_cache = config.lookup(table, ids)  # (B, T, E)
    x = x if config.scale == 1.0 else x * config.scale
    pos, positions_cache = _positions(params, config, start, n_tokens, positions)  # (..., T, P)
    if pos is not None and config.mode == "add":
        x = x + pos
    elif pos is not None and config.mode == "concat":
        x = xp.concat([x, xp.broadcast_to(pos, (n_batch, *pos.shape))], axis=-1)
    types_cache = norm_cache = project_cache = drop_cache = None
    if params.types is not None:
        types = xp.zeros_like(ids) if types is None else types
        typed, types_cache = ops.embedding(value(params.types), ids=types)
        x = x + typed
    if params.norm is not None and config.norm is not None:
        x, norm_cache = norm(x, params.norm, config=config.norm)
    rate = 0.0 if dropout_key is None else config.dropout
    if rate:
        x, drop_cache = ops.dropout(x, rate=rate, key=dropout_key)
    if params.project is not None:
        x, project_cache = linear(x, params.project)
    frozen = tuple(isinstance(a, Frozen) for a in (params.table, params.positions, params.types))
    caches = (table_cache, positions_cache, types_cache, norm_cache, project_cache, drop_cache)
    pos_shape = None if pos is None else tuple(pos.shape)
    cache = saved(EmbedCache(*caches, config, pos_shape, frozen, start))
    return (x, pos if config.mode == "qkv" else None), cache


@short
class EmbedCache(NamedTuple):
    """Saved by `embed` for backward: the caches of its lookups and ops; None for absent steps."""

    table: Any  # of the lookup of token ids
    positions: Any  # of the lookup of position ids; None: rows from `start` on were sliced
    types: Any  # of the lookup of token types
    norm: Any
    project: Any  # of the linear layer to the model's width
    drop: Any  # of dropout; None without dropout
    config: EmbedConfig
    pos_shape: tuple[int, ...] | None  # of the position vectors, to whose shape dpos is summed
    frozen: tuple[bool, ...]  # which of table, positions and types are frozen
    start: Any  # the position of the first token

    def backward(self, dx: Array, dpos: Array | None = None) -> EmbedParams:
        """Gradients of params; None for frozen ones. dpos: the gradient of pos in mode "qkv"."""
        config = self.config
        frozen_table, frozen_positions, frozen_types = self.frozen
        dproject: Any = None
        dnorm = dtypes = None
        if self.project is not None:
            dx, dproject = self.project.backward(dx)
        if self.drop is not None:
            dx = self.drop.backward(dx)
        if self.norm is not None:
            dx, dnorm = self.norm.backward(dx)
        if self.types is not None and not frozen_types:
            dtypes = self.types.backward(dx)
        if config.mode == "add":
            dpos = dx
        elif config.mode == "concat":
            dpos = dx[..., config.width :]
            dx = dx[..., : config.width]
        dpositions = dtable = None
        if config.positions == "learned" and not frozen_positions:
            dpositions = self.positions_backward(dpos)
        if not frozen_table:
            dtable = self.table.backward(dx if config.scale == 1.0 else dx * config.scale)
        return EmbedParams(dtable, dpositions, dproject, dtypes, dnorm)

    def positions_backward(self, dpos: Any) -> Array:
        """The gradient of the table of positions. dpos: of the vectors of each token."""
        return self.table_backward(sum_to(dpos, shape=self.pos_shape or ()))

    def table_backward(self, dpos: Any) -> Array:
        """The gradient of the table of positions. dpos: of the vectors of the positions."""
        if self.positions is not None:
            return self.positions.backward(dpos)
        xp = array_namespace(dpos)
        config = self.config
        first = config.offset + self.start
        unused = (first, config.rows - first - dpos.shape[0])
        before, after = (
            xp.zeros((rows, dpos.shape[1]), dtype=dpos.dtype, device=device(dpos))
            for rows in unused
        )
        return xp.concat([before, dpos, after])


def _require_params(params: EmbedParams, config: EmbedConfig) -> None:
    wanted: dict[str, tuple[int, int] | None] = {
        "table": (config.table_rows, config.width),
        "positions": None,
        "types": (config.n_types, config.width) if config.n_types else None,
    }
    if config.positions == "learned":
        wanted["positions"] = (config.rows, config.position_width)
    for name, shape in wanted.items():
        array = value(getattr(params, name))
        if array is not None:
            require_array("embed", f"params.{name}", array)
        got = None if array is None else tuple(array.shape)
        if got != shape:
            raise ValueError(f"embed: params.{name} must be {shape} by config, got {got}")
    for name, wants in (("norm", config.norm is not None), ("project", config.projects)):
        if (getattr(params, name) is not None) != wants:
            there = "there" if wants else "None"
            raise ValueError(f"embed: params.{name} must be {there} by config")


def _require_options(
    ids: Array,
    positions: Array | None,
    types: Array | None,
    config: EmbedConfig,
    start: int | Array,
) -> None:
    if not hasattr(start, "shape"):
        require_sizes("embed", 0, start=start)
        longest, last = config.rows - config.offset, start + ids.shape[1]
        if config.max_len is not None and positions is None and last > longest:
            raise ValueError(f"embed: at most max_len = {longest} tokens fit, got {last}")
    else:
        start = require_integers("embed", "start", start, ids)
        require_shape("embed", "start", start, ())
    if positions is not None:
        if config.positions == "none" or config.mode != "add":
            raise ValueError(
                "embed: position ids, also those of a mask, need positions in mode "
                f'"add", got positions {config.positions!r} in mode {config.mode!r}'
            )
        if tuple(positions.shape) not in (tuple(ids.shape), tuple(ids.shape[1:])):
            raise ValueError(
                f"embed: positions must be (B, T) = {tuple(ids.shape)} or (T,), "
                f"got shape {tuple(positions.shape)}"
            )
    if types is not None:
        if not config.n_types:
            raise ValueError("embed: types were given, and config.n_types is 0")
        require_tokens("embed", "types", types)
        if tuple(types.shape) != tuple(ids.shape):
            raise ValueError(
                f"embed: types must be (B, T) = {tuple(ids.shape)}, got shape {tuple(types.shape)}"
            )


def _positions(
    params: EmbedParams,
    config: EmbedConfig,
    start: int | Array,
    n_tokens: int,
    positions: Array | None,
) -> tuple[Array | None, Any]:
    """The vectors of the positions, and the cache of the lookup of given positions."""
    if config.positions == "none":
        return None, None
    if positions is None and not isinstance(start, int):
        positions = start + array_namespace(start).arange(n_tokens, device=device(start))
    table = value(params.positions)
    if table is None:
        rows = start + n_tokens if positions is None else config.rows
        table = sinusoidal(rows, config.position_width, like=value(params.table))
    if positions is None:
        first = config.offset + start
        return table[first : first + n_tokens, :], None
    return ops.embedding(table, ids=positions + config.offset)
