"""Accuracy and F1 of classifiers and of taggers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from xformer import backends
from xformer.backends import Backend
from xformer.base import tree
from xformer.base.typing import Array
from xformer.compiling import Forward
from xformer.finetune.base_task import Example, Task
from xformer.finetune.pairs import Classify
from xformer.finetune.tagging import TagWords
from xformer.sentences import labels
from xformer.training.batch import IGNORED
from xformer.training.shuffled import Rows

KEPT = 8  # models whose programs are kept


def measure(
    task: Task,
    params: Any,
    examples: Sequence[Example],
    backend: str | Backend,
    *,
    batch_size: int = 8,
) -> dict[str, float]:
    """The accuracy and F1 of the predictions for examples; {} if the task has no classes.

    accuracy: the fraction of right texts; of a tagger, of right words
    f1: the mean over the classes (macro F1). Of a tagger whose labels begin with B- and I-, the F1
        of whole entities, as in CoNLL's evaluation: type and both ends must be right.
    """
    if not isinstance(task, Classify | TagWords):
        return {}
    backend = backends.get(backend)
    rows: list[tuple[np.ndarray, np.ndarray]] = []  # targets and predictions of each text
    for batch in Rows(examples, batch_size, task.batch).held_out():
        tokens, targets = batch.arrays
        with backend.active():
            ids, masks = tree.map(backend.asarray, (tokens, batch.masks))
            logits = backend.to_numpy(_logits(task.model)(params, ids, masks))
        for wanted, got in zip(targets, np.argmax(logits, axis=-1), strict=True):
            known = np.atleast_1d(wanted) != IGNORED
            rows.append((np.atleast_1d(wanted)[known], np.atleast_1d(got)[known]))
    wanted, got = (np.concatenate(part) for part in zip(*rows, strict=True))
    names = labels(task.model)
    found = {"accuracy": float(np.mean(wanted == got))}
    if isinstance(task, TagWords) and any(name[:2] in ("B-", "I-") for name in names):
        return found | {"f1": _entity_f1(rows, names)}
    f1s = [
        _f1(int(np.sum((wanted == c) & (got == c))), int(np.sum(wanted == c) + np.sum(got == c)))
        for c in np.union1d(wanted, got)
    ]
    return found | {"f1": float(np.mean(f1s))}


@lru_cache(KEPT)
def _logits(model: Any) -> Forward:
    """A function from tokens and masks to logits."""

    def logits(params: Any, tokens: Array, masks: Any) -> Array:
        y: Array = model.forward(params, tokens, **masks)[0]
        return y

    return Forward(logits)


def _f1(both: int, either: int) -> float:
    """F1 of `both` = TP and `either` = 2 TP + FP + FN; 1 if there is nothing."""
    return 2 * both / either if either else 1.0


def _entity_f1(rows: Iterable[tuple[np.ndarray, np.ndarray]], names: Sequence[str]) -> float:
    """The F1 of the entities of all texts; 1 if there is none."""
    both = either = 0
    for pair in rows:
        wanted, got = ({*_entities([names[i] for i in tags])} for tags in pair)
        both += len(wanted & got)
        either += len(wanted) + len(got)
    return _f1(both, either)


def _entities(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (type, start, end) of each entity. One begins at B-, and at I- of another type."""
    kind, start = "", 0
    for i, tag in enumerate([*tags, "O"]):
        mark, _, of = tag.partition("-") if tag[:2] in ("B-", "I-") else ("O", "", "")
        if kind and (mark != "I" or of != kind):
            yield kind, start, i
            kind = ""
        if mark != "O" and not kind:
            kind, start = of, i
