"""SmolLM3: Llama with layers that have no RoPE (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from dataclasses import replace

from xformer.layers.rope_by_layer import distinct
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import layers


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. By default, each fourth layer has no RoPE."""
    c.unread("max_window_layers", 28)  # in SmolLM3-3B
    c.unread("pretraining_tp", 2)
    bias = c.flag("attention_bias", default=False)
    ffn = llama.gated(c, bias=c.flag("mlp_bias", default=False))
    config = llama.block(c, kv_heads=4, bias=bias, ffn=ffn)
    has_rope = _has_rope(c)
    size = llama.window(c)
    size = size if c.flag("use_sliding_window", default=False) else None
    sizes = llama.windows(c, size, lambda i: size is not None and not has_rope[i])
    model = llama.decoder(
        c, head, llama.windowed(config, sizes), max_len=32768, theta=2e6, tied=True
    )
    (one,) = distinct(model.rotary)
    return replace(model, rotary=tuple(one if turned else None for turned in has_rope))


def _has_rope(c: Config) -> tuple[bool, ...]:
    """Return whether each layer has RoPE; `no_rope_layers`, despite its name, has a 1 if so."""
    n_layers = layers(c)
    interval = c.integer("no_rope_layer_interval", low=1, default=4)
    given = c.integers("no_rope_layers", high=1, default=None)
    if given is None:
        return tuple((i + 1) % interval != 0 for i in range(n_layers))
    if len(given) < n_layers:
        raise c.refused("no_rope_layers", f"a list of at least {n_layers} integers")
    return tuple(map(bool, given[:n_layers]))


FAMILY = llama.family("SmolLM3", build)
