"""One vector for each text, and how alike vectors are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from xformer import ops
from xformer.compiling import Forward
from xformer.sentences.batches import KEPT, Progress, by_batch, require_language_model
from xformer.typing import Array

POOLINGS = ("mean", "first", "cls", "last", "pooler")


def embed(
    model: Any,
    params: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: str | None = None,
    normalize: bool = True,
    max_len: int | None = None,
    prompt: str = "",
    batch_size: int = 32,
    progress: Progress | None = None,
) -> np.ndarray:
    """Vectors (N, D) of N texts: their hidden states, pooled. On the host, of the type of params.

    pooling: the "mean" of a text's hidden states, that of its "first" ("cls") or "last" token, or
    BERT's "pooler"; unless given the last of a causal model, which alone has seen the whole text,
    the mean of others. normalize: to length 1. max_len: longer texts are cut to so many tokens,
    special ones included, at the tokenizer's truncation_side, with a warning; none is longer than
    the model's context. prompt: what
    the model wants before each text. batch_size: texts at once, at most; on NumPy fewer where they
    are long, which is faster there. progress: called with the number of texts after each batch.

    `settings(folder)` has what the model was trained with. ValueError, TypeError for arguments that
    are not such, another model or tokenizer, and a text without tokens: an empty one has some where
    the tokenizer adds them (BERT's [CLS] and [SEP]).
    """
    require_language_model("embed", model)
    if pooling not in (None, *POOLINGS):
        raise ValueError(f"embed: pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    usual = "last" if model.causal else "mean"
    how = {None: usual, "cls": "first"}.get(pooling, pooling)

    return by_batch(
        "embed",
        model,
        params,
        tokenizer,
        texts,
        _vectors(model, how, normalize),
        model.d_model,
        max_len=max_len,
        prompt=prompt,
        batch_size=batch_size,
        progress=progress,
    )


@lru_cache(KEPT)
def _vectors(model: Any, how: str, normalize: bool) -> Forward:
    """(B, D) of tokens (B, T) and their mask."""

    def vectors(params: Any, tokens: Array, mask: Array) -> Array:
        return model.pooled(params, tokens, mask=mask, pooling=how, normalize=normalize)[0]

    return Forward(vectors)


def similarity(a: Array, b: Array | None = None) -> Array:
    """Cosines (N, M) of vectors a (N, D) and b (M, D), a itself unless given; 0 for a vector of 0.

    ValueError for other shapes.
    """
    b = a if b is None else b
    for name, vectors in (("a", a), ("b", b)):
        if vectors.ndim != 2 or vectors.shape[1] != a.shape[-1]:
            wanted = "(N, D)" if name == "a" else f"(M, {a.shape[1]})"
            raise ValueError(
                f"similarity: {name} must be {wanted}, got shape {tuple(vectors.shape)}"
            )
    cosines: Array = ops.l2_normalize(a)[0] @ ops.l2_normalize(b)[0].mT
    return cosines
