"""Families of models, one a file: how to read and write each `model_type` of a config.json."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from xformer.pretrained.family import Family

# The families whose files have their names, each with one `FAMILY`.
_FILES = (
    *("albert", "bert", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "distilbert", "electra"),
    *("gemma2", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama", "mistral", "mixtral"),
    *("modernbert", "mpnet", "nomic_bert", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "roberta", "smollm3", "starcoder2", "t5"),
)
_ATTRIBUTES = {name: f"{name}.FAMILY" for name in _FILES} | {
    "camembert": "roberta.CAMEMBERT",
    "gemma3_text": "gemma3.FAMILY",
    "llama2.c": "llama2c.FAMILY",
    "nn.Transformer": "torch_nn.TRANSFORMER",
    "nn.TransformerEncoder": "torch_nn.ENCODER",
    "qwen3_5_text": "qwen3_5.FAMILY",
    "xlm-roberta": "roberta.XLM_ROBERTA",
}


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
