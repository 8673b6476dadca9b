"""Configuration of the rotary position embedding (RoPE)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from xformer.base.choices import require_one_of
from xformer.dispatch.checks import number, plain_numbers, require_sizes

# The parameters that a scaling needs, and those that are optional.
NEEDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_len"),
    "yarn": ("original_max_len",),
    "llama3": ("factor", "original_max_len", "low_freq_factor", "high_freq_factor"),
    "longrope": ("original_max_len", "short_factor", "long_factor"),
}
TAKES: dict[str, tuple[str, ...]] = {
    "yarn": (
        *("factor", "max_len", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("factor", "max_len", "attention_factor"),
}
ALWAYS = ("width", "theta", "interleaved", "scaling")
POSITIVE = (
    *("factor", "attention_factor", "beta_fast", "beta_slow"),
    *("low_freq_factor", "high_freq_factor"),
)


@dataclass(frozen=True)
class RopeConfig:
    """The RoPE frequencies theta^(-2i / R) of pair i, and their scaling to longer texts.

    scaling: "none" (arXiv:2104.09864), "linear" (arXiv:2306.15595), "dynamic" (NTK-aware),
        "yarn" (arXiv:2309.00071), "llama3" (Llama 3.1) or "longrope" (arXiv:2402.13753), each as
        in Hugging Face's transformers

    ValueError for a missing parameter, for one that the scaling does not use, and for values out of
    range. TypeError for values of another type.
    """

    width: int  # R, the number of rotated channels of a head: all, or the first (partial RoPE)
    theta: float = 10000.0
    interleaved: bool = False  # pairs (2i, 2i + 1); otherwise (i, i + R/2)
    scaling: str = "none"
    factor: float | None = None  # "yarn", "longrope": None: max_len / original_max_len
    original_max_len: int | None = None  # "yarn", "llama3", "longrope": the trained length
    max_len: int | None = None  # the model's length; "dynamic": the trained length
    attention_factor: float | None = None  # of cos and sin; None: as "yarn", "longrope" define
    # Turns are the rotations of a pair over the trained length.
    beta_fast: float = 32.0  # "yarn": a pair with more turns keeps its frequency
    beta_slow: float = 1.0  # "yarn": the frequency of a pair with fewer turns is divided by factor
    mscale: float | None = None  # "yarn": with mscale_all_dim, for another attention factor
    mscale_all_dim: float | None = None
    truncate: bool = True  # "yarn": round both bounds outwards, to whole pairs
    low_freq_factor: float | None = None  # "llama3": like beta_slow
    high_freq_factor: float | None = None  # "llama3": like beta_fast
    short_factor: tuple[float, ...] | None = None  # "longrope": R/2 divisors of the frequencies
    long_factor: tuple[float, ...] | None = None  # "longrope": those beyond original_max_len

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_sizes("rotary", 2, width=self.width)
        if self.width % 2:
            raise ValueError(f"rotary: width must be even, got {self.width}")
        _require_given(self)
        _require_numbers(self)
        _require_order(self)

    @property
    def max_unscaled_len(self) -> float:
        """The longest sequence, in tokens, for which the length does not change the frequencies.

        inf if they never depend on the length.
        """
        if self.scaling == "dynamic" and self.max_len is not None:
            return self.max_len
        if self.scaling == "longrope" and self.original_max_len is not None:
            return self.original_max_len
        return math.inf

    def frequency_length(self, length: int) -> int:
        """A length that identifies the frequencies of a text of `length` tokens.

        Two texts have the same frequencies if and only if this number is the same. It is 0 up to
        `max_unscaled_len`. Beyond it, "dynamic" has other frequencies for each length, and
        "longrope" has one other set.
        """
        if length <= self.max_unscaled_len:
            return 0
        return length if self.scaling == "dynamic" else int(self.max_unscaled_len) + 1

    @property
    def stretch(self) -> float:
        """The ratio of the longest length to the trained one; 1 if it is unknown."""
        if self.factor is not None:
            return float(self.factor)
        if self.max_len is not None and self.original_max_len is not None:
            return self.max_len / self.original_max_len
        return 1.0


def _require_given(config: RopeConfig) -> None:
    scaling = config.scaling
    require_one_of("rotary: scaling", scaling, NEEDS)
    for name in NEEDS[scaling]:
        if getattr(config, name) is None:
            raise ValueError(f'rotary: scaling "{scaling}" needs {name}')
    takes = TAKES.get(scaling, ())
    if "max_len" in takes and config.factor is None and config.max_len is None:
        raise ValueError(f'rotary: scaling "{scaling}" needs factor or max_len')
    for field in fields(config):
        unused = field.name not in (*ALWAYS, *NEEDS[scaling], *takes)
        if unused and getattr(config, field.name) != field.default:
            raise ValueError(f'rotary: scaling "{scaling}" does not use {field.name}')


def _require_numbers(config: RopeConfig) -> None:
    theta = number("rotary", "theta", config.theta)
    if not 1 < theta < math.inf:
        raise ValueError(f"rotary: theta must be larger than 1 and finite, got {theta:g}")
    for name in POSITIVE:
        if getattr(config, name) is not None or name in ("beta_fast", "beta_slow"):
            _require_positive(name, getattr(config, name))
    for name in ("beta_fast", "beta_slow"):
        number("rotary", name, getattr(config, name), low=1e-6, high=1e6)
    for name in ("interleaved", "truncate"):
        if not isinstance(getattr(config, name), bool):
            raise TypeError(f"rotary: {name} must be a bool, got {getattr(config, name)!r}")
    for name in ("mscale", "mscale_all_dim"):
        number("rotary", name, getattr(config, name) or 0.0, low=0)
    for name, low in (("original_max_len", 2), ("max_len", 1)):
        if getattr(config, name) is not None:
            require_sizes("rotary", low, **{name: getattr(config, name)})
    for name in ("short_factor", "long_factor"):
        if getattr(config, name) is not None:
            _require_divisors(name, getattr(config, name), config.width // 2)


def _require_divisors(name: str, divisors: tuple[float, ...], pairs: int) -> None:
    if not isinstance(divisors, tuple) or len(divisors) != pairs:
        raise ValueError(f"rotary: {name} must be a tuple of R/2 = {pairs}, got {divisors!r}")
    for i, divisor in enumerate(divisors):
        _require_positive(f"{name}[{i}]", divisor)


def _require_positive(name: str, value: float) -> None:
    if not 0 < number("rotary", name, value) < math.inf:
        raise ValueError(f"rotary: {name} must be positive and finite, got {value:g}")


def _require_order(config: RopeConfig) -> None:
    if config.scaling == "dynamic" and config.width == 2:
        raise ValueError('rotary: scaling "dynamic" needs a width of at least 4, got 2')
    if config.beta_fast < config.beta_slow:
        raise ValueError(
            f"rotary: beta_fast must be at least beta_slow = {config.beta_slow:g}, "
            f"got {config.beta_fast:g}"
        )
    low, high = config.low_freq_factor, config.high_freq_factor
    if low is not None and high is not None and high <= low:
        raise ValueError(
            f"rotary: high_freq_factor must be larger than low_freq_factor = {low:g}, got {high:g}"
        )
