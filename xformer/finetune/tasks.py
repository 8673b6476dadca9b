"""Tasks by name, and their examples from records.

task = finetune.task("prefix", model, tokenizer, max_len=256)
examples = finetune.examples(task, finetune.read("answers.jsonl", task.fields))
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xformer import pretrained
from xformer.base.choices import require_one_of
from xformer.finetune.base_task import LONGEST, Example, Task
from xformer.finetune.data import LABEL, SCORE, Record, first_fields
from xformer.finetune.language import Causal, Completion, Masked
from xformer.finetune.pairs import Classify, ClassifyPairs, Contrastive, Seq2Seq
from xformer.finetune.ranking import Rank
from xformer.finetune.tagging import TagWords
from xformer.inspection.summary import max_positions
from xformer.pretrained.files import CONFIG
from xformer.pretrained.foreign import require_model
from xformer.pretrained.reading import read_json

TASKS: dict[str, type[Task]] = {
    "causal": Causal,
    "prefix": Completion,
    "masked": Masked,
    "classify": Classify,
    "seq2seq": Seq2Seq,
    "contrastive": Contrastive,
    "classify-pairs": ClassifyPairs,
    "tag": TagWords,
    "rank": Rank,
}


def task(name: str, model: Any, tokenizer: Any, max_len: int | None = None, **options: Any) -> Task:
    """The task with a name in `TASKS`. ValueError for another name, and if the model does not fit.

    max_len: the most tokens of a text; None: 512, or the model's length if that is less
    options: of the task
    """
    require_one_of("task", name, TASKS)
    if max_len is None:
        trained = (getattr(model, "hf_config", None) or {}).get("max_position_embeddings")
        limits = (LONGEST, max_positions(model), trained)
        max_len = min(n for n in limits if n is not None)
    return TASKS[name](model, tokenizer, max_len, **options)


def suited(data: str | os.PathLike[str], model: str | os.PathLike[str]) -> str:
    """The name of the task that fits the fields of a file's first record and the model in a folder.

    It is the first of prefix, classify-pairs, classify, seq2seq, contrastive, tag and rank whose
    fields the record has. Otherwise it is masked for a masked language model, and causal for other
    models.

    ValueError for a classifier, which cannot learn from a record without a label.
    """
    fields = set(first_fields(data))
    fields |= {SCORE} if LABEL in fields else set()
    for name in ("prefix", "classify-pairs", "classify", "seq2seq", "contrastive", "tag", "rank"):
        if fields >= set(TASKS[name].fields):
            return name
    folder = Path(model)
    if not (folder / CONFIG).is_file():
        require_model(folder)  # its error says what the folder is instead
    kinds = read_json(folder / CONFIG).get("architectures") if folder.is_dir() else []
    if kinds is None:  # then the names of the tensors decide
        kinds = pretrained.inspect(folder)[0].hf_config.get("architectures")
    names = " ".join(map(str, kinds)) if isinstance(kinds, list) else ""
    for end, name in (("ForSequenceClassification", "classify"), ("ForTokenClassification", "tag")):
        if end in names:
            wanted, got = (" and ".join(sorted(each)) for each in (TASKS[name].fields, fields))
            raise ValueError(
                f"{data}: task {name}, for a {names}, reads {wanted}; the first record has {got}"
            )
    return "masked" if "MaskedLM" in names else "causal"


def examples(task: Task, records: Iterable[Record]) -> list[Example]:
    """The examples of all records. ValueError, which names the record, for an unusable one."""
    all_examples: list[Example] = []
    for record in records:
        try:
            all_examples += task.examples(record.fields)
        except ValueError as error:
            raise ValueError(f"{record.where}: {error}") from error
    if not all_examples:
        raise ValueError("no text is long enough to learn from")
    return all_examples
