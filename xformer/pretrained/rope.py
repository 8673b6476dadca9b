"""RoPE in a config.json, as transformers 4 and 5 write it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from xformer.layers.rope_config import RopeConfig
from xformer.pretrained.config import Config
from xformer.pretrained.reading import PretrainedError

TYPES = {kind: kind for kind in ("default", "linear", "dynamic", "yarn", "llama3", "longrope")}
ORIGINAL = "original_max_position_embeddings"


def rope(
    c: Config,
    *,
    width: int,
    max_len: int,
    theta: float = 10000.0,
    share: float | None = None,
    original: int | None = None,
    types: Mapping[str, str] = TYPES,
    names: Mapping[str, str] = {},
    default: Mapping[str, Any] = {},
) -> RopeConfig:
    """The RoPE configuration of heads of `width` channels, in a model for `max_len` tokens.

    max_len: the family's value if `max_position_embeddings` is missing

    It reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers
    4), and also `partial_rotary_factor` and `original_max_position_embeddings`. Defaults are those
    of transformers 5.23 (`modeling_rope_utils.py`).

    theta: the default base of the family.
    share: the default fraction of channels that the family rotates. None: it rotates all channels,
        and its configuration must not have another value.
    original: `original_max_position_embeddings` if the key is missing outside the parameters. The
        parameters must not have another value. None: the value in the parameters, or max_len.
    types: the family's types, and what they mean.
    names: the family's names of `rope_theta` and `partial_rotary_factor` outside the parameters.
    default: the family's parameters if the configuration has none

    Raises PretrainedError.
    """
    max_len = c.integer("max_position_embeddings", low=1, default=max_len)
    part = _part(c, default)
    theta = _agreed(c, part, "rope_theta", theta, names)
    turned = _agreed(c, part, "partial_rotary_factor", 1.0 if share is None else share, names)
    if not (turned == 1 if share is None else 0 < turned <= 1):
        wanted = "1 in this family" if share is None else "more than 0 and at most 1"
        message = f"partial_rotary_factor must be {wanted}, got {turned:g}"
        raise PretrainedError(f"{part.where}: {message}")
    return _scaled(c, part, max_len, int(width * turned), theta, original=original, types=types)


def rope_by_type(
    c: Config,
    *,
    width: int,
    max_len: int,
    thetas: Mapping[str, float],
    names: Mapping[str, str],
    scaled: Collection[str],
) -> dict[str, RopeConfig]:
    """The RoPE configuration of each type of layer, for heads of `width` channels.

    It reads `rope_parameters`, which must have an object for each type (transformers 5), or the
    bases and `rope_scaling` (transformers 4). All channels are rotated.

    max_len: of `rope`
    thetas: type of layer -> the family's default base
    names: type of layer -> the key of its base outside the parameters
    scaled: the types of layers to which `rope_scaling` applies

    Raises PretrainedError.
    """
    max_len = c.integer("max_position_embeddings", low=1, default=max_len)
    none = Config({}, f"{c.where}: rope_parameters")
    found, scaling = c.sub("rope_parameters") or none, c.sub("rope_scaling") or none
    if any(not isinstance(value, dict | None) for value in found.data.values()):
        raise c.refused("rope_parameters", f"an object for each of {', '.join(thetas)}")
    if found.data and scaling.data:
        raise c.refused("rope_scaling", "absent beside rope_parameters")
    if "type" in scaling and "rope_type" not in scaling:
        # Of these families, transformers 4 reads it, and transformers 5 does not.
        raise PretrainedError(f"{scaling.where}: rope_type is missing, and releases differ in type")
    ropes = {}
    for kind, theta in thetas.items():
        part = found.sub(kind) or (scaling if kind in scaled else none)
        outer = c.number(names[kind], default=None)
        inner = part.number("rope_theta", default=theta if outer is None else outer)
        if outer is not None and inner != outer:
            raise part.refused("rope_theta", f"{outer:g}, as {names[kind]} of {c.where}")
        part.only("partial_rotary_factor", 1)
        ropes[kind] = _scaled(c, part, max_len, width, inner)
    return ropes


def _scaled(
    c: Config,
    part: Config,
    max_len: int,
    width: int,
    theta: float,
    *,
    original: int | None = None,
    types: Mapping[str, str] = TYPES,
) -> RopeConfig:
    """The configuration with the scaling of the parameters `part`, for `width` channels."""
    kind = part.text("type", choices=tuple(types), default="default")
    kind = types[part.text("rope_type", choices=tuple(types), default=kind)]
    part.only("type", *(name for name, meant in types.items() if meant == kind))
    options = _options(kind, c, part, max_len, original, width)
    scaling = "none" if kind == "default" else kind
    try:
        return RopeConfig(width, theta, scaling=scaling, **options)
    except ValueError as error:
        raise PretrainedError(f"{part.where}: {error}") from error


def _options(
    kind: str, c: Config, part: Config, max_len: int, original: int | None, width: int
) -> dict[str, Any]:
    """The options of a scaling of kind `kind`. `finish` refuses keys that it does not read."""
    options: dict[str, Any] = {}
    if kind in ("linear", "dynamic", "llama3"):
        options["factor"] = part.number("factor")
    if kind == "dynamic":
        options["max_len"] = max_len
    if kind == "llama3":
        options |= {name: part.number(name) for name in ("low_freq_factor", "high_freq_factor")}
    c.integer(ORIGINAL, default=None)  # other kinds may have it too, without effect
    if kind in ("yarn", "llama3", "longrope"):
        part.integer(ORIGINAL, default=None)
        if original is not None and ORIGINAL not in c:
            part.only(ORIGINAL, original)
        options["original_max_len"] = int(_agreed(c, part, ORIGINAL, original or max_len))
    if kind in ("yarn", "longrope"):
        options["max_len"] = max_len
        options |= {
            name: part.number(name, default=None) for name in ("factor", "attention_factor")
        }
    if kind == "yarn":
        options |= {name: part.number(name, default=None) for name in ("mscale", "mscale_all_dim")}
        options["beta_fast"] = part.number("beta_fast", default=32.0)
        options["beta_slow"] = part.number("beta_slow", default=1.0)
        options["truncate"] = part.flag("truncate", default=True)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            options[name] = part.numbers(name, length=width // 2)
    return options


def _part(c: Config, default: Mapping[str, Any]) -> Config:
    """The object with the parameters; one with `default` if there is none."""
    names = ("rope_parameters", "rope_scaling")
    c.ignore(*names)  # null and {} have no effect
    present = [name for name in names if c.data.get(name) not in (None, {})]
    if len(present) == 2 and c.data[present[0]] != c.data[present[1]]:
        raise c.refused("rope_scaling", "absent, or as rope_parameters")
    if (part := c.sub(present[0]) if present else None) is None:
        # transformers 5 takes the family's parameters beside an empty rope_scaling, too.
        own = default if c.data.get("rope_parameters") is None else {}
        return Config(own, f"{c.where}: rope_parameters")
    if any(isinstance(value, dict) for value in part.data.values()):
        raise c.refused(present[0], "the parameters of all layers, not of each type")
    return part


def _agreed(
    c: Config, part: Config, name: str, default: float, names: Mapping[str, str] = {}
) -> Any:
    """A number that may be among the parameters or outside; if it is in both, they must agree."""
    outer = c.number(names.get(name, name), default=None)
    if name in names:  # transformers 4 writes it too, but reads the family's name
        c.only(name, default if outer is None else outer)
    inner = part.number(name, default=outer)
    if outer is not None and inner != outer:
        raise part.refused(name, f"{outer:g}, as outside {part.where}")
    return default if inner is None else inner
