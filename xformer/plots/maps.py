"""What a model attends to: the probabilities of every head, by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from xformer import backends
from xformer.dispatch import reference_only
from xformer.generation.prefix import place_of
from xformer.layers.block import BlockCache
from xformer.models import EncoderDecoder, LanguageModel
from xformer.typing import Array


def attention_maps(
    model: Any, params: Any, tokens: Array, target: Array | None = None
) -> dict[str, tuple[np.ndarray, ...]]:
    """By kind of attention, of each layer the probabilities of all heads: (B, H, T, S) on the host.

    "self" of a language model, tokens (B, T); "encoder", "decoder" and "cross" of an
    encoder-decoder, tokens (B, S) of the source and target (B, T). A row holds the shares in which
    a query attends to the keys; they sum to 1, less the share of a sink, or are 0 where there is
    nothing to attend to. ValueError where model and arguments do not go together.
    """
    network = getattr(model, "network", model)
    if not isinstance(network, LanguageModel | EncoderDecoder):
        raise TypeError(f"attention_maps: model must be one of xformer.models, got {model!r:.60}")
    if (target is not None) != isinstance(network, EncoderDecoder):
        needs = "needs a target" if target is None else "has no target"
        raise ValueError(f"attention_maps: {type(network).__name__} {needs}")
    network = replace(
        network, activation_checkpointing=False
    )  # or its caches would hold inputs only
    # The reference's caches hold the probabilities, which a kernel may not keep.
    with place_of(params).active(), reference_only():
        if isinstance(network, LanguageModel):
            _, cache = network.hidden(params, tokens)
            own = [_self_attention(block) for block in cache.stack.blocks]
            return {"self": _on_host(own)}
        _, both = network.forward(params, tokens, target)
    decoder = both.decode.stack.blocks
    return {
        "encoder": _on_host([_self_attention(block) for block in both.encode.stack.blocks]),
        "decoder": _on_host([_self_attention(block) for block in decoder]),
        "cross": _on_host([block.cross.sublayer for block in decoder]),
    }


def _self_attention(block: Any) -> Any:
    return block.attn.sublayer if isinstance(block, BlockCache) else block.both.first


def _on_host(caches: list[Any]) -> tuple[np.ndarray, ...]:
    """The probabilities of the caches of `layers.attention`."""
    probs = [cache.core.probs for cache in caches]
    return tuple(backends.backend_of(p).to_numpy(p) for p in probs)
