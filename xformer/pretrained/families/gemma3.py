"""Gemma 3 for text (arXiv:2503.19786) and EmbeddingGemma (arXiv:2509.20354)."""

from __future__ import annotations

from xformer.layers.kv_cache import Window
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import gemma2, llama
from xformer.pretrained.rope import rope_by_type


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration.

    By default each sixth layer attends to all tokens, and the others have a sliding window and
    RoPE of another base. With `use_bidirectional_attention` (EmbeddingGemma) the model is an
    encoder, whose windows have half the size on both sides of the query.
    """
    config = gemma2.block_of(c, qk_norm="head")
    c.only("attn_logit_softcapping", None)  # transformers has the key, but does not use it
    bidirectional = c.flag("use_bidirectional_attention", default=False)
    causal_window = llama.window(c, default=4096)
    local: Window | None = causal_window
    if bidirectional and causal_window is not None:
        half = (causal_window[0] + 1) // 2
        local = half, half
    each = c.integer("sliding_window_pattern", low=1, default=6)
    c.unread("_sliding_window_pattern", each)
    sizes = llama.windows(c, local, lambda i: (i + 1) % each != 0)
    max_len = c.integer("max_position_embeddings", low=1, default=131072)
    ropes = rope_by_type(
        c,
        width=config.attn.head_width,
        max_len=max_len,
        thetas={llama.FULL: 1e6, llama.SLIDING: 1e4},
        names={llama.FULL: "rope_theta", llama.SLIDING: "rope_local_base_freq"},
        scaled=(llama.FULL,),
    )
    return llama.decoder(
        c,
        head,
        llama.windowed(config, sizes),
        max_len=max_len,
        tied=True,
        embed_scale=config.d_model**0.5,
        softcap=c.number("final_logit_softcapping", low=1e-9, default=None),
        rotary=tuple(ropes[llama.FULL if size is None else llama.SLIDING] for size in sizes),
        causal=not bidirectional,
    )


FAMILY = llama.family("Gemma3Text", build, gemma2.layer_links)._replace(
    heads={
        "Gemma3ForCausalLM": "lm",
        "Gemma3TextForSequenceClassification": "classifier",
        "Gemma3TextModel": "hidden",
    }
)
