"""Rank documents by a query, with a cross-encoder, which reads both as one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.base.choices import require_one_of
from xformer.dispatch.checks import require_sizes, require_utf8
from xformer.models import Classifier
from xformer.models.describe import in_words
from xformer.sentences.batches import (
    Finished,
    Progress,
    activated,
    by_batch,
    listed,
    require_language_model,
)
from xformer.sentences.settings import ACTIVATIONS, activation_of


class Ranked(NamedTuple):
    """A document and its score."""

    index: int  # type: ignore[assignment]  # of the document in the list that was given
    score: float
    text: str


def rank(
    model: Any,
    params: Any,
    tokenizer: Any,
    query: str,
    documents: Sequence[str],
    *,
    top_k: int | None = None,
    activation: str | None = None,
    max_len: int | None = None,
    prompt: str = "",
    batch_size: int = 32,
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> list[Ranked]:
    """The documents and their scores, the highest score first.

    score = activation(logit of the pair (prompt + query, document)). Of equal scores, the first
    document is first. `rank_settings(folder)` has the options that a model was saved with.

    model: a cross-encoder, which is a LanguageModel with a Classifier of one class
    top_k: the most documents of the result; None: all
    activation: "sigmoid" or "identity"; None: that of the model's config.json, else "sigmoid"
    prompt: a text before the query
    max_len, batch_size, progress, finished (with a Ranked for each document), and errors: see
        `embed`; of a pair that is too long, the longer text is cut
    ValueError also for another model.
    """
    require_language_model("rank", model)
    if not isinstance(model.head, Classifier) or model.head.n_labels != 1:
        raise ValueError(
            f"rank: the model must be a cross-encoder, a classifier of 1 class, got "
            f"{in_words(model)}"
        )
    if not isinstance(query, str):
        raise TypeError(f"rank: query must be a string, got {type(query).__name__}")
    require_utf8("rank: query", query)
    if activation is not None:
        require_one_of("rank: activation", activation, ACTIVATIONS)
    if top_k is not None:
        (top_k,) = require_sizes("rank", 1, top_k=top_k)
    texts = listed("rank", documents)

    def of_rows(start: int, rows: np.ndarray) -> list[Ranked]:
        return [Ranked(i, score, texts[i]) for i, score in enumerate(rows[:, 0].tolist(), start)]

    scores = by_batch(
        "rank",
        model,
        params,
        tokenizer,
        [(query, text) for text in texts],
        activated(model, activation or activation_of(model.hf_config or {}) or "sigmoid"),
        1,
        pairs=True,
        max_len=max_len,
        prompt=prompt,
        batch_size=batch_size,
        progress=progress,
        finished=None if finished is None else lambda i, rows: finished(i, of_rows(i, rows)),
    )
    return in_order(of_rows(0, scores), top_k)


def in_order(documents: list[Ranked], top_k: int | None = None) -> list[Ranked]:
    """The documents in the order of their scores, the highest first. top_k: the most; None: all."""
    return sorted(documents, key=lambda one: -one.score)[:top_k]
