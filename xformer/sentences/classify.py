"""Class probabilities of texts, by a sequence classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.models import Classifier, TokenClassifier
from xformer.models.describe import in_words
from xformer.sentences.batches import (
    Finished,
    Progress,
    Text,
    activated,
    by_batch,
    require_language_model,
)

KINDS = ("single_label_classification", "multi_label_classification")


def classify(
    model: Any,
    params: Any,
    tokenizer: Any,
    texts: Sequence[Text],
    *,
    max_len: int | None = None,
    batch_size: int = 32,
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> np.ndarray:
    """Probabilities (N, n_labels) of the classes `labels(model)`, for N texts or pairs of texts.

    The probabilities of a text sum to 1, unless the configuration's problem_type is
    "multi_label_classification" or there is a single class.

    model: a LanguageModel with a Classifier
    texts: strings, and pairs of strings such as a premise and a hypothesis (natural language
        inference)
    max_len, batch_size, progress, finished, and errors: see `embed`
    ValueError also for another model, and for problem_type "regression".
    """
    head = _head(model)
    source = model.hf_config or {}
    kind = source.get("problem_type") or KINDS[0]
    if kind not in KINDS:
        raise ValueError(f"classify: problem_type must be {' or '.join(KINDS)}, got {kind!r:.100}")
    alone = kind == KINDS[1] or head.n_labels == 1

    return by_batch(
        "classify",
        model,
        params,
        tokenizer,
        texts,
        activated(model, "sigmoid" if alone else "softmax"),
        head.n_labels,
        pairs=True,
        max_len=max_len,
        prompt="",
        batch_size=batch_size,
        progress=progress,
        finished=finished,
    )


def labels(model: Any) -> list[str]:
    """The names of a classifier's classes: the configuration's id2label, else LABEL_0, ...

    model: a LanguageModel with a Classifier or a TokenClassifier

    Several classes may have the same name. ValueError for another model, and for names that are not
    strings.
    """
    head = getattr(model, "head", None)
    head = head if isinstance(head, TokenClassifier) else _head(model)
    names = (model.hf_config or {}).get("id2label") or {}
    by_number = {str(key): name for key, name in names.items()}
    numbers = range(head.n_labels)
    listed = [by_number[str(i)] if names else f"LABEL_{i}" for i in numbers]
    for name in listed:
        if not isinstance(name, str):
            raise ValueError(f"labels: id2label must hold strings, got {name!r:.100}")
    return listed


def _head(model: Any) -> Classifier:
    require_language_model("classify", model)
    if not isinstance(model.head, Classifier):
        raise ValueError(
            f"classify: the model must be a classifier, got {in_words(model)}; to make it one: "
            "xformer finetune --task classify"
        )
    return model.head
