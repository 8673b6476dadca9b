"""A classifier in the place of a model's head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from array_api_compat import array_namespace

from xformer import backends, pretrained, tree
from xformer.finetune.data import LABEL, Record
from xformer.initializers import normal
from xformer.models import Classifier, LanguageModel, Pooler
from xformer.pretrained.families import FAMILIES
from xformer.pretrained.loading import links_of
from xformer.tree import value

MAX_LABELS = 10_000


def is_classifier(model: Any) -> bool:
    """Whether a model gives a class for each text."""
    return isinstance(model, LanguageModel) and isinstance(model.head, Classifier)


def labels_in(records: Sequence[Record]) -> list[str]:
    """The classes of records: the names that are there, or as many as their numbers go."""
    found = [record.fields[LABEL] for record in records]
    if all(isinstance(label, str) for label in found):
        return sorted(set(found))
    if all(isinstance(label, int) and not isinstance(label, bool) for label in found):
        highest = max(found)
        if min(found) >= 0 and highest < MAX_LABELS:
            return [f"LABEL_{i}" for i in range(highest + 1)]
    raise ValueError(f"labels must all be names, or all numbers from 0 to {MAX_LABELS - 1}")


def with_classifier(
    model: Any, params: Any, labels: Sequence[str], *, seed: int = 0, pad_id: int | None = None
) -> tuple[Any, Any]:
    """A classifier of these classes on the body of a pretrained model, its head new.

    As transformers' AutoModelForSequenceClassification of that family: BERT's pooler, where the
    model has it, is kept. pad_id: for the configuration, where it has none: transformers needs it
    for batches. ValueError for fewer than two classes, a class named twice, and a model whose
    family has no classifier.
    """
    if len(labels) < 2 or len(set(labels)) < len(labels):
        raise ValueError(f"with_classifier: labels must be two or more, all different: {labels}")
    source = getattr(model, "hf_config", None) or {}
    family = FAMILIES.get(source.get("model_type", ""))
    names = [
        name for name, head in (family.heads if family else {}).items() if head == "classifier"
    ]
    if not names or not isinstance(model, LanguageModel):
        raise ValueError(
            f"with_classifier: models of type {source.get('model_type')} have no classifier"
        )
    config = dict(source) | {
        "architectures": names[:1],
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "label2id": {name: i for i, name in enumerate(labels)},
    }
    for key in ("num_labels", "problem_type"):  # of a head that it had before
        config.pop(key, None)
    if config.get("pad_token_id") is None:
        config["pad_token_id"] = pad_id
    new = pretrained.model(config)
    table = value(params.embed.table)
    dtype = "float64" if table.dtype == array_namespace(table).float64 else "float32"
    rng = backends.backend_of(table).generator(seed, dtype)
    head = new.head.init(rng, new.d_model, new.embed, draw=partial(normal, std=0.02))
    params = tree.thaw(params)
    if _has_pooler(model, new):
        head = head._replace(dense=params.head)
    return new, params._replace(head=head)


def _has_pooler(model: Any, new: Any) -> bool:
    """Whether the classifier begins with the pooler that the model has: BERT's, not RoBERTa's."""
    names = [name for link in links_of(new) for name in link.theirs]
    return isinstance(model.head, Pooler) and any("pooler" in name for name in names)
