"""SPLADE: sparse vectors of texts over the vocabulary, and the options in a model's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer import layers
from xformer.base.choices import require_one_of
from xformer.base.typing import Array
from xformer.compiling import Forward
from xformer.layers.splade import POOLINGS, SATURATIONS
from xformer.models.describe import in_words
from xformer.pretrained.config import Config
from xformer.pretrained.reading import PretrainedError, read_json
from xformer.sentences.batches import KEPT, Progress, by_batch, require_language_model
from xformer.sentences.settings import MODULES, read_max_len, read_modules, read_prompt

CHAIN = "(MLMTransformer|Transformer) SpladePooling"
ACTIVATIONS = {"relu": "log", "log1p_relu": "log_log"}  # sentence-transformers -> layers.splade


class SpladeSettings(NamedTuple):
    """Options of `splade`."""

    pooling: str = "max"
    saturation: str = "log"
    max_len: int | None = None
    prompt: str = ""


def splade(
    model: Any,
    params: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: str = "max",
    saturation: str = "log",
    max_len: int | None = None,
    prompt: str = "",
    batch_size: int = 32,
    progress: Progress | None = None,
) -> np.ndarray:
    """Sparse vectors (N, V) of N texts: a weight, 0 or more, for each token of the vocabulary.

    They are dense arrays, in which most numbers are 0. The score of a query and a document is the
    inner product of their vectors. `splade_settings(folder)` has the options of a model.

    model: a LanguageModel with the head of a masked language model
    pooling, saturation: of `layers.splade`, which also has the backward
    max_len, prompt, batch_size, progress, and errors: see `embed`
    """
    require_language_model("splade", model)
    if model.causal or model.head is None or not model.head.of_tokens:
        raise ValueError(
            f"splade: the model must be a masked language model, got {in_words(model)}"
        )
    require_one_of("splade: pooling", pooling, POOLINGS)
    require_one_of("splade: saturation", saturation, SATURATIONS)
    return by_batch(
        "splade",
        model,
        params,
        tokenizer,
        texts,
        _weights(model, pooling, saturation),
        model.embed.vocab_size,
        max_len=max_len,
        prompt=prompt,
        batch_size=batch_size,
        progress=progress,
    )


def splade_settings(
    folder: str | os.PathLike[str], *, prompt_name: str | None = None
) -> SpladeSettings:
    """The options of `splade` in the folder of a SparseEncoder of sentence-transformers.

    prompt_name and errors: see `settings`. PretrainedError also for a folder without SpladePooling.
    """
    root = Path(folder)
    if not os.path.lexists(root / MODULES):
        raise PretrainedError(f"{root}: is no SPLADE model: it has no {MODULES}")
    wanted = "Transformer, SpladePooling"
    (_, path) = read_modules(root / MODULES, CHAIN, wanted)[1]
    where = root / path / "config.json"
    c = Config(read_json(where), str(where))
    c.ignore("word_embedding_dimension", "embedding_dimension")
    pooling = c.text("pooling_strategy", choices=POOLINGS, default="max")
    activation = c.text("activation_function", choices=tuple(ACTIVATIONS), default="relu")
    c.finish()
    return SpladeSettings(
        pooling,
        ACTIVATIONS[activation],
        read_max_len(root, "fill-mask"),
        read_prompt(root, prompt_name, "SparseEncoder"),
    )


@lru_cache(KEPT)
def _weights(model: Any, pooling: str, saturation: str) -> Forward:
    """A function from tokens (B, T) and their mask to weights (B, V)."""

    def weights(params: Any, tokens: Array, mask: Array) -> Array:
        logits, _ = model.forward(params, tokens, mask=mask)
        return layers.splade(logits, pooling=pooling, saturation=saturation, mask=mask)[0]

    return Forward(weights)
