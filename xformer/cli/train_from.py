"""The model that `xformer train --from` starts from: a training run or a pretrained folder."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xformer import pretrained
from xformer.cli.open_model import vocabulary_of
from xformer.cli.run_options import dashed
from xformer.cli.summary import inspected, title
from xformer.dispatch.checks import whole
from xformer.finetune.base_task import LONGEST
from xformer.finetune.saving import TOKENIZER, copy_beside
from xformer.generation.characters import VOCABULARY
from xformer.inspection.summary import context
from xformer.models import LanguageModel, LMHead
from xformer.pretrained.tokenizer import tokenizer
from xformer.training import Subwords, Vocabulary, checkpoint, load_vocabulary
from xformer.training.run import RUN, is_begun, read_run

if TYPE_CHECKING:
    from xformer.cli.train_options import TrainOptions  # which imports this module

LR = 5e-5  # default for a pretrained model, as in xformer finetune
# Options that the model of --from fixes.
OWN = (
    *("tokenizer", "layers", "d_model", "heads", "dropout"),
    *("positions", "position_mode", "memory", "norm_placement", "residual_scale", "init"),
    "reversible",
)


class Origin(NamedTuple):
    """A model without its parameters, and its vocabulary."""

    model: Any
    vocabulary: Vocabulary


def origin_of(path: str) -> Origin:
    """The model and the vocabulary in the folder `path`; the weights are not read.

    FileNotFoundError without a tokenizer. ValueError if the model is not a causal language model,
    or if its vocabulary size does not fit the vocabulary.
    """
    root = Path(path)
    if root.is_file():
        raise ValueError(f"--from: must be the folder of a model, got the file {path}")
    model, _ = inspected(root)
    is_causal = isinstance(model, LanguageModel) and model.causal
    if not is_causal or not isinstance(model.head, LMHead):
        command = f"xformer finetune --model {shlex.quote(path)}"
        where = command if getattr(model, "hf_config", None) else "the Python interface"
        raise ValueError(
            f"--from: must be a causal language model, got {title(model)}; train it with {where}"
        )
    is_run = model.hf_config is None
    words = vocabulary_of(root) if is_run else Subwords(tokenizer(root))
    size = model.embed.vocab_size
    if is_run and words.size != size:
        raise ValueError(
            f"--from: {path}: the vocabulary must have the model's {size} tokens, got {words.size}"
        )
    if words.eos_id is not None and words.eos_id >= size:
        raise ValueError(
            f"--from: {path}: the id of the EOS token must be below {size}, the model's "
            f"vocabulary size, got {words.eos_id}"
        )
    return Origin(model, words)


def defaults_from(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the model in a folder fixes, and defaults: context, and learning rate.

    ValueError for given options that it fixes, and for a --max-len above its context.
    """
    for name in OWN:
        if name in given:
            raise ValueError(f"--{dashed(name)} excludes --from: the model in {path} fixes it")
    model = origin_of(path).model
    block, length = model.blocks[0], context(model)
    if given.get("max_len", 0) > (model.context or math.inf):
        raise ValueError(
            f"--max-len must be at most {model.context}, the context of the model in {path}, "
            f"got {given['max_len']}"
        )
    if length is None and (Path(path) / RUN).is_file():  # "xl" limits no text: as in the run
        length = whole((read_run(path).get("notes") or {}).get("max_len"))
    return {
        "layers": len(model.blocks),
        "d_model": model.d_model,
        "heads": block.attn.n_heads,
        "positions": "xl" if block.attn.xl else model.embed.positions,
        "memory": model.memory_len,
        "position_mode": model.embed.mode,
        "norm_placement": block.norm_placement,
        "residual_scale": block.residual_scale,
        "reversible": block.reversible,
        "dropout": block.dropout,
        "max_len": min(length or LONGEST, LONGEST),
        **({} if model.hf_config is None else {"lr": LR}),
    }


def origin(options: TrainOptions) -> Origin:
    """The model and vocabulary of --from; of the run itself if it is resumed.

    ValueError if the run's description of its model is damaged.
    """
    if options.resume is None:
        return origin_of(str(options.origin))
    try:
        about = read_run(options.resume)["about"]["model"]
        source = about.get("source")
        model = checkpoint.model_of(about) if source is None else pretrained.model(source)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{Path(options.resume, RUN)}: its model is damaged: {error}") from error
    try:
        words = load_vocabulary(options.resume)
    except FileNotFoundError:  # the run stopped before the vocabulary was saved
        words = origin_of(str(options.origin)).vocabulary
    return Origin(model, words)


def about_of(model: Any) -> dict[str, Any]:
    """The description of a model that a run stores. `origin` builds the model from it."""
    if model.hf_config is None:
        return checkpoint.describe("train", model)
    return {"name": name_of(model), "source": dict(model.hf_config)}


def name_of(model: Any) -> str:
    """The name of a model's architecture."""
    return "GPT" if model.hf_config is None else str(model.hf_config["architectures"][0])


def in_folder(folder: str | os.PathLike[str], options: TrainOptions) -> argparse.Namespace:
    """The arguments of `opened` for the model in `folder`, on the run's backend."""
    where = {name: getattr(options, name) for name in ("backend", "device", "dtype")}
    return argparse.Namespace(model=str(folder), tokenizer=None, **where)


def save_vocabulary(words: Vocabulary, options: TrainOptions, folder: Path) -> None:
    """Write the vocabulary into `folder`; copy all tokenizer files of a pretrained model.

    The files of a run that has not begun are removed first.
    """
    for name in () if is_begun(folder) else (VOCABULARY, *TOKENIZER):
        (folder / name).unlink(missing_ok=True)
    if isinstance(words, Subwords) and options.origin is not None:
        if not (folder / "tokenizer.json").exists():
            copy_beside(words.tokenizer, Path(options.origin), folder)
    else:
        words.save(folder)
