"""Embeddings of texts, and their cosine similarity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from xformer import ops
from xformer.checks import require_one_of
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
    """Vectors (N, D) of N texts, pooled from their hidden states.

    They are NumPy arrays of the dtype of params.

    `settings(folder)` has the options that a model was trained with.

    model: a LanguageModel
    tokenizer: the model's
    pooling: "mean", "first" ("cls") or "last" of a text's hidden states, or BERT's "pooler"; None:
        "last" for a causal model, whose last token alone depends on the whole text, else "mean"
    normalize: scale the vectors to length 1
    max_len: cut longer texts to this many tokens, special tokens included, at the tokenizer's
        truncation_side, with a warning; None: the model's context
    prompt: a text before each text
    batch_size: the most texts of a batch; on NumPy, batches of long texts are smaller, which is
        faster
    progress: called with the number of texts after each batch

    ValueError or TypeError for other arguments, another model or tokenizer, and a text without
    tokens. An empty text has tokens if the tokenizer adds them (BERT's [CLS] and [SEP]).
    """
    require_language_model("embed", model)
    if pooling is not None:
        require_one_of("embed: pooling", pooling, POOLINGS)
    default = "last" if model.causal else "mean"
    how = {None: default, "cls": "first"}.get(pooling, pooling)

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
    """A function from tokens (B, T) and their mask to vectors (B, D)."""

    def vectors(params: Any, tokens: Array, mask: Array) -> Array:
        return model.pooled(params, tokens, mask=mask, pooling=how, normalize=normalize)[0]

    return Forward(vectors)


def similarity(a: Array, b: Array | None = None) -> Array:
    """The cosine similarities (N, M) of vectors a (N, D) and b (M, D); 0 for a zero vector.

    b: None: a. ValueError for other shapes.
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
