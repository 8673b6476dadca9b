"""RoPE of all layers: one configuration for all, or one or none for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xformer.base.typing import Array
from xformer.layers.rope_config import RopeConfig
from xformer.layers.rope_tables import RopeTables, rope_tables

# Of a model: one for all layers, or for each layer one or None; None: no layer has RoPE.
Rotary = RopeConfig | tuple[RopeConfig | None, ...] | None
LayerTables = RopeTables | Sequence[RopeTables | None] | None


def require_rotary(op: str, rotary: Any, n_layers: int) -> None:
    """TypeError unless `rotary` is a `Rotary`, ValueError unless it fits the number of layers."""
    if rotary is None or isinstance(rotary, RopeConfig):
        return
    if not isinstance(rotary, tuple) or not all(
        config is None or isinstance(config, RopeConfig) for config in rotary
    ):
        raise TypeError(
            f"{op}: rotary must be a RopeConfig, None, or a tuple of them for each layer, "
            f"got {rotary!r}"
        )
    if len(rotary) != n_layers:
        raise ValueError(
            f"{op}: rotary must be one for all layers, or one for each of {n_layers}, "
            f"got {len(rotary)}"
        )


def distinct(rotary: Rotary) -> tuple[RopeConfig, ...]:
    """The different configurations of the layers, each once; empty if no layer has RoPE."""
    configs = rotary if isinstance(rotary, tuple) else (rotary,)
    return tuple(dict.fromkeys(config for config in configs if config is not None))


def max_unscaled_len(rotary: Rotary) -> float:
    """The longest sequence, in tokens, for which the length changes no layer's frequencies.

    inf if they never depend on the length.
    """
    return min((config.max_unscaled_len for config in distinct(rotary)), default=math.inf)


def frequency_length(rotary: Rotary, length: int) -> int:
    """`RopeConfig.frequency_length` of all layers together.

    The largest of the configurations' numbers has the same frequencies as `length` in each of them:
    "dynamic" returns the length itself, and "longrope" returns one more than its bound, which
    `length` is above, too.
    """
    return max((config.frequency_length(length) for config in distinct(rotary)), default=0)


def tables_of(
    rotary: Rotary, *, like: Array, length: int, positions: Array | None = None
) -> LayerTables:
    """The RoPE tables of the layers, computed once for each configuration.

    One for all layers if `rotary` is one for all, else one or None for each.
    For the other arguments and errors see `rope_tables`.
    """
    tables = {
        config: rope_tables(config, like=like, length=length, positions=positions)
        for config in distinct(rotary)
    }
    if isinstance(rotary, tuple):
        return tuple(None if config is None else tables[config] for config in rotary)
    return None if rotary is None else tables[rotary]


def of_layers(op: str, tables: LayerTables, n_layers: int) -> Sequence[RopeTables | None]:
    """The tables of each layer. ValueError unless they are for all layers, or one for each."""
    if tables is None or isinstance(tables, RopeTables):
        return (tables,) * n_layers
    if len(tables) != n_layers:
        raise ValueError(
            f"{op}: rotary must have tables for all layers, or for each of {n_layers}, "
            f"got {len(tables)}"
        )
    return tables
