"""RoPE tables for `ops.rope`, with every scaling to longer texts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_integers, require_sizes
from xformer.dispatch.shapes import FLOATING, STORED, dtype_name, require_array, working_dtype
from xformer.layers.constant import constant
from xformer.layers.rope_config import NEEDS, RopeConfig

Frequencies = tuple[tuple[float, ...], float]


class RopeTables(NamedTuple):
    """The arguments of `ops.rope` beside x: `ops.rope(x, **tables._asdict())`."""

    cos: Array  # (T, R/2) or (B, T, R/2)
    sin: Array  # like cos
    interleaved: bool


def rope_tables(
    config: RopeConfig, *, like: Array, length: int, positions: Array | None = None
) -> RopeTables:
    """cos(p f_i) and sin(p f_i), times the attention factor, for positions p and frequencies f_i.

    cos, sin: (..., R/2), of the library and on the device of `like`, in its working dtype
    length: of the text; the frequencies of "dynamic" and "longrope" depend on it
    positions: integers (T,) or (B, T); None: 0, 1, ..., length - 1
    ValueError for a negative length and positions of another shape. TypeError for arrays of another
    type.
    """
    require_array("rotary", "like", like)
    if dtype_name(like) not in (*FLOATING, *STORED):
        raise TypeError(f"rotary: like must be float32 or float64, got {dtype_name(like)}")
    (length,) = require_sizes("rotary", 0, length=length)
    if positions is None:
        positions = array_namespace(like).arange(length, device=device(like))
    else:
        positions = require_integers("rotary", "positions", positions, like)
        if positions.ndim not in (1, 2):
            raise ValueError(
                f"rotary: positions must be (T,) or (B, T), got shape {tuple(positions.shape)}"
            )
    length = config.frequency_length(length)
    cos, sin = cos_sin(positions, config=config, length=length, dtype=working_dtype(like))
    return RopeTables(cos, sin, config.interleaved)


@overridable(backward=False)
def cos_sin(
    positions: Array, *, config: RopeConfig, length: int, dtype: Any
) -> tuple[Array, Array]:
    """cos and sin of `rope_tables`. length: `RopeConfig.frequency_length` of the text."""
    xp, where = array_namespace(positions), device(positions)
    # Angles are in float64 if there is one (JAX must enable it): at position 8192, a float32 angle
    # has an error of up to 2^-11, and so have its cos and sin.
    dtypes = xp.__array_namespace_info__().dtypes(device=where, kind="real floating")
    wide = dtypes.get("float64", dtype)
    _, factor = _known(config, length)
    f = constant(positions, of=_known_frequencies, args=(config, length), dtype=wide)
    angles = xp.astype(positions, wide)[..., None] * f
    cos, sin = (xp.astype(factor * a, dtype) for a in (xp.cos(angles), xp.sin(angles)))
    return cos, sin


def frequencies(config: RopeConfig, length: int) -> Frequencies:
    """The R/2 frequencies for texts of `length`, in radians a position, and the attention factor.

    Computed in float64 on the host. ValueError for a negative length.
    """
    (length,) = require_sizes("rotary", 0, length=length)
    return _known(config, config.frequency_length(length))


def _known_frequencies(config: RopeConfig, length: int) -> tuple[float, ...]:
    return _known(config, length)[0]


@functools.lru_cache(maxsize=64)  # decoding asks for them at each token
def _known(config: RopeConfig, length: int) -> Frequencies:
    return SCALINGS[config.scaling](config, length)


def _none(config: RopeConfig, length: int) -> Frequencies:
    return _powers(config, config.theta), 1.0


def _linear(config: RopeConfig, length: int) -> Frequencies:
    return tuple(f / config.stretch for f in _powers(config, config.theta)), 1.0


def _dynamic(config: RopeConfig, length: int) -> Frequencies:
    """A larger theta for texts longer than the trained length, which is max_len here."""
    factor, trained = _needed(config)
    excess = max(length / trained - 1, 0.0)
    theta = config.theta * (1 + factor * excess) ** (config.width / (config.width - 2))
    return _powers(config, theta), 1.0


def _yarn(config: RopeConfig, length: int) -> Frequencies:
    """Fast pairs keep their frequency, slow ones are divided by factor, with a ramp between.

    The ramp is over the index of the pair. The index follows from the turns over the original
    length L: f = theta^(-2i / R) = 2 pi turns / L.
    """
    (original,) = _needed(config)

    def index(turns: float) -> float:
        log = math.log(original / (2 * math.pi * turns))
        return config.width * log / (2 * math.log(config.theta))

    low, high = index(config.beta_fast), index(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    # R - 1, although R/2 - 1 would suffice: models were trained with YaRN's code, which has R - 1.
    low, high = max(low, 0), min(high, config.width - 1)
    if low == high:
        high += 0.001
    powers = _powers(config, config.theta)
    scaled = (_mix(config, f, 1 - _ramp(i, low, high)) for i, f in enumerate(powers))
    return tuple(scaled), _yarn_attention(config)


def _yarn_attention(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return float(config.attention_factor)
    growth = 0.1 * math.log(max(config.stretch, 1.0))
    if config.mscale and config.mscale_all_dim:
        return (config.mscale * growth + 1) / (config.mscale_all_dim * growth + 1)
    return growth + 1


def _llama3(config: RopeConfig, length: int) -> Frequencies:
    """Like `_yarn`, with a ramp over the turns of a pair over the original length."""
    _, original, low, high = _needed(config)
    powers = _powers(config, config.theta)
    ramps = (_ramp(original * f / (2 * math.pi), low, high) for f in powers)
    return tuple(_mix(config, f, keep) for f, keep in zip(powers, ramps, strict=True)), 1.0


def _longrope(config: RopeConfig, length: int) -> Frequencies:
    """A divisor for each pair, which a search has found; others beyond the original length."""
    original, short, long = _needed(config)
    divisors = long if length > original else short
    scaled = (f / float(d) for f, d in zip(_powers(config, config.theta), divisors, strict=True))
    factor = config.attention_factor
    if factor is None:
        factor = math.sqrt(1 + math.log(max(config.stretch, 1.0)) / math.log(original))
    return tuple(scaled), float(factor)


def _needed(config: RopeConfig) -> tuple[Any, ...]:
    """The parameters that the scaling needs, in the order of NEEDS."""
    values = (getattr(config, name) for name in NEEDS[config.scaling])
    return tuple(v if isinstance(v, tuple) else float(v) for v in values)


def _powers(config: RopeConfig, theta: float) -> tuple[float, ...]:
    return tuple(float(theta) ** (-i / config.width) for i in range(0, config.width, 2))


def _ramp(x: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high`, linear between."""
    return min(max((x - low) / (high - low), 0.0), 1.0)


def _mix(config: RopeConfig, f: float, keep: float) -> float:
    return keep * f + (1 - keep) * f / config.stretch


SCALINGS: dict[str, Callable[[RopeConfig, int], Frequencies]] = {
    "none": _none,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
