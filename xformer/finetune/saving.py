"""Save a fine-tuned model, with the tokenizer and the settings of its base model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xformer import pretrained
from xformer.base.files import replacing
from xformer.finetune import peft
from xformer.finetune.lora import adapters, merge
from xformer.models import Classifier
from xformer.pretrained.files import GENERATION
from xformer.pretrained.reading import PretrainedError, opened
from xformer.pretrained.tokenizer_config import class_of, settings
from xformer.sentences.settings import rank_settings, settings_files

ADAPTER = "adapter"
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
    "chat_template.jinja",
)


def save(
    model: Any,
    params: Any,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    base: str | os.PathLike[str] | None = None,
) -> Path | None:
    """Write the model with merged adapters, and the adapters alone to `folder`/adapter.

    Return the folder of the adapters; None if there are none, or if other parameters were trained
    too. An interrupted write leaves the old files.

    tokenizer: its files are copied unchanged; it is written anew if it has no tokenizer.json, or if
        its files would mean another tokenizer beside this model
    base: the folder of the original model, whose settings are copied too
    """
    target, source = Path(folder), None if base is None else Path(base)
    source = source if source is not None and source.is_dir() else None  # llama2.c's is a file
    pretrained.save(model, merge(params), target)
    copy_beside(tokenizer, source, target, model=model)
    if not adapters(params) or peft.others(params):
        return None
    peft.save(model, params, target / ADAPTER, base=None if source is None else str(source))
    return target / ADAPTER


def copy_beside(tokenizer: Any, base: Path | None, target: Path, *, model: Any = None) -> None:
    """Copy the files of a tokenizer and the settings in `base` to `target`, for `save`.

    model: the model in target; if it has a generation_config.json, that file is not overwritten
    """
    if tokenizer is not None:
        where = Path(tokenizer.where)
        files = settings(where)
        # Beside another config.json, the same files may mean another tokenizer class.
        is_same = class_of(files, where) == class_of(files, target)
        if is_same:
            _copy(TOKENIZER, where, target)
        if not is_same or not (where / "tokenizer.json").exists():
            tokenizer.save(target)
    if base is not None:
        has_generation = getattr(model, "generation_config", None) is not None
        _copy([] if has_generation else [GENERATION], base, target)
        if _describes(base, model):
            _copy(settings_files(base), base, target)


def _describes(base: Path, model: Any) -> bool:
    """Whether the settings in a folder are of a model. Those of embeddings are no classifier's."""
    if not isinstance(getattr(model, "head", None), Classifier):
        return True
    try:
        rank_settings(base)
    except PretrainedError:
        return False
    return True


def _copy(names: Iterable[str], source: Path, target: Path) -> None:
    """Copy the named files, if `source` has them."""
    for name in names:
        if os.path.lexists(source / name):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as (part,), opened(source / name) as file, part.open("xb") as copy:
                shutil.copyfileobj(file, copy)
