"""Embeddings of texts, and their cosine similarity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from xformer import ops
from xformer.base.choices import require_one_of
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.compiling import Forward
from xformer.dispatch.checks import require_sizes
from xformer.dispatch.shapes import require_array
from xformer.layers import pooling as layers_pooling
from xformer.sentences.batches import (
    KEPT,
    Finished,
    Progress,
    by_batch,
    require_language_model,
    require_parts,
)
from xformer.sentences.dense import Dense, dense, maps_like, width_after
from xformer.sentences.settings import SIMILARITIES

ALIASES = {"cls": "first"}
POOLINGS = (*layers_pooling.POOLINGS, *ALIASES, "pooler")


def embed(
    model: Any,
    params: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: str | tuple[str, ...] | None = None,
    modules: tuple[Dense, ...] = (),
    truncate_dim: int | None = None,
    normalize: bool = True,
    max_len: int | None = None,
    prompt: str = "",
    include_prompt: bool = True,
    batch_size: int = 32,
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> np.ndarray:
    """Vectors (N, D) of N texts, pooled from their hidden states.

    They are NumPy arrays of the dtype of params.

    `settings(folder)` has the options that a model was trained with.

    model: a LanguageModel
    tokenizer: the model's
    pooling: of `layers.pool` over a text's hidden states: "mean", "first" ("cls"), "last", "max",
        "sum", "mean_sqrt_len", "weighted_mean", or a tuple of them; or BERT's "pooler"; None:
        "last" for a causal model, whose last token alone depends on the whole text, else "mean"
    modules: Dense modules of the pooled vectors, in this order
    truncate_dim: cut the vectors to this many numbers, before they are normalised
    normalize: scale the vectors to length 1
    max_len: cut longer texts to this many tokens, special tokens included, at the tokenizer's
        truncation_side, with a warning; None: the model's context
    prompt: a text before each text, such as an instruction
    include_prompt: False: the tokens of the prompt, and special tokens before it, are not pooled
    batch_size: the most texts of a batch; on NumPy, batches of long texts are smaller, which is
        faster
    progress: called with the number of texts after each batch
    finished: called with the number of a text and the vectors from this text on, as soon as they
        and the vectors of all texts before are computed

    ValueError or TypeError for other arguments, another model or tokenizer, a text without tokens,
    and a vector that is zero or not finite. An empty text has tokens if the tokenizer adds them
    (BERT's [CLS] and [SEP]).
    """
    require_language_model("embed", model)
    require_parts("embed", params, tokenizer)
    how = pooling_of("embed", model, pooling)
    joined = model.d_model * (len(how) if isinstance(how, tuple) else 1)
    width = width_after("embed", modules, joined)
    if truncate_dim is not None:
        (truncate_dim,) = require_sizes("embed", 1, truncate_dim=truncate_dim)
        if truncate_dim > width:
            raise ValueError(f"embed: truncate_dim must be at most {width}, got {truncate_dim}")
        width = truncate_dim
    skip = 0 if include_prompt else n_tokens_of_prompt(tokenizer, prompt)
    activations = tuple(module.activation for module in modules)
    run = _vectors(model, how, skip, activations, truncate_dim, normalize)
    maps = maps_like(params, modules)

    return by_batch(
        "embed",
        model,
        params,
        tokenizer,
        texts,
        lambda params, tokens, mask: run((params, maps), tokens, mask),
        width,
        max_len=max_len,
        prompt=prompt,
        skip=skip,
        batch_size=batch_size,
        progress=progress,
        finished=finished,
        nonzero=True,
    )


def pooling_of(
    what: str, model: Any, pooling: str | tuple[str, ...] | None
) -> str | tuple[str, ...]:
    """A pooling of `LanguageModel.pooled`, of an option of `embed`. ValueError for other names."""
    if pooling is None:
        return "last" if model.causal else "mean"
    if isinstance(pooling, tuple):
        names = tuple(ALIASES.get(name, name) for name in pooling)
        return layers_pooling.pooling_names(what, names)
    require_one_of(f"{what}: pooling", pooling, POOLINGS)
    return ALIASES.get(pooling, pooling)


def n_tokens_of_prompt(tokenizer: Any, prompt: str) -> int:
    """The number of tokens before a text, which the prompt and special tokens before it make."""
    ids = tokenizer.encode(prompt) if prompt else []
    return len(ids) - (len(ids) > 0 and ids[-1] in tokenizer.special_ids)


@lru_cache(KEPT)
def _vectors(
    model: Any,
    how: str | tuple[str, ...],
    skip: int,
    activations: tuple[str | None, ...],
    dim: int | None,
    normalize: bool,
) -> Forward:
    """A function from (params, maps), tokens (B, T) and their mask to vectors (B, D)."""

    def vectors(params: Any, tokens: Array, mask: Array) -> Array:
        own, maps = params
        y, _ = model.pooled(own, tokens, mask=mask, pooling=how, skip=skip)
        y = dense(y, tuple(map(Dense, maps, activations)))
        y = y if dim is None else y[:, :dim]
        return ops.l2_normalize(y)[0] if normalize else y

    return Forward(vectors)


def similarity(a: Array, b: Array | None = None, *, name: str = "cosine") -> Array:
    """The similarities (N, M) of vectors a (N, D) and b (M, D).

    b: None: a
    name: `similarity_name(folder)` has the one that a model was trained with
        - "cosine": 0 for a zero vector
        - "dot": the inner product
        - "euclidean", "manhattan": the negative distance, the root of the sum of squares or the sum
          of absolute values of a - b

    ValueError for other shapes and another name.
    """
    require_one_of("similarity: name", name, SIMILARITIES["SentenceTransformer"])
    b = a if b is None else b
    for which, vectors in (("a", a), ("b", b)):
        require_array("similarity", which, vectors)
        if vectors.ndim != 2 or vectors.shape[1] != a.shape[-1]:
            wanted = "(N, D)" if which == "a" else f"(M, {a.shape[1]})"
            raise ValueError(
                f"similarity: {which} must be {wanted}, got shape {tuple(vectors.shape)}"
            )
    if name == "cosine":
        a, b = ops.l2_normalize(a)[0], ops.l2_normalize(b)[0]
    if name in ("cosine", "dot"):
        products: Array = a @ b.mT
        return products
    xp = array_namespace(a)
    rows = []
    for i in range(a.shape[0]):  # all at once would need N M D numbers
        gaps = xp.abs(b - a[i : i + 1, :])
        far = xp.sum(gaps, axis=1) if name == "manhattan" else xp.sqrt(xp.sum(gaps**2, axis=1))
        rows.append(0 - far)  # -0.0 would be shown as such
    distances: Array = xp.stack(rows) if rows else a @ b.mT
    return distances
