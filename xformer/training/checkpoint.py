"""Save and load a trained model: one safetensors file with its parameters and configuration.

`config.json` beside it repeats the configuration for people. `load` does not read it, so parameters
and configuration are always from the same run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import load_file

from xformer import backends, layers, models
from xformer.base import tree
from xformer.base.files import replacing, require_readable, write_arrays
from xformer.initializers import Shapes
from xformer.training.checkpoint_dtypes import on_host, require_storable

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT_PREFIX = "xformer-"
FORMAT = FORMAT_PREFIX + "2"
MODELS = (models.LanguageModel, models.EncoderDecoder)
CLASS = "config"  # the key of the name of a configuration's class
OF_FILES = ("hf_config", "generation_config")  # are JSON already


class CheckpointError(ValueError):
    """A checkpoint is damaged or has another format. The message names the file."""


def save(
    folder: str | os.PathLike[str], model: Any, params: Any, backend: str | backends.Backend
) -> None:
    """Write a model's configuration and parameters. An interrupted write leaves the old file.

    folder: is made if it does not exist
    model: a LanguageModel or EncoderDecoder
    params: on `backend`; frozen parameters are written too

    TypeError for another model, for a configuration of your own within it, which `load` would not
    find, and unless all parameters have one dtype that the backend computes
    in. CheckpointError for parameters that do not fit the model.
    """
    backend = backends.get(backend)
    config = {"format": FORMAT, "model": describe("save", model)}
    line = json.dumps(config)  # raises for what JSON cannot hold, before anything is written
    target, leaves = Path(folder), tree.flatten(tree.thaw(params))
    require_storable("save", leaves, backend)
    arrays = on_host(leaves, backend)
    _require_parameters(model, {name: a.shape for name, a in arrays.items()}, target / WEIGHTS)
    if wrong := _wrong_dtypes(arrays, backend):
        raise TypeError(f"save: {wrong}")
    target.mkdir(parents=True, exist_ok=True)
    with replacing(target / WEIGHTS, target / CONFIG) as (weights, text):
        write_arrays(arrays, weights, target / WEIGHTS, {"xformer": line})
        text.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(folder: str | os.PathLike[str], backend: str | backends.Backend) -> tuple[Any, Any]:
    """The model and its parameters on `backend`. The model is of a class that `save` takes.

    FileNotFoundError if there is no checkpoint, PermissionError if it may not be read,
    CheckpointError if it is damaged.
    """
    backend = backends.get(backend)
    model = inspect(folder)
    path = Path(folder) / WEIGHTS
    try:
        arrays = load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if wrong := _wrong_dtypes(arrays, backend):
        raise CheckpointError(f"{path}: {wrong}")
    like = model.init_from(Shapes())
    return model, tree.unflatten(like, {name: backend.asarray(a) for name, a in arrays.items()})


def inspect(folder: str | os.PathLike[str]) -> Any:
    """The model, without reading its parameters.

    FileNotFoundError if there is no checkpoint, PermissionError if it may not be read,
    CheckpointError if it is damaged.
    """
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no {WEIGHTS}")
    require_readable(path)
    try:
        with safetensors.safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    model = _model(metadata.get("xformer"), path)
    _require_parameters(model, shapes, path)
    return model


def _model(text: str | None, path: Path) -> Any:
    if text is None:
        raise CheckpointError(f"{path} was not written by xformer: it has no configuration")
    try:
        config = json.loads(text)
        if config["format"] == FORMAT:
            return model_of(config["model"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its configuration is damaged: {error!r}") from error
    raise CheckpointError(f"{path}: format must be {FORMAT}, got {config['format']!r}")


def describe(op: str, model: Any) -> dict[str, Any]:
    """Return a model as JSON, from which `model_of` builds it.

    TypeError for another model, and for a configuration within it that `model_of` would not find.
    """
    if not isinstance(model, MODELS):
        raise TypeError(f"{op}: model must be one of xformer.models, got {model!r:.60}")
    description: dict[str, Any] = _in_json(op, model)
    return description


def _in_json(op: str, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_in_json(op, item) for item in value]
    if not is_dataclass(value):
        return value.item() if isinstance(value, np.generic) else value
    name = type(value).__name__
    if _config_classes().get(name) is not type(value):
        raise TypeError(
            f"{op}: the model must have configurations of xformer alone, got a {name}, "
            "which load would not find; a Run without model= stores the parameters"
        )
    items = {field.name: getattr(value, field.name) for field in fields(value)}
    return {CLASS: name, **{k: v if k in OF_FILES else _in_json(op, v) for k, v in items.items()}}


def model_of(description: Any) -> Any:
    """Return the model that `describe` described.

    AttributeError, KeyError, TypeError or ValueError for a description that is damaged.
    """
    model = _from_json(description)
    if not isinstance(model, MODELS):
        raise TypeError(f"must describe a model, got {description!r:.60}")
    for name in OF_FILES:
        if not isinstance(value := getattr(model, name), Mapping | None):
            raise TypeError(f"{name} must be an object or null, got {value!r:.60}")
    return model


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    if not isinstance(value, dict):
        return value
    items = {k: v if k in OF_FILES else _from_json(v) for k, v in value.items() if k != CLASS}
    return _config_classes()[value[CLASS]](**items)


@cache
def _config_classes() -> dict[str, type]:
    """The classes of configurations by name."""
    known = (getattr(room, name) for room in (layers, models) for name in room.__all__)
    return {one.__name__: one for one in known if isinstance(one, type) and is_dataclass(one)}


def _wrong_dtypes(arrays: Mapping[str, np.ndarray], backend: backends.Backend) -> str | None:
    """The message of an error if the dtypes of parameters are wrong; None if they are right."""
    dtypes = sorted({str(a.dtype) for a in arrays.values()})
    if len(dtypes) == 1 and dtypes[0] in backend.dtypes:
        return None
    wanted = " or ".join(backend.dtypes)
    return f"parameters must be of one dtype, {wanted}, got {', '.join(dtypes)}"


def _require_parameters(model: Any, have: dict[str, tuple[int, ...]], path: Path) -> None:
    """CheckpointError unless the file has the model's parameters, by name and shape."""
    n_layers = getattr(model, "n_shared_layer_groups", None) or len(model.blocks)
    if n_layers > len(have):
        raise CheckpointError(f"{path} does not have the {n_layers} layers of its configuration")
    try:
        leaves = tree.flatten(model.init_from(Shapes()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its configuration is damaged: {error!r}") from error
    wanted = {name: leaf.shape for name, leaf in leaves.items()}
    if wrong := sorted(n for n in wanted.keys() | have.keys() if wanted.get(n) != have.get(n)):
        name = wrong[0]
        raise CheckpointError(
            f"{path}: {len(wrong)} parameters are missing, unexpected or misshapen, "
            f"first {name}: wanted {wanted.get(name)}, got {have.get(name)}"
        )
