"""`adapter_config.json`: the ranks and scales of adapters.

scale = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora (arXiv:2312.03732). `rank_pattern`
and `alpha_pattern` have other values for single modules, by name or by a regular expression for the
end of the name.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from xformer.finetune.modules import Adapter
from xformer.pretrained import PretrainedError
from xformer.pretrained.config import Config, warn_of

CONFIG = "adapter_config.json"
MAX_RANK, MAX_PATTERNS = 1 << 16, 10_000
# Only regular expressions without repetition: others may never end.
PATTERN = re.compile(r"[\w.^$\\-]{1,500}")

# Keys about training, and about the adapted modules, which the tensors name too.
HARMLESS = (
    *("task_type", "base_model_name_or_path", "revision", "peft_version", "auto_mapping"),
    *("inference_mode", "lora_dropout", "target_modules", "exclude_modules", "layers_pattern"),
    *("layers_to_transform", "runtime_config", "megatron_core", "qalora_group_size", "eva_config"),
    *("fan_in_fan_out", "ensure_weight_tying", "modules_to_save"),
)
# Other methods, layers or initialisations, which are not implemented.
FLAGS = ("use_dora", "use_qalora", "use_bdlora", "lora_bias")
LISTS = (
    *("target_parameters", "trainable_token_indices", "alora_invocation_tokens"),
    "layer_replication",
)
OBJECTS = (
    *("loftq_config", "arrow_config", "corda_config", "kasa_config", "lora_ga_config"),
    *("megatron_config", "monteclora_config", "velora_config"),
)
METHODS: dict[str, Any] = {  # each with its neutral value
    **dict.fromkeys(FLAGS, False),
    **{key: [] for key in LISTS},
    **{key: {} for key in OBJECTS},
}


def written(adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    """The configuration of the adapters: the most frequent rank and alpha, and all others."""
    ranks = {name: adapter.a.shape[1] for name, adapter in adapters.items()}
    alphas = {name: adapter.scale * ranks[name] for name, adapter in adapters.items()}
    # PEFT declares lora_alpha as int.
    alphas = {name: int(a) if a == int(a) else a for name, a in alphas.items()}
    rank, alpha = (Counter(x.values()).most_common(1)[0][0] for x in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {name: a for name, a in alphas.items() if a != alpha},
        "target_modules": sorted(adapters),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


class Scales:
    """The scales of a configuration. PretrainedError for options that are not supported."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        c = Config(data, where)
        c.only("peft_type", "LORA")
        c.only("bias", "none")
        # Other initialisations change the base model too, which the adapter's file does not have.
        c.only("init_lora_weights", True, False, "gaussian", "eva", "orthogonal")
        for key, nothing in METHODS.items():
            c.only(key, nothing)
        c.ignore(*HARMLESS)
        self._where = where
        self._rank = c.integer("r", low=1, high=MAX_RANK)
        self._alpha = c.number("lora_alpha", low=0)
        self._root = c.flag("use_rslora", default=False)
        self._ranks, self._alphas = (_patterns(c, f"{kind}_pattern") for kind in ("rank", "alpha"))
        unread = c.unasked()
        c.accept(unread)  # PEFT ignores them too, with a warning
        warn_of(unread, where, "PEFT")

    def of(self, module: str, rank: int) -> float:
        """The scale of a module's adapter. rank: of its tensors; PretrainedError if it differs."""
        wanted = _matching(self._ranks, module, self._rank)
        if rank != wanted:
            raise PretrainedError(
                f"{self._where}: {module!r:.200} must have rank {wanted:g}, its tensors have {rank}"
            )
        alpha = _matching(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._root else rank)


def _patterns(c: Config, name: str) -> list[tuple[re.Pattern[str], float]]:
    """Regular expressions for names of modules, each with its number."""
    part = c.sub(name)
    part = Config({}) if part is None else part
    if len(part.data) > MAX_PATTERNS:
        raise PretrainedError(f"{c.where}: {name} must have at most {MAX_PATTERNS} keys")
    patterns = []
    for key in part.data:
        try:
            if not PATTERN.fullmatch(key):
                raise ValueError("it must be a name, or an expression without repetition")
            re.compile(key)  # for its own errors
            patterns.append((re.compile(rf"(.*\.)?({key})$"), part.number(key, low=0)))
        except (ValueError, re.error) as error:
            if isinstance(error, PretrainedError):
                raise
            raise PretrainedError(f"{c.where}: {name}: {key!r:.100}: {error}") from None
    return patterns


def _matching(patterns: list[tuple[re.Pattern[str], float]], module: str, default: float) -> float:
    """The number of the first expression that matches a name; `default` without a match."""
    return next((number for pattern, number in patterns if pattern.match(module)), default)
