"""Gemma 3 for text (arXiv:2503.19786) and EmbeddingGemma (arXiv:2509.20354)."""

from __future__ import annotations

from collections.abc import Collection

from xformer.layers.kv_cache import Window
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import gemma2
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
from xformer.pretrained.names import Links, norm
from xformer.pretrained.rope import rope_by_type


def build(c: Config, head: str, names: Collection[str] | None) -> LanguageModel:
    """Return the model of a configuration.

    By default each sixth layer attends to all tokens, and the others have a sliding window and
    RoPE of another base. With `use_bidirectional_attention` (EmbeddingGemma) the model is an
    encoder, whose windows have half the size on both sides of the query.
    """
    config = gemma2.block_of(c, qk_norm="head")
    c.only("attn_logit_softcapping", None)  # transformers has the key, but does not use it
    bidirectional = c.flag("use_bidirectional_attention", default=False)
    causal_window = window(c, default=4096)
    local: Window | None = causal_window
    if bidirectional and causal_window is not None:
        half = (causal_window[0] + 1) // 2
        local = half, half
    n_layers = layers(c)
    each = c.integer("sliding_window_pattern", low=1, default=6)
    c.unread("_sliding_window_pattern", each)
    sizes = windows(c, n_layers, local, tuple((i + 1) % each != 0 for i in range(n_layers)))
    max_len = c.integer("max_position_embeddings", low=1, default=131072)
    ropes = rope_by_type(
        c,
        width=config.attn.head_width,
        max_len=max_len,
        thetas={FULL: 1e6, SLIDING: 1e4},
        names={FULL: "rope_theta", SLIDING: "rope_local_base_freq"},
        scaled=(FULL,),
    )
    return decoder(
        c,
        head,
        windowed(config, sizes),
        max_len=max_len,
        tied=True,
        embed_scale=config.d_model**0.5,
        softcap=c.number("final_logit_softcapping", low=1e-9, default=None),
        rotary=tuple(ropes[FULL if size is None else SLIDING] for size in sizes),
        causal=not bidirectional,
    )


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`).

    The names are those of Gemma 2, and of the norms of queries and keys.
    """
    yield from gemma2.links(model)
    for i in range(len(model.blocks)):
        theirs, ours = f"model.layers.{i}.self_attn", f"stack.blocks.{i}.attn"
        yield from norm(f"{theirs}.q_norm", f"{ours}.q_norm")
        yield from norm(f"{theirs}.k_norm", f"{ours}.kv.k_norm")


FAMILY = family("Gemma3Text", build, links)._replace(
    heads={
        "Gemma3ForCausalLM": "lm",
        "Gemma3TextForSequenceClassification": "classifier",
        "Gemma3TextModel": "hidden",
    }
)
