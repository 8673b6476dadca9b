"""Families of models, one a file: how to read and write each `model_type` of a config.json."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from xformer.pretrained.family import Family

_ATTRIBUTES = {
    "albert": "albert.FAMILY",
    "bert": "bert.FAMILY",
    "camembert": "camembert.FAMILY",
    "cohere": "cohere.FAMILY",
    "cohere2": "cohere2.FAMILY",
    "deepseek_v2": "deepseek_v2.FAMILY",
    "deepseek_v3": "deepseek_v3.FAMILY",
    "distilbert": "distilbert.FAMILY",
    "electra": "electra.FAMILY",
    "gemma2": "gemma2.FAMILY",
    "gemma3_text": "gemma3.FAMILY",
    "gpt2": "gpt2.FAMILY",
    "gpt_neox": "gpt_neox.FAMILY",
    "gpt_oss": "gpt_oss.FAMILY",
    "granite": "granite.FAMILY",
    "llama": "llama.FAMILY",
    "llama2.c": "llama2c.FAMILY",
    "mistral": "mistral.FAMILY",
    "mixtral": "mixtral.FAMILY",
    "modernbert": "modernbert.FAMILY",
    "mpnet": "mpnet.FAMILY",
    "nn.Transformer": "torch_nn.TRANSFORMER",
    "nn.TransformerEncoder": "torch_nn.ENCODER",
    "nomic_bert": "nomic_bert.FAMILY",
    "olmo2": "olmo2.FAMILY",
    "olmo3": "olmo3.FAMILY",
    "olmoe": "olmoe.FAMILY",
    "phi3": "phi3.FAMILY",
    "qwen2": "qwen2.FAMILY",
    "qwen2_moe": "qwen2_moe.FAMILY",
    "qwen3": "qwen3.FAMILY",
    "qwen3_5_text": "qwen3_5.FAMILY",
    "qwen3_moe": "qwen3_moe.FAMILY",
    "roberta": "roberta.FAMILY",
    "smollm3": "smollm3.FAMILY",
    "starcoder2": "starcoder2.FAMILY",
    "t5": "t5.FAMILY",
    "xlm-roberta": "xlm_roberta.FAMILY",
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
