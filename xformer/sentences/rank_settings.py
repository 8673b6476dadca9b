"""The options of a cross-encoder, from the files of sentence-transformers in its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xformer.pretrained.config import Config
from xformer.pretrained.reading import read_json
from xformer.sentences.settings import MODULES, WHOLE, prompts_of, read_max_len, read_modules

ACTIVATIONS = ("sigmoid", "identity")
CLASSES = {  # of torch
    **dict.fromkeys(("torch.nn.Sigmoid", "torch.nn.modules.activation.Sigmoid"), "sigmoid"),
    **dict.fromkeys(("torch.nn.Identity", "torch.nn.modules.linear.Identity"), "identity"),
}
CHAIN = "Transformer"
KEY, OLD_KEY = "sentence_transformers", "sbert_ce_default_activation_function"  # of config.json


class RankSettings(NamedTuple):
    """Options of `rank`."""

    activation: str | None = None
    max_len: int | None = None
    prompt: str = ""


def rank_settings(folder: str | os.PathLike[str]) -> RankSettings:
    """The options of `rank` in a model's folder; without such files, the defaults of `rank`.

    PretrainedError for damaged files, for a model that is no cross-encoder, and for modules or
    options that are not supported.
    """
    root = Path(folder)
    activation, prompt = _whole(root / WHOLE) if os.path.lexists(root / WHOLE) else (None, "")
    if os.path.lexists(root / MODULES):
        read_modules(root / MODULES, CHAIN, CHAIN)
    max_len = read_max_len(root, "sequence-classification")
    return RankSettings(activation, max_len, prompt)


def activation_of(config: Mapping[str, Any]) -> str | None:
    """The activation that a config.json names; None if it names none.

    PretrainedError for another activation than `ACTIVATIONS`.
    """
    c = Config(dict(config), "config.json")
    part = c.sub(KEY)
    if part is not None and "activation_fn" in part.data:
        return _activation(part, "activation_fn")
    return _activation(c, OLD_KEY)


def _activation(c: Config, key: str) -> str | None:
    name = c.text(key, choices=tuple(CLASSES), default=None)
    return None if name is None else CLASSES[name]


def _whole(path: Path) -> tuple[str | None, str]:
    """The activation and the default prompt."""
    c = Config(read_json(path), str(path))
    c.ignore("__version__", "keep_in_fp32_modules", "requirements")
    c.only("model_type", "CrossEncoder")
    activation = _activation(c, "activation_fn")
    known, name = prompts_of(c)
    c.finish()
    return activation, "" if name is None else known[name]
