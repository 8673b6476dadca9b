"""Save a fine-tuned model, with the tokenizer and the settings of its base model."""

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
from xformer.sentences.settings import LENGTHS

ADAPTER = "adapter"
LIMIT = 64 << 20  # most bytes of a copied file

TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
    "chat_template.jinja",
)
SETTINGS = (  # of generation and of sentence-transformers
    "generation_config.json",
    *("modules.json", "config_sentence_transformers.json", *LENGTHS),
    *("1_Pooling/config.json", "1_SpladePooling/config.json"),
    *(f"{i}_Dense/{name}" for i in (1, 2, 3) for name in ("config.json", "model.safetensors")),
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


def clear(folder: Path) -> None:
    """Remove files that a killed process left half-written in the subfolders of `save`."""
    for name in {path.rpartition("/")[0] for path in SETTINGS} | {ADAPTER}:
        for part in (folder / name).glob(".*.part"):
            part.unlink()


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
        _copy(SETTINGS[1:] if has_generation else SETTINGS, base, target)


def _copy(names: Iterable[str], source: Path, target: Path) -> None:
    """Copy the named files, if `source` has them."""
    for name in names:
        if os.path.lexists(source / name):
            data, path = read_bytes(source / name, LIMIT), target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as (part,):
                part.write_bytes(data)
