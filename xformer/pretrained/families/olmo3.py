"""OLMo 3 (arXiv:2512.13961): OLMo 2 with sliding windows, and RoPE by type of layer."""

from __future__ import annotations

from collections.abc import Collection

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import olmo2
from xformer.pretrained.families.llama import (
    FULL,
    SLIDING,
    decoder,
    family,
    window,
    windowed,
    windows,
)
from xformer.pretrained.family import layers
from xformer.pretrained.rope import rope_by_type

THETA = 500000.0


def build(c: Config, head: str, names: Collection[str] | None) -> LanguageModel:
    """Return the model of a configuration. By default each fourth layer attends to all tokens."""
    config = olmo2.block_of(c)
    n_layers = layers(c)
    fourth = tuple((i + 1) % 4 != 0 for i in range(n_layers))
    sizes = windows(c, n_layers, window(c, default=4096), fourth)
    max_len = c.integer("max_position_embeddings", low=1, default=2048)
    c.only("rope_theta", THETA)  # of windows, releases of transformers read another base as THETA
    ropes = rope_by_type(
        c,
        width=config.attn.head_width,
        max_len=max_len,
        thetas=dict.fromkeys((FULL, SLIDING), THETA),
        names=dict.fromkeys((FULL, SLIDING), "rope_theta"),
        scaled=(FULL,),
    )
    rotary = tuple(ropes[FULL if size is None else SLIDING] for size in sizes)
    return decoder(c, head, windowed(config, sizes), max_len=max_len, rotary=rotary)


FAMILY = family("Olmo3", build, olmo2.links)
