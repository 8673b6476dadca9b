"""The probability of each class for each text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from xformer import ops
from xformer.compiling import Forward
from xformer.models import Classifier
from xformer.sentences.batches import KEPT, Progress, by_batch, require_language_model
from xformer.typing import Array

KINDS = ("single_label_classification", "multi_label_classification")


def classify(
    model: Any,
    params: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    max_len: int | None = None,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> np.ndarray:
    """Probabilities (N, n_labels) of the classes that `labels` names, for each of N texts.

    They sum to 1, except where classes do not exclude each other: by the configuration's
    problem_type "multi_label_classification", and for a single class. The rest as in `embed`;
    ValueError also for a model that is no classifier, or that predicts numbers ("regression").
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
        _probabilities(model, alone),
        head.n_labels,
        max_len=max_len,
        prompt="",
        batch_size=batch_size,
        progress=progress,
    )


@lru_cache(KEPT)
def _probabilities(model: Any, alone: bool) -> Forward:
    """(B, n_labels) of tokens (B, T) and their mask."""

    def probabilities(params: Any, tokens: Array, mask: Array) -> Array:
        logits, _ = model.forward(params, tokens, mask=mask)
        return (ops.sigmoid if alone else ops.softmax)(logits)[0]

    return Forward(probabilities)


def labels(model: Any) -> list[str]:
    """The names of a classifier's classes, by the configuration's id2label; else LABEL_0, ...

    Several classes may have one name. ValueError for another model, or names that are no strings.
    """
    head = _head(model)
    names = (model.hf_config or {}).get("id2label") or {}
    by_number = {str(key): name for key, name in names.items()}
    numbers = range(head.n_labels)
    found = [by_number[str(i)] if names else f"LABEL_{i}" for i in numbers]
    for name in found:
        if not isinstance(name, str):
            raise ValueError(f"classify: id2label must hold strings, got {name!r:.100}")
    return found


def _head(model: Any) -> Classifier:
    require_language_model("classify", model)
    if not isinstance(model.head, Classifier):
        got = "no head" if model.head is None else f"head {type(model.head).__name__}"
        raise ValueError(f"classify: the model must have a Classifier for its head, got {got}")
    return model.head
