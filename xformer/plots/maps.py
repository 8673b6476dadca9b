"""Attention maps: the attention probabilities of every head, by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from xformer import backends
from xformer.base.typing import Array
from xformer.dispatch import reference_only
from xformer.generation.prefix import backend_of_params
from xformer.models import EncoderDecoder, LanguageModel


def attention_maps(
    model: Any, params: Any, tokens: Array, target: Array | None = None
) -> dict[str, tuple[np.ndarray, ...]]:
    """Kind of attention -> the probabilities (B, H, T, S) of each layer, on the host.

    The kinds are "self" for a language model, and "encoder", "decoder" and "cross" for an
    encoder-decoder. A row has the probabilities of one query over the keys. They sum to 1, minus
    the probability of a sink. They are 0 for a query without an allowed key.

    tokens: (B, T), or the source (B, S) for an encoder-decoder.
    target: (B, T) for an encoder-decoder, else None.

    TypeError for another kind of model. ValueError if target does not fit the model, and for
    reversible blocks.
    """
    if not isinstance(model, LanguageModel | EncoderDecoder):
        raise TypeError(f"attention_maps: model must be one of xformer.models, got {model!r:.60}")
    if (target is not None) != isinstance(model, EncoderDecoder):
        needs = "needs a target" if target is None else "has no target"
        raise ValueError(f"attention_maps: {type(model).__name__} {needs}")
    if any(config.reversible for config in model.blocks):
        raise ValueError("attention_maps: reversible blocks save no attention probabilities")
    model = replace(
        model, activation_checkpointing=False
    )  # else its caches have only inputs of blocks
    # Caches of the reference have the probabilities; caches of kernels may not.
    with backend_of_params(params).active(), reference_only():
        if isinstance(model, LanguageModel):
            _, cache = model.hidden(params, tokens)
            return {"self": _on_host([block.attn.sublayer for block in cache.stack.blocks])}
        _, both = model.forward(params, tokens, target)
    decoder = both.decode.stack.blocks
    return {
        "encoder": _on_host([block.attn.sublayer for block in both.encode.stack.blocks]),
        "decoder": _on_host([block.attn.sublayer for block in decoder]),
        "cross": _on_host([block.cross.sublayer for block in decoder]),
    }


def _on_host(caches: list[Any]) -> tuple[np.ndarray, ...]:
    """The probabilities of the caches of `layers.attention`."""
    probs = [cache.core.probs for cache in caches]
    return tuple(backends.backend_of(p).to_numpy(p) for p in probs)
