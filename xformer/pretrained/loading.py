"""Loading and saving of model folders in Hugging Face's format."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from xformer import backends
from xformer.base import tree
from xformer.base.choices import did_you_mean
from xformer.initializers import Shapes
from xformer.models.language_model import LanguageModel, LanguageModelParams
from xformer.pretrained import families, files
from xformer.pretrained.config import Config, unread_keys, warn_of
from xformer.pretrained.differences import difference
from xformer.pretrained.family import Family
from xformer.pretrained.foreign import require_model, require_unwrapped
from xformer.pretrained.matching import (
    head_of,
    links_for,
    matched_links,
    n_own_layers,
    shapes_of,
)
from xformer.pretrained.names import Link
from xformer.pretrained.reading import PretrainedError, read_json

# The architecture of ColBERT (github.com/stanford-futuredata/ColBERT), whose linear map of each
# token `sentences.colbert_settings` reads.
COLBERT, PROJECTION = "HF_ColBERT", "linear.weight"
# How the names of models in transformers end that may have a head which is not supported.
UNSUPPORTED = (
    *("ForPreTraining", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction"),
    *("ForTokenClassification", "ForSequenceClassification", "ForCausalLM", "LMHeadModel"),
    "DoubleHeadsModel",
)
THEIR_TENSORS = tuple(
    f"{name}.{part}"
    for name in (
        *("qa_outputs", "score", "classifier"),
        *("sequence_summary.summary", "multiple_choice_head.summary"),
    )
    for part in ("weight", "bias")
)


def model(
    config: Mapping[str, Any], *, names: Collection[str] | None = None, where: str = "config.json"
) -> LanguageModel | Any:
    """The model that a configuration in Hugging Face's format describes, without parameters.

    It is a LanguageModel, or an EncoderDecoder for T5 and nn.Transformer.

    names: of the tensors in the files. For some families only they show which parts a model has.
    where: the name of the configuration in messages.

    PretrainedError for anything that is not supported. A warning names the keys that transformers
    does not read; they are ignored.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"model: config must be a mapping, got {type(config).__name__}")
    model, unread = _described(config, names, where)
    warn_of(unread, where)
    return model


def _described(
    config: Mapping[str, Any], names: Collection[str] | None, where: str
) -> tuple[Any, list[str]]:
    """(model, keys that transformers does not read) of a configuration."""
    family = _family(config, where)
    c = Config(config, where, names)
    c.rename(family.aliases)
    c.common(**{key: config.get(key) for key in family.free})
    try:
        model = family.build(c, head_of(family, config, where))
    except (ValueError, TypeError, ArithmeticError) as error:
        if isinstance(error, PretrainedError):
            raise
        raise PretrainedError(f"{where}: {error}") from error
    unread = unread_keys(c) if family.heads else []
    c.finish()  # a family without architectures is not of transformers, and reads all its keys
    return replace(model, hf_config=copy.deepcopy(dict(config))), unread


def load(
    folder: str | os.PathLike[str],
    backend: str | backends.Backend = "numpy",
    dtype: str = "float32",
    device: str | None = None,
    *,
    progress: Callable[[str, int, int], Any] | None = None,
) -> tuple[LanguageModel | Any, LanguageModelParams | Any]:
    """(model, params) from a folder with config.json and safetensors files.

    model, params = load("gpt2")
    logits, cache = model.forward(params, tokens)

    model: a LanguageModel, or an EncoderDecoder for T5 and nn.Transformer
    folder: or a file, which is read as a llama2.c checkpoint (`.bin`, version 0).
    progress: called at the start and after each tensor, with the name of the work, the bytes of
        parameters that are loaded, and their total.

    On NumPy, float32 parameters of a float32 file are read-only views of the memory-mapped file.
    They take no memory of the process itself. Another thread starts to read the file.

    FileNotFoundError if there is no model. PretrainedError if it is damaged or not supported: keys
    of the configuration, and tensors that are missing, unexpected or misshapen. ValueError for a
    dtype that the backend does not compute in.
    """
    name = backend if isinstance(backend, str) else backend.name
    on_numpy = name in backends.WITH_NUMPY
    model, tensors, matched = _inspected(Path(folder), fetch=dtype if on_numpy else None)
    target = backends.get(backend, device)
    if dtype not in target.dtypes:
        wanted = " or ".join(target.dtypes)
        raise ValueError(f"load: dtype must be {wanted} on backend {target.name}, got {dtype!r}")
    return model, _read(model, matched, tensors, target, dtype, progress)


def inspect(folder: str | os.PathLike[str]) -> tuple[Any, files.Tensors]:
    """(model, tensors) of a folder, without reading the tensors. Raises as `load` does."""
    model, tensors, _ = _inspected(Path(folder))
    return model, tensors


def _inspected(root: Path, *, fetch: str | None = None) -> tuple[Any, files.Tensors, list[Any]]:
    """(model, tensors, matched links) of a folder.

    fetch: the dtype in which the tensors are read soon; None: they are not read.
    """
    where, config, tensors = _opened(root)
    if fetch is not None:
        tensors.fetch(fetch)  # while models and a backend are imported
    family = _family(config, where)
    if config.get("architectures") == [COLBERT]:  # its encoder
        config = {**config, "architectures": [family.named("hidden")]}
        tensors = tensors.without(PROJECTION)
    if config.get("architectures") or not family.heads:
        try:
            model, unread, matched = _named(family, config, tensors, where, str(root))
        except PretrainedError:
            other = _of_files(family, config, tensors, where)
            if other is config:
                raise
            model, unread, matched = _named(family, other, tensors, where, str(root))
    else:
        model, unread, matched = _recognised(config, tensors, where, str(root))
    warn_of(unread, where)
    if getattr(model, "causal", True) and os.path.lexists(root / files.GENERATION):
        model = replace(model, generation_config=read_json(root / files.GENERATION))
    return model, tensors, matched


def _named(
    family: Family, config: dict[str, Any], tensors: Any, where: str, root: str
) -> tuple[Any, list[str], list[Any]]:
    """(model, keys that transformers does not read, matched links) of the architecture in config.

    A warning names tensors of other heads of the family, which are left out.
    """
    model, unread = _described(config, frozenset(tensors), where)
    others = partial(_of_other_heads, family, config, tensors, where)
    return model, unread, matched_links(family, model, tensors, root, others)


def _of_files(family: Family, config: dict[str, Any], tensors: Any, where: str) -> dict[str, Any]:
    """The configuration with an architecture that has what the files have, or `config` itself.

    It is another one in three cases, with a warning. If the files have no tensor of the head, it is
    the bare model: sentence-transformers writes such folders, and some embedding models were
    published so. If they have none of the decoder, it is the encoder. And a model of transformers
    with a head that is not supported is a masked LM if the files have that head, or else the bare
    model.
    """
    bare, encoder = family.named("hidden"), family.named("encoder")
    names = config.get("architectures")
    if bare is None or not isinstance(names, list) or len(names) != 1:
        return config  # `head_of` refuses it
    name = names[0]
    others = {f"{bare.removesuffix('Model')}{end}" for end in UNSUPPORTED} - family.heads.keys()
    if name not in (*family.heads, *others):
        return config
    if name in others:
        name = family.named("masked-lm") or bare
    if encoder is not None and not any(n.startswith("decoder.") for n in tensors):
        name = bare = encoder
    if name != bare:
        wanted = any if name == names[0] else all
        own = _of_head(family, {**config, "architectures": [name]}, frozenset(tensors), where)
        if own and not wanted(n in tensors for n in own):
            name = bare
    if name == names[0]:
        return config
    what = f"the files have no tensors of the head of {names[0]}"
    if family.heads.get(name) == "encoder":
        what = "the files have no tensors of a decoder"
    elif names[0] in others:
        what = f"the head of {names[0]} is not supported"
    warnings.warn(f"{where}: {what}; the model is {name}", stacklevel=4)
    return {**config, "architectures": [name]}


def _of_head(
    family: Family, config: Mapping[str, Any], names: Collection[str], where: str
) -> set[str]:
    """The names of the head's tensors, without those of a pooler: the bare model has them too."""
    model, _ = _described(config, names, where)
    if n_own_layers(model) > len(names):
        return set()  # `matched_links` refuses it; a million layers would take long
    like = shapes_of(model)
    links = links_for(family, model, like, False, names.__contains__)
    of_head = (link.theirs for link in links if link.ours[0].startswith("head."))
    theirs = {name for names_of_link in of_head for name in names_of_link}
    return {n for n in theirs if not (family.prefix and n.startswith(family.prefix))}


def _of_other_heads(
    family: Family, config: Mapping[str, Any], tensors: Any, where: str
) -> set[str]:
    """The names of all tensors of the family's other architectures, of the same configuration."""
    own = head_of(family, config, where)
    kept = ("score.", "classifier.") if "classifier" in own else ()
    names = {name for name in THEIR_TENSORS if not name.startswith(kept)}
    for name, head in family.heads.items():
        if head == own:
            continue
        with suppress(PretrainedError):  # a head that the configuration excludes
            other, _ = _described({**config, "architectures": [name]}, frozenset(tensors), where)
            names.update(_shapes_in_files(family, other))
    if own not in ("lm", "masked-lm"):
        names.update(n for n in family.tied if family.prefix and not n.startswith(family.prefix))
    return names


def _recognised(
    config: Mapping[str, Any], tensors: Any, where: str, root: str
) -> tuple[Any, list[str], list[Any]]:
    """(model, keys that transformers does not read, matched links) if no architecture is named.

    The model has the first architecture of the family that fits the tensors. Architectures with a
    head are tried before bare models. PretrainedError if another head has the same tensors.
    """
    family, errors = _family(config, where), []
    for name in family.heads:
        try:
            named = dict(config) | {"architectures": [name]}
            model, unread = _described(named, tuple(tensors), where)
            matched = matched_links(family, model, tensors, root)
        except PretrainedError as error:
            errors.append(error)
            continue
        if (other := _with_same_tensors(family, model, named, where)) is not None:
            raise PretrainedError(
                f"{where}: architectures is missing, and {name} and {other} have these tensors: "
                "name one"
            )
        return model, unread, matched
    raise PretrainedError(
        f"{where}: architectures is missing, and none of {', '.join(family.heads)} has these "
        f"tensors; the first does not, since: {errors[0]}"
    )


def _with_same_tensors(
    family: Family, model: Any, config: Mapping[str, Any], where: str
) -> str | None:
    """The architecture of another head whose tensors have the same names and shapes; or None."""
    own, wanted = head_of(family, config, where), _shapes_in_files(family, model)
    for name, head in family.heads.items():
        if head in (own, "hidden"):
            continue
        with suppress(PretrainedError):  # a head that the configuration excludes
            other, _ = _described({**config, "architectures": [name]}, None, where)
            if _shapes_in_files(family, other) == wanted:
                return name
    return None


def _shapes_in_files(family: Family, model: Any) -> dict[str, Any]:
    """Name -> shape of each tensor in the files of a model."""
    like = shapes_of(model)
    links = (link for link in family.links(model) if link.ours[0] in like)
    return {name: shape for link in links for name, shape in link.shapes(like).items()}


def _opened(root: Path) -> tuple[str, dict[str, Any], files.Tensors]:
    """(path of the configuration, configuration, tensors) of a folder or file."""
    require_model(root)
    if root.is_dir():
        where = root / files.CONFIG
        config, tensors = read_json(where), files.open_tensors(root)
        require_unwrapped(root, tensors)
        return str(where), config, tensors
    return str(root), *families.llama2c.open_file(root)


def save(model: Any, params: Any, folder: str | os.PathLike[str]) -> None:
    """Write model.safetensors and config.json, for transformers to load.

    If the model was loaded with a generation_config.json, it is written too. `Tokenizer.save`
    writes the files of the tokenizer.

    model: from `load` or `model`. A llama2.c model is written to one file called `folder`.
    params: on any backend.
    folder: may be the one that the model was loaded from. An interrupted write leaves the old
        files.

    ValueError for another model, for params of another model, and if the model has an option that
    its configuration does not describe. Rates of dropout, and options that change only training or
    memory, may differ.
    """
    arrays = tensors_of(model, params)
    _require_described(model, arrays)
    if model.hf_config["model_type"] == families.llama2c.MODEL_TYPE:
        families.llama2c.write_file(folder, model.hf_config, arrays)
        return
    dtypes = sorted({str(a.dtype) for a in arrays.values()})
    config = {key: value for key, value in model.hf_config.items() if key != "torch_dtype"}
    generation = model.generation_config
    more = {} if generation is None else {files.GENERATION: generation}
    files.write(folder, arrays, config | {"dtype": dtypes[0]}, more=more)


def _require_described(model: Any, names: Collection[str]) -> None:
    """ValueError unless model.hf_config describes the model with tensors of these names."""
    described, _ = _described(model.hf_config, names, "save")
    if unlike := difference(model, described):
        path, got, wanted = unlike
        raise ValueError(
            f"save: the model must be the one of its hf_config: {path} must be {wanted!r:.60}, got "
            f"{got!r:.60}; xformer.training.checkpoint.save stores any model"
        )


def tensors_of(model: Any, params: Any) -> dict[str, np.ndarray]:
    """Parameters, or gradients, on the host, with the names and layouts of the model's family.

    Frozen parameters are included. Arrays are views if possible. Raises as `save` does.
    """
    links = links_of(model)
    like, leaves = shapes_of(model), tree.flatten(tree.thaw(params))
    got = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    if wrong := sorted(n for n in like.keys() | got.keys() if like.get(n) != got.get(n)):
        name = wrong[0]
        raise ValueError(
            f"save: params must be the model's, but {len(wrong)} differ, first {name}: wanted "
            f"{like.get(name)}, got {got.get(name)}"
        )
    arrays: dict[str, np.ndarray] = {}
    for link in links:
        arrays |= link.write([host_of(leaves[name]) for name in link.ours])
    return arrays


def links_of(model: Any, *, in_memory: bool = False) -> list[Link]:
    """The links between the tensors of the model's family and its parameters.

    in_memory: use the names that transformers has in memory, instead of those in files.

    Raises as `save` does.
    """
    if getattr(model, "hf_config", None) is None:
        raise ValueError(
            "save: the model must have a configuration of its family (model.hf_config); "
            "make it with xformer.pretrained.model(config)"
        )
    family = _family(model.hf_config, "save")
    bare = head_of(family, model.hf_config, "save") == "hidden"
    return list(links_for(family, model, shapes_of(model), bare, lambda name: in_memory))


def host_of(leaf: Any) -> np.ndarray:
    """A parameter as a NumPy array."""
    return leaf if isinstance(leaf, np.ndarray) else backends.backend_of(leaf).to_numpy(leaf)


def _family(config: Mapping[str, Any], where: str) -> Family:
    kind = config.get("model_type")
    if kind is None and str(config.get("format")).startswith("xformer-"):
        code = (
            "from xformer import backends; from xformer.training import checkpoint; model, params"
        )
        code += f" = checkpoint.load({os.path.dirname(where)!r}, backends.get('numpy'))"
        raise PretrainedError(f"{where}: is of a run of xformer train; in Python, `{code}`")
    if not isinstance(kind, str) or kind not in families.FAMILIES:
        names = sorted(families.FAMILIES)
        raise PretrainedError(
            f"{where}: model_type must be one of {', '.join(names)}, got {kind!r:.100}"
            f"{did_you_mean(kind, names)}"
        )
    return families.FAMILIES[kind]


def _read(
    model: Any,
    matched: list[tuple[Link, list[str]]],
    tensors: files.Tensors,
    backend: backends.Backend,
    dtype: str,
    progress: Callable[[str, int, int], Any] | None,
) -> Any:
    """The parameters on a backend. The largest tensor is read first, see `files.Tensors`."""
    largest = {name: -i for i, name in enumerate(tensors)}
    matched = sorted(matched, key=lambda pair: -max(largest[name] for name in pair[1]))
    leaves: dict[str, Any] = {}
    done, width = 0, np.dtype(dtype).itemsize
    total = width * sum(math.prod(shape) for shape in shapes_of(model).values())
    report = progress or (lambda *_: None)
    report("loading", done, total)
    for link, names in matched:
        arrays = link.read([tensors[name].read(dtype) for name in names])
        for name, array in arrays.items():
            leaves[name] = backend.asarray(array, dtype)
            done += width * array.size
        report("loading", done, total)
        if backend.name not in backends.WITH_NUMPY:  # its arrays may be views
            del arrays
            for name in names:
                tensors[name].release()
    return tree.unflatten(model.init_from(Shapes()), leaves)
