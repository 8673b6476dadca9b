"""The embedding options of a model, from the files of sentence-transformers in its folder.

modules.json lists the modules: Transformer, Pooling, and perhaps Normalize.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from xformer.pretrained.config import MAX, Config
from xformer.pretrained.reading import PretrainedError, read_json, read_json_list

MODULES, WHOLE = "modules.json", "config_sentence_transformers.json"
LENGTHS = tuple(f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert"))
TOKENIZER, TOKENIZER_LIMIT = "tokenizer_config.json", 16 << 20
CHAINS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])

POOLINGS = {"mean": "mean", "cls": "first", "lasttoken": "last"}  # sentence-transformers -> xformer
FLAGS = {  # of versions before 6
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class Settings(NamedTuple):
    """Options of `embed`."""

    pooling: str | None = None
    normalize: bool = True
    max_len: int | None = None
    prompt: str = ""


def settings(folder: str | os.PathLike[str]) -> Settings:
    """The options of `embed` in a model's folder; without such files, the defaults of `embed`.

    max_len is read from sentence_bert_config.json, else from the tokenizer's files. PretrainedError
    for damaged files, and for modules or options that are not supported.
    """
    root = Path(folder)
    defaults = Settings(max_len=_max_len(root))
    if not os.path.lexists(root / MODULES):
        return defaults
    names, paths = _modules(root / MODULES)
    pooling, whole_prompt = _pooling(root / paths[1] / "config.json")
    if len(paths) == 3:
        _require_plain(root / paths[2] / "config.json")
    prompt = _prompt(root / WHOLE)
    if prompt and not whole_prompt:
        raise PretrainedError(f"{root}: a prompt that is left out of the mean is not supported")
    return Settings(pooling, names[-1] == "Normalize", defaults.max_len, prompt)


def _modules(path: Path) -> tuple[list[str], list[str]]:
    """The class names and the folders of the modules, in order."""
    names, paths = [], []
    for i, entry in enumerate(read_json_list(path)):
        where = f"{path}: module {i}"
        if not isinstance(entry, dict):
            raise PretrainedError(f"{where} must be an object, got {entry!r:.100}")
        c = Config(entry, where)
        c.ignore("idx", "name", "kwargs")
        kind, folder = c.text("type"), c.text("path")
        c.finish()
        if not re.fullmatch(r"\w[\w.-]*" if i else "", folder):
            raise c.refused("path", "a folder's name" if i else "empty")
        module, _, name = kind.rpartition(".")
        if module.partition(".")[0] != "sentence_transformers" or name not in CHAINS[-1]:
            raise c.refused("type", f"of sentence_transformers, {' or '.join(CHAINS[-1])}")
        names.append(name)
        paths.append(folder)
    if names not in CHAINS:
        wanted = " or ".join(", ".join(chain) for chain in CHAINS)
        raise PretrainedError(f"{path}: modules must be {wanted}, got {', '.join(names):.100}")
    return names, paths


def _pooling(path: Path) -> tuple[str, bool]:
    """The pooling of `embed`, and whether a prompt's tokens are pooled too."""
    c = Config(read_json(path), str(path))
    c.ignore("word_embedding_dimension", "embedding_dimension")
    flags = [name for key, name in FLAGS.items() if c.flag(key, default=False)]
    name = c.text("pooling_mode", default=None)
    modes = ([] if name is None else [name]) or flags or ["mean"]
    with_prompt = c.flag("include_prompt", default=True)
    c.finish()
    if len(modes) > 1 or modes[0] not in POOLINGS:
        raise PretrainedError(
            f"{path}: pooling must be one of {', '.join(POOLINGS)}, got {' and '.join(modes):.100}"
        )
    return POOLINGS[modes[0]], with_prompt


def _require_plain(path: Path) -> None:
    """PretrainedError if Normalize applies to something else than the sentence embedding."""
    if os.path.lexists(path):
        c = Config(read_json(path), str(path))
        c.only("module_input_name", "sentence_embedding")
        c.only("module_output_name", "sentence_embedding")
        c.finish()


def _prompt(path: Path) -> str:
    """The default prompt, a text before each text."""
    if not os.path.lexists(path):
        return ""
    c = Config(read_json(path), str(path))
    c.ignore("__version__", "similarity_fn_name", "requirements")
    c.only("model_type", "SentenceTransformer")
    name, prompts = c.text("default_prompt_name", default=None), c.sub("prompts")
    if prompts is not None:
        prompts.ignore(*prompts.data)
    c.finish()
    return "" if name is None else _named(prompts, name, c)


def _named(prompts: Config | None, name: str, c: Config) -> str:
    if prompts is None or name not in prompts:
        raise c.refused("default_prompt_name", "one of prompts")
    text: str = prompts.text(name)
    return text


def _max_len(root: Path) -> int | None:
    """The most tokens of a text; None if no file has it."""
    for name in LENGTHS:
        if os.path.lexists(root / name):
            c = Config(read_json(root / name), str(root / name))
            c.only("do_lower_case", False)
            c.only("transformer_task", "feature-extraction")
            c.only("module_output_name", "token_embeddings")
            c.ignore("modality_config", "unpad_inputs")
            length = c.integer("max_seq_length", low=1, default=None)
            c.finish()
            if length is not None:
                return int(length)
    if not os.path.lexists(root / TOKENIZER):
        return None
    known = read_json(root / TOKENIZER, TOKENIZER_LIMIT)
    return _usable(known.get("model_max_length", known.get("max_len")))  # of version 2


def _usable(length: Any) -> int | None:
    """`length` as an int; None for other values and for the huge numbers that mean no limit."""
    whole = isinstance(length, int) and not isinstance(length, bool)
    return int(length) if whole and 1 <= length <= MAX else None
