"""Families of models: for each `model_type` of a config.json what it means. One family a file."""

from xformer.pretrained.families import (
    albert,
    bert,
    distilbert,
    gemma2,
    gpt2,
    gpt_neox,
    llama,
    llama2c,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    roberta,
    t5,
    torch_nn,
)
from xformer.pretrained.family import Family

FAMILIES: dict[str, Family] = {
    "albert": albert.FAMILY,
    "bert": bert.FAMILY,
    "distilbert": distilbert.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gpt2": gpt2.FAMILY,
    "gpt_neox": gpt_neox.FAMILY,
    "llama": llama.FAMILY,
    llama2c.MODEL_TYPE: llama2c.FAMILY,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.FAMILY,
    "nn.Transformer": torch_nn.TRANSFORMER,
    "nn.TransformerEncoder": torch_nn.ENCODER,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "roberta": roberta.FAMILY,
    "t5": t5.FAMILY,
}
