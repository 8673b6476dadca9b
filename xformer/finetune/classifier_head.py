"""Replace a model's head by a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from xformer import pretrained
from xformer.base import tree
from xformer.base.choices import require_one_of
from xformer.base.tree import value
from xformer.finetune.data import LABEL, Record
from xformer.finetune.lora import generator
from xformer.initializers import normal
from xformer.models import Classifier, LanguageModel, Pooler, TokenClassifier
from xformer.pretrained.families import FAMILIES
from xformer.pretrained.loading import links_of

MAX_LABELS = 10_000


HEADS: dict[str, type] = {"classifier": Classifier, "token_classifier": TokenClassifier}


def is_classifier(model: Any, head: str = "classifier") -> bool:
    """Whether a model is a LanguageModel with a head of a kind in `HEADS`."""
    return isinstance(model, LanguageModel) and isinstance(model.head, HEADS[head])


def labels_in(records: Sequence[Record]) -> list[str]:
    """The names of the classes of records: their names, or LABEL_0 up to the highest number.

    A record has a `label`, or `tags`, a list of labels. ValueError unless all labels are names, or
    all are numbers from 0 to MAX_LABELS - 1.
    """
    listed = [r.fields["tags"] if "tags" in r.fields else [r.fields[LABEL]] for r in records]
    labels = [label for labels in listed for label in labels]
    if all(isinstance(label, str) for label in labels):
        return sorted(set(labels))
    if all(isinstance(label, int) and not isinstance(label, bool) for label in labels):
        highest = max(labels)
        if min(labels) >= 0 and highest < MAX_LABELS:
            return [f"LABEL_{i}" for i in range(highest + 1)]
    raise ValueError(f"labels must all be names, or all numbers from 0 to {MAX_LABELS - 1}")


def with_classifier(
    model: Any,
    params: Any,
    labels: Sequence[str] | None,
    *,
    head: str = "classifier",
    seed: int = 0,
    pad_id: int | None = None,
) -> tuple[Any, Any]:
    """The model and parameters of a classifier: a pretrained body with a new head.

    It equals AutoModelForSequenceClassification of transformers for the family, or
    AutoModelForTokenClassification. BERT's pooler is kept if the model and the new head have it.

    labels: the names of the classes; None: the one class of a cross-encoder (`sentences.rank`)
    head: "classifier" or "token_classifier"
    seed: of the new parameters
    pad_id: for a configuration without a pad_token_id, which transformers needs for batches

    ValueError for fewer than two classes, for equal names, for another head, and for a model whose
    family has none of this kind.
    """
    require_one_of("with_classifier: head", head, HEADS)
    if labels is None:
        labels = ("LABEL_0",)
    elif len(labels) < 2 or len(set(labels)) < len(labels):
        raise ValueError(f"with_classifier: labels must be two or more, all different: {labels}")
    source = getattr(model, "hf_config", None) or {}
    family = FAMILIES.get(source.get("model_type", ""))
    names = [name for name, kind in (family.heads if family else {}).items() if kind == head]
    if not names or not isinstance(model, LanguageModel):
        raise ValueError(
            f"with_classifier: models of type {source.get('model_type')} have no "
            f"{head.replace('_', ' ')}"
        )
    config = dict(source) | {
        "architectures": names[:1],
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "label2id": {name: i for i, name in enumerate(labels)},
    }
    for key in ("num_labels", "problem_type"):  # of the old head
        config.pop(key, None)
    if config.get("pad_token_id") is None:
        config["pad_token_id"] = pad_id
    new: Any = pretrained.model(config)
    table = value(params.embed.table)
    rng = generator(table, seed)
    leaves = new.head.init(rng, new.d_model, new.embed, draw=partial(normal, std=0.02))
    params = tree.thaw(params)
    theirs = [name for link in links_of(new) for name in link.theirs]
    # The classifier's dense layer is the model's pooler in BERT, not in RoBERTa.
    if isinstance(model.head, Pooler) and any("pooler" in name for name in theirs):
        leaves = leaves._replace(dense=params.head)
    return new, params._replace(head=leaves)
