"""Granite 3: Llama with four fixed multipliers (as in muP, arXiv:2203.03466)."""

from __future__ import annotations

from dataclasses import replace

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import layers


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. The logits are divided by `logits_scaling`."""
    config = llama.block(
        c,
        ffn=llama.gated(c, bias=c.flag("mlp_bias", default=False)),
        bias=c.flag("attention_bias", default=False),
        scale=c.number("attention_multiplier", default=1.0),
    )
    multiplier = c.number("residual_multiplier", default=1.0)
    return llama.decoder(
        c,
        head,
        (replace(config, residual_multiplier=multiplier),) * layers(c),
        embed_scale=c.number("embedding_multiplier", default=1.0),
        logit_scale=1 / c.number("logits_scaling", low=1e-9, default=1.0),
    )


FAMILY = llama.family("Granite", build, heads=("ForCausalLM", "Model"))
