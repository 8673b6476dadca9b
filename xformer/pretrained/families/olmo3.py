"""OLMo 3 (arXiv:2512.13961): OLMo 2 with sliding windows, and RoPE by type of layer."""

from __future__ import annotations

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama, olmo2
from xformer.pretrained.rope import rope_by_type

THETA = 500000.0


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. By default each fourth layer attends to all tokens."""
    config = olmo2.block_of(c)
    sizes = llama.windows(c, llama.window(c, default=4096), lambda i: (i + 1) % 4 != 0)
    max_len = c.integer("max_position_embeddings", low=1, default=2048)
    c.only("rope_theta", THETA)  # of windows, releases of transformers read another base as THETA
    ropes = rope_by_type(
        c,
        width=config.attn.head_width,
        max_len=max_len,
        thetas=dict.fromkeys((llama.FULL, llama.SLIDING), THETA),
        names=dict.fromkeys((llama.FULL, llama.SLIDING), "rope_theta"),
        scaled=(llama.FULL,),
    )
    rotary = tuple(ropes[llama.FULL if size is None else llama.SLIDING] for size in sizes)
    return llama.decoder(c, head, llama.windowed(config, sizes), max_len=max_len, rotary=rotary)


FAMILY = llama.family("Olmo3", build, olmo2.layer_links)
