"""Cohere's Command R7B and Command A (arXiv:2504.00698): RoPE in windows, none elsewhere."""

from __future__ import annotations

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.families.cohere import HEADS, interleaved, side_by_side, tied

UNREAD = {  # keys of Command R7B, which describe the family
    "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    **dict.fromkeys(("use_embedding_sharing", "use_gated_activation"), True),
    **dict.fromkeys(("use_parallel_block", "use_parallel_embedding"), True),
}


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration.

    By default each fourth layer attends to all tokens, without RoPE. The others have a window.
    """
    for name, value in UNREAD.items():
        c.unread(name, value)
    config = side_by_side(c)
    each = c.integer("sliding_window_pattern", low=1, default=4)
    sizes = llama.windows(c, llama.window(c, default=4096), lambda i: (i + 1) % each != 0)
    turned = interleaved(c, config, 10000.0)
    rotary = tuple(None if size is None else turned for size in sizes)
    return tied(c, head, llama.windowed(config, sizes), rotary=rotary)


FAMILY = llama.family("Cohere2", build, heads=HEADS)
