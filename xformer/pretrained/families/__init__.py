"""Families of models: how to read and write each `model_type` of a config.json.

A file has a family, or a few near relatives.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from xformer.pretrained.family import Family

# The files with one family, called `FAMILY`, which has the file's name.
_FILES = (
    *("albert", "bert", "distilbert", "electra", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama"),
    *("modernbert", "mpnet", "nomic_bert", "phi3", "roberta", "smollm3", "starcoder2", "t5"),
)
# The files with several, which have the names of their `model_type` in capitals.
_RELATIVES = {
    "cohere": ("cohere", "cohere2"),
    "deepseek": ("deepseek_v2", "deepseek_v3"),
    "gemma": ("gemma2", "gemma3_text"),
    "mistral": ("mistral", "mixtral"),
    "olmo": ("olmo2", "olmo3", "olmoe"),
    "qwen": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    "roberta": ("camembert", "xlm-roberta"),
}
_ATTRIBUTES = {name: f"{name}.FAMILY" for name in _FILES} | {
    "llama2.c": "llama2c.FAMILY",
    "nn.Transformer": "torch_nn.TRANSFORMER",
    "nn.TransformerEncoder": "torch_nn.ENCODER",
    "qwen3_5_text": "qwen3_5.FAMILY",
}
for _file, _names in _RELATIVES.items():
    _ATTRIBUTES |= {name: f"{_file}.{name.upper().replace('-', '_')}" for name in _names}


class _Families(Mapping[str, Family]):
    """`model_type` -> family. A family's file is imported when it is first used: all take 10 ms."""

    def __getitem__(self, name: str) -> Family:
        file, _, attribute = _ATTRIBUTES[name].partition(".")
        family: Family = getattr(importlib.import_module(f"{__name__}.{file}"), attribute)
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(_ATTRIBUTES)

    def __len__(self) -> int:
        return len(_ATTRIBUTES)


FAMILIES = _Families()


def __getattr__(name: str) -> Any:
    if any(path.partition(".")[0] == name for path in _ATTRIBUTES.values()):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
