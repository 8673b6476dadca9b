"""Tokens to vectors: embedding, positions, and a projection where widths differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from xformer import ops
from xformer.backends.base import Generator
from xformer.checks import number, require_sizes, require_tokens
from xformer.initial import Draw, normal
from xformer.layers.linear import LinearParams
from xformer.layers.positions import sinusoidal
from xformer.ops.sdpa import sum_to
from xformer.shapes import require_array
from xformer.typing import Array


@dataclass(frozen=True)
class EmbedConfig:
    """Sizes and choices of an embedding. ValueError for ones that do not fit together.

    positions: "sinusoidal", "learned" or "none". mode: how they enter: "add" to the embeddings,
    "concat" behind them, or "qkv": handed on, to be added to queries, keys and values.
    """

    vocab_size: int
    width: int  # of an embedding
    d_model: int  # of the output; a learned projection where the vectors are not that wide
    max_len: int
    positions: str = "sinusoidal"
    mode: str = "add"
    d_positions: int | None = None  # "concat": d_model - width unless given; "qkv": head width
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require_sizes(
            "embed",
            1,
            vocab_size=self.vocab_size,
            width=self.width,
            d_model=self.d_model,
            max_len=self.max_len,
        )
        number("embed", "dropout", self.dropout, low=0, high=1)
        if self.positions not in ("sinusoidal", "learned", "none"):
            raise ValueError(
                'embed: positions must be "sinusoidal", "learned" or "none", '
                f"got {self.positions!r}"
            )
        if self.mode not in ("add", "concat", "qkv"):
            raise ValueError(f'embed: mode must be "add", "concat" or "qkv", got {self.mode!r}')
        if self.positions != "none" and self.position_width < 1:
            raise ValueError(
                f"embed: positions in mode {self.mode!r} need d_positions, with width = "
                f"{self.width} and d_model = {self.d_model}"
            )

    @property
    def position_width(self) -> int:
        """P, the width of a position's vector."""
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

    def init(self, rng: Generator, *, draw: Draw = normal) -> EmbedParams:
        """Initial parameters by `draw`."""
        table = draw(rng, (self.vocab_size, self.width))
        learned = self.positions == "learned"
        positions = draw(rng, (self.max_len, self.position_width)) if learned else None
        project = None
        if self.joined_width != self.d_model:
            shape = (self.joined_width, self.d_model)
            project = LinearParams.init(rng, shape, draw=draw, bias=False)
        return EmbedParams(table, positions, project)


class EmbedParams(NamedTuple):
    """Parameters of an embedding."""

    table: Array  # (V, E)
    positions: Array | None  # (L, P), where learned
    project: LinearParams | None  # (E, D) or (E + P, D)


def embed(
    params: EmbedParams, *, ids: Array, config: EmbedConfig, dropout_key: ops.Key | None = None
) -> tuple[tuple[Array, Array | None], EmbedCache]:
    """x = dropout(project(table[ids] + p)), or with p concatenated, or with p returned as pos.

    ids: (B, T), T <= max_len   x: (B, T, D)   pos: (T, P) in mode "qkv", else None. ValueError
    where ids are out of range or too many, or params not those of config.
    """
    require_tokens("embed", "ids", ids)
    _require_params(params, config)
    n_batch, n_tokens = ids.shape
    if n_tokens > config.max_len:
        raise ValueError(f"embed: at most max_len = {config.max_len} tokens fit, got {n_tokens}")
    xp = array_namespace(params.table)
    x, table_cache = ops.embedding(params.table, ids=ids)  # (B, T, E)
    pos = _positions(params, config, n_tokens)  # (T, P)
    if pos is not None and config.mode == "add":
        x = x + pos
    elif pos is not None and config.mode == "concat":
        x = xp.concat([x, xp.broadcast_to(pos, (n_batch, *pos.shape))], axis=-1)
    project_cache = None
    if params.project is not None:
        x, project_cache = ops.linear(x, *params.project)
    rate = 0.0 if dropout_key is None else config.dropout
    x, drop_cache = ops.dropout(x, rate=rate, key=dropout_key)
    cache = EmbedCache(table_cache, project_cache, drop_cache, config, n_tokens)
    return (x, pos if config.mode == "qkv" else None), cache


class EmbedCache(NamedTuple):
    """What `embed` keeps for its backward."""

    table: Any
    project: Any
    drop: Any
    config: EmbedConfig
    n_tokens: int

    def backward(self, dx: Array, dpos: Array | None = None) -> EmbedParams:
        """Gradients of params, from those of x and of pos."""
        config = self.config
        xp = array_namespace(dx)
        dx = self.drop.backward(dx)
        dproject: Any = None
        if self.project is not None:
            dx, *dproject = self.project.backward(dx)
            dproject = LinearParams(*dproject)
        if config.mode == "add":
            dpos = dx
        elif config.mode == "concat":
            dpos = dx[..., config.width :]
            dx = dx[..., : config.width]
        dpositions = None
        if config.positions == "learned":
            dpositions = sum_to(dpos, (self.n_tokens, config.position_width))
            unused = (config.max_len - self.n_tokens, config.position_width)
            zeros = xp.zeros(unused, dtype=dx.dtype, device=device(dx))
            dpositions = xp.concat([dpositions, zeros])
        return EmbedParams(self.table.backward(dx), dpositions, dproject)


def _require_params(params: EmbedParams, config: EmbedConfig) -> None:
    wanted: dict[str, tuple[int, int] | None] = {
        "table": (config.vocab_size, config.width),
        "positions": None,
    }
    if config.positions == "learned":
        wanted["positions"] = (config.max_len, config.position_width)
    for name, shape in wanted.items():
        array = getattr(params, name)
        if array is not None:
            require_array("embed", f"params.{name}", array)
        got = None if array is None else tuple(array.shape)
        if got != shape:
            raise ValueError(f"embed: params.{name} must be {shape} by config, got {got}")


def _positions(params: EmbedParams, config: EmbedConfig, n_tokens: int) -> Array | None:
    if config.positions == "none":
        return None
    if params.positions is not None:
        return params.positions[:n_tokens, :]
    return sinusoidal(n_tokens, config.position_width, like=params.table)
