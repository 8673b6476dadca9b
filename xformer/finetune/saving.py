"""A tuned model's folder: what lay beside the model that it was made of, and what it has become."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xformer import pretrained
from xformer.files import replacing
from xformer.finetune import peft
from xformer.finetune.lora import adapters, merge
from xformer.pretrained.reading import read_bytes
from xformer.pretrained.tokenizer_config import class_of, settings

ADAPTER = "adapter"
LIMIT = 64 << 20  # bytes of a file that is copied

TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
    "chat_template.jinja",
)
SETTINGS = (  # of how text is generated, of sentence-transformers
    "generation_config.json",
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    "1_Pooling/config.json",
)


def save(
    model: Any,
    params: Any,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    base: str | os.PathLike[str] | None = None,
) -> Path | None:
    """Write the model with its adapters merged, and the adapters alone into the folder `adapter`.

    Returns that folder; None where there are no adapters, or more than they was trained.
    The tokenizer's own files are copied as they are; it is written where it has no tokenizer.json,
    or where its files mean another tokenizer beside this model.
    base: the folder that the model was loaded from, whose settings are copied too. An interrupted
    write leaves the old files.
    """
    target, source = Path(folder), None if base is None else Path(base)
    source = source if source is not None and source.is_dir() else None  # not one of llama2.c's
    pretrained.save(model, merge(params), target)
    copy_beside(tokenizer, source, target, model=model)
    if not adapters(params) or peft.others(params):
        return None
    peft.save(model, params, target / ADAPTER, base=None if source is None else str(source))
    return target / ADAPTER


def copy_beside(tokenizer: Any, base: Path | None, target: Path, *, model: Any = None) -> None:
    """Copy the files of a tokenizer, and the settings in the folder of a model, as `save`.

    model: what was saved in target, perhaps with a generation_config.json, which then stays.
    """
    if tokenizer is not None:
        where = Path(tokenizer.where)
        files = settings(where)
        # Beside another config.json the same files may mean another class.
        is_same = class_of(files, where) == class_of(files, target)
        if is_same:
            _copy(TOKENIZER, where, target)
        if not is_same or not (where / "tokenizer.json").exists():
            tokenizer.save(target)
    if base is not None:
        kept = getattr(model, "generation_config", None) is not None
        _copy(SETTINGS[1:] if kept else SETTINGS, base, target)


def _copy(names: Iterable[str], source: Path, target: Path) -> None:
    """The files of these names that a folder has."""
    for name in names:
        if os.path.lexists(source / name):
            data, place = read_bytes(source / name, LIMIT), target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as (part,):
                part.write_bytes(data)
