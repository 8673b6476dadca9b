"""The options of `embed` and `rank`, from the files of sentence-transformers in a model's folder.

modules.json lists the modules: Transformer, Pooling, perhaps some Dense, perhaps Normalize.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xformer.base.choices import require_one_of
from xformer.pretrained.config import MAX, Config
from xformer.pretrained.files import WEIGHTS
from xformer.pretrained.foreign import elsewhere
from xformer.pretrained.reading import PretrainedError, read_json, read_json_list
from xformer.sentences.dense import Dense, read_dense

LIBRARIES = ("sentence_transformers", "pylate")
MODULES, WHOLE = "modules.json", "config_sentence_transformers.json"
LENGTHS = tuple(  # the first of them that is there is read
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
METADATA = "artifact.metadata"  # of ColBERT itself
TOKENIZER, TOKENIZER_LIMIT = "tokenizer_config.json", 16 << 20
CHAIN = "Transformer Pooling( Dense)*( Normalize)?"
WANTED = "Transformer, Pooling, perhaps some Dense, perhaps Normalize"
MODULE_FOLDER = r"\w[\w.-]*"

POOLINGS = {  # sentence-transformers -> xformer
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
SIMILARITIES = {  # model_type -> the similarities that it may have, the default first
    "SentenceTransformer": ("cosine", "dot", "euclidean", "manhattan"),
    "SparseEncoder": ("dot",),
}
OUTPUTS = {  # task of the Transformer -> what it passes on, and the output of the model that it is
    "feature-extraction": ("token_embeddings", "last_hidden_state"),
    "fill-mask": ("token_embeddings", "logits"),
    "sequence-classification": ("scores", "logits"),
}
# Arguments of transformers and of the tokenizer, in old and new names.
ARGUMENTS = (
    *("model_args", "tokenizer_args", "config_args"),
    *("model_kwargs", "processor_kwargs", "config_kwargs", "processing_kwargs"),
)
FLAGS = {  # of versions before 6
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = ("sigmoid", "identity")
CLASSES = {  # of torch
    **dict.fromkeys(("torch.nn.Sigmoid", "torch.nn.modules.activation.Sigmoid"), "sigmoid"),
    **dict.fromkeys(("torch.nn.Identity", "torch.nn.modules.linear.Identity"), "identity"),
}
KEY, OLD_KEY = "sentence_transformers", "sbert_ce_default_activation_function"  # of config.json


class Settings(NamedTuple):
    """Options of `embed`."""

    pooling: str | tuple[str, ...] | None = None
    normalize: bool = True
    max_len: int | None = None
    prompt: str = ""
    include_prompt: bool = True
    modules: tuple[Dense, ...] = ()


def settings(folder: str | os.PathLike[str], *, prompt_name: str | None = None) -> Settings:
    """The options of `embed` in a model's folder; without such files, the defaults of `embed`.

    prompt_name: of a prompt in `prompts(folder)`, such as "query"; None: the model's default

    max_len is read from sentence_bert_config.json, else from the tokenizer's files. ValueError for
    an unknown prompt_name. PretrainedError for damaged files, and for modules or options that are
    not supported.
    """
    root = Path(folder)
    own = Settings(max_len=read_max_len(root), prompt=read_prompt(root, prompt_name))
    if not os.path.lexists(root / MODULES):
        return own
    names, paths = read_modules(root / MODULES, CHAIN, WANTED)
    pooling, include_prompt = _pooling(root / paths[1] / "config.json")
    if is_normal := names[-1] == "Normalize":
        _require_plain(root / paths[-1] / "config.json")
    return own._replace(
        pooling=pooling,
        normalize=is_normal,
        include_prompt=include_prompt,
        modules=tuple(
            read_dense(root / path)
            for name, path in zip(names, paths, strict=True)
            if name == "Dense"
        ),
    )


def prompts(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The named prompts in a model's folder: name -> a text before each text.

    PretrainedError for a damaged file.
    """
    return _whole(Path(folder) / WHOLE).prompts


def similarity_name(folder: str | os.PathLike[str]) -> str:
    """The name of the function of `similarity` that a model's vectors are compared with.

    It is similarity_fn_name of config_sentence_transformers.json, else "cosine".

    PretrainedError for a damaged file, and for another function than "cosine", "dot", "euclidean"
    and "manhattan".
    """
    return _whole(Path(folder) / WHOLE).similarity


def settings_files(folder: str | os.PathLike[str]) -> list[str]:
    """The paths of the files in a model's folder that settings are read from, with "/".

    They are the files of sentence-transformers, with its modules' folders, and of ColBERT.
    PretrainedError for a damaged modules.json.
    """
    root = Path(folder)
    names = [MODULES, WHOLE, *LENGTHS, METADATA]
    entries = read_json_list(root / MODULES) if os.path.lexists(root / MODULES) else []
    for entry in entries:
        path = entry.get("path") if isinstance(entry, dict) else None
        if isinstance(path, str) and re.fullmatch(MODULE_FOLDER, path):
            names += [f"{path}/config.json", f"{path}/{WEIGHTS}"]
    return [name for name in names if os.path.lexists(root / name)]


def read_modules(path: Path, chain: str, wanted: str) -> tuple[list[str], list[str]]:
    """The class names and the folders of the modules, in order.

    chain: an expression for the names with spaces between them   wanted: the same, for messages
    """
    kinds = list(dict.fromkeys(re.findall(r"\w+", chain)))
    names, paths = [], []
    for i, entry in enumerate(read_json_list(path)):
        where = f"{path}: module {i}"
        if not isinstance(entry, dict):
            raise PretrainedError(f"{where} must be an object, got {entry!r:.100}")
        c = Config(entry, where)
        c.ignore("idx", "name", "kwargs")
        kind, folder = c.text("type"), c.text("path")
        c.finish()
        if not re.fullmatch(MODULE_FOLDER if i else "", folder):
            raise c.refused("path", "a folder's name" if i else "empty")
        module, _, name = kind.rpartition(".")
        if module.partition(".")[0] not in LIBRARIES or name not in kinds:
            raise c.refused("type", f"of sentence_transformers, {' or '.join(kinds)}")
        names.append(name)
        paths.append(folder)
    if not re.fullmatch(chain, " ".join(names)):
        raise PretrainedError(f"{path}: modules must be {wanted}, got {', '.join(names):.100}")
    return names, paths


def _pooling(path: Path) -> tuple[str | tuple[str, ...], bool]:
    """The pooling of `embed`, and whether a prompt's tokens are pooled too."""
    c = Config(read_json(path), str(path))
    c.ignore("word_embedding_dimension", "embedding_dimension")
    flags = [name for key, name in FLAGS.items() if c.flag(key, default=False)]
    if isinstance(c.data.get("pooling_mode"), list):
        modes = list(c.texts("pooling_mode", choices=tuple(POOLINGS)))
    else:
        name = c.text("pooling_mode", choices=tuple(POOLINGS), default=None)
        modes = ([] if name is None else [name]) or flags or ["mean"]
    include_prompt = c.flag("include_prompt", default=True)
    c.finish()
    if not modes:
        raise c.refused("pooling_mode", "one name or more")
    names = tuple(POOLINGS[mode] for mode in modes)
    return (names if len(names) > 1 else names[0]), include_prompt


def _require_plain(path: Path) -> None:
    """PretrainedError if Normalize applies to something else than the sentence embedding."""
    if os.path.lexists(path):
        c = Config(read_json(path), str(path))
        c.only("module_input_name", "sentence_embedding")
        c.only("module_output_name", "sentence_embedding")
        c.finish()


class Whole(NamedTuple):
    """config_sentence_transformers.json."""

    prompts: dict[str, str]
    default: str | None  # the name of the default prompt; None: no prompt
    similarity: str


def read_prompt(root: Path, name: str | None, kind: str = "SentenceTransformer") -> str:
    """The prompt called `name` in a model's folder; None: the default one. kind: the model_type."""
    known, default, _ = _whole(root / WHOLE, kind)
    if name is not None:
        if not known:
            raise ValueError(f"settings: {root} has no prompts, got prompt_name {name!r}")
        require_one_of("settings: prompt_name", name, known)
    name = default if name is None else name
    return "" if name is None else known[name]


def _whole(path: Path, kind: str = "SentenceTransformer") -> Whole:
    names = SIMILARITIES[kind]
    if not os.path.lexists(path):
        return Whole({}, None, names[0])
    c = Config(read_json(path), str(path))
    c.ignore("__version__", "requirements")
    c.only("model_type", kind)
    found = Whole(*prompts_of(c), c.text("similarity_fn_name", choices=names, default=names[0]))
    c.finish()
    return found


def prompts_of(c: Config) -> tuple[dict[str, str], str | None]:
    """The named prompts, and the name of the default one; None: no prompt."""
    default, named = c.text("default_prompt_name", default=None), c.sub("prompts")
    known = {} if named is None else {name: named.text(name, default="") for name in named.data}
    if default is not None and default not in known:
        raise c.refused("default_prompt_name", "one of prompts")
    return known, default


def read_max_len(root: Path, task: str = "feature-extraction") -> int | None:
    """The most tokens of a text; None if no file has it. task: what transformer_task must be.

    FileNotFoundError if there is no folder.
    """
    if not root.exists():
        raise FileNotFoundError(f"there is no folder or file {root}{elsewhere(root)}")
    for name in LENGTHS:
        data = read_json(root / name) if os.path.lexists(root / name) else {}
        if data:
            c = Config(data, str(root / name))
            c.only("do_lower_case", False)
            c.only("transformer_task", task)
            c.only("module_output_name", OUTPUTS[task][0])
            _require_text(c, OUTPUTS[task][1])
            for key in ARGUMENTS:
                c.only(key, {})
            c.ignore("unpad_inputs")
            length = c.integer("max_seq_length", low=1, default=None)
            c.finish()
            if length is not None:
                return int(length)
            break
    if not os.path.lexists(root / TOKENIZER):
        return None
    known = read_json(root / TOKENIZER, TOKENIZER_LIMIT)
    return _usable(known.get("model_max_length", known.get("max_len")))  # of version 2


def _require_text(c: Config, output: str) -> None:
    """PretrainedError unless texts are given to the model as they are. output: of the model."""
    kinds = c.sub("modality_config")
    if kinds is None:
        return
    if "message" in kinds:  # sentence-transformers puts all texts into a chat template then
        raise kinds.refused("message", "absent: texts in a chat template are not supported")
    text = kinds.sub("text")
    if text is None:
        raise c.refused("modality_config", "an object with text")
    text.only("method", "forward")
    text.only("method_output_name", output, [output])
    kinds.ignore(*kinds.data)


def _usable(length: Any) -> int | None:
    """`length` as an int; None for other values and for the huge numbers that mean no limit."""
    whole = isinstance(length, int) and not isinstance(length, bool)
    return int(length) if whole and 1 <= length <= MAX else None


class RankSettings(NamedTuple):
    """Options of `rank`."""

    activation: str | None = None
    max_len: int | None = None
    prompt: str = ""


def rank_settings(folder: str | os.PathLike[str]) -> RankSettings:
    """The options of `rank` in a model's folder; without such files, the defaults of `rank`.

    PretrainedError for damaged files, for a model that is no cross-encoder, and for modules or
    options that are not supported.
    """
    root = Path(folder)
    activation, prompt = (
        _of_cross_encoder(root / WHOLE) if os.path.lexists(root / WHOLE) else (None, "")
    )
    if os.path.lexists(root / MODULES):
        read_modules(root / MODULES, "Transformer", "Transformer")
    max_len = read_max_len(root, "sequence-classification")
    return RankSettings(activation, max_len, prompt)


def activation_of(config: Mapping[str, Any]) -> str | None:
    """The activation that a config.json names; None if it names none.

    PretrainedError for another activation than `ACTIVATIONS`.
    """
    c = Config(dict(config), "config.json")
    part = c.sub(KEY)
    if part is not None and "activation_fn" in part.data:
        return _activation(part, "activation_fn")
    return _activation(c, OLD_KEY)


def _activation(c: Config, key: str) -> str | None:
    name = c.text(key, choices=tuple(CLASSES), default=None)
    return None if name is None else CLASSES[name]


def _of_cross_encoder(path: Path) -> tuple[str | None, str]:
    """The activation and the default prompt."""
    c = Config(read_json(path), str(path))
    c.ignore("__version__", "keep_in_fp32_modules", "requirements")
    c.only("model_type", "CrossEncoder")
    activation = _activation(c, "activation_fn")
    known, name = prompts_of(c)
    c.finish()
    return activation, "" if name is None else known[name]
