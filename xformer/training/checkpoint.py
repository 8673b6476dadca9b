"""Save and load a trained model: one safetensors file with its parameters and configuration.

`config.json` beside it repeats the configuration for people. `load` does not read it, so parameters
and configuration are always from the same run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import safetensors
from safetensors.numpy import load_file

from xformer import backends, models
from xformer.base import tree
from xformer.base.files import replacing, write_arrays
from xformer.initializers import Shapes
from xformer.models.language_model import LanguageModelParams
from xformer.training.checkpoint_dtypes import on_host, require_storable

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = "xformer-1"
MODELS = {kind.__name__: kind for kind in (models.GPT, models.Transformer, models.EncoderDecoder)}


class CheckpointError(ValueError):
    """A checkpoint is damaged or has another format. The message names the file."""


def save(
    folder: str | os.PathLike[str], model: Any, params: Any, backend: str | backends.Backend
) -> None:
    """Write a model's configuration and parameters. An interrupted write leaves the old file.

    folder: is made if it does not exist
    model: a GPT, Transformer or EncoderDecoder
    params: on `backend`; frozen parameters are written too

    TypeError for another model, and unless all parameters have one dtype that the backend computes
    in. CheckpointError for parameters that do not fit the model.
    """
    backend = backends.get(backend)
    if type(model) not in MODELS.values():
        raise TypeError(f"save: model must be one of {', '.join(MODELS)}, got {model!r:.60}")
    target, leaves = Path(folder), tree.flatten(tree.thaw(params))
    require_storable("save", leaves, backend)
    arrays = on_host(leaves, backend)
    _require_parameters(model, {name: a.shape for name, a in arrays.items()}, target / WEIGHTS)
    if wrong := _wrong_dtypes(arrays, backend):
        raise TypeError(f"save: {wrong}")
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "format": FORMAT,
        "model": type(model).__name__,
        "config": asdict(model),
    }
    with replacing(target / WEIGHTS, target / CONFIG) as (weights, text):
        write_arrays(arrays, weights, target / WEIGHTS, {"xformer": json.dumps(config)})
        text.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(
    folder: str | os.PathLike[str], backend: str | backends.Backend
) -> tuple[models.GPT | Any, LanguageModelParams | Any]:
    """The model and its parameters on `backend`. The model is of a class that `save` takes.

    FileNotFoundError if there is no checkpoint, CheckpointError if it is damaged.
    """
    backend = backends.get(backend)
    model: Any = inspect(folder)
    path = Path(folder) / WEIGHTS
    try:
        arrays = load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if wrong := _wrong_dtypes(arrays, backend):
        raise CheckpointError(f"{path}: {wrong}")
    like = model.init_from(Shapes())
    return model, tree.unflatten(like, {name: backend.asarray(a) for name, a in arrays.items()})


def inspect(folder: str | os.PathLike[str]) -> models.GPT | Any:
    """The model, without reading its parameters.

    FileNotFoundError if there is no checkpoint, CheckpointError if it is damaged.
    """
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no {WEIGHTS}")
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
            return _config_of(MODELS[config["model"]], config["config"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its configuration is damaged: {error!r}") from error
    raise CheckpointError(f"{path}: format must be {FORMAT}, got {config['format']!r}")


def _config_of(kind: Any, values: Any) -> Any:
    """The configuration of class `kind` from JSON, with nested configurations and tuples."""
    hints = get_type_hints(kind)
    values = dict(values)
    return kind(**{name: _value(hints.get(name), value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    """`value` as a configuration or a tuple if its type hint says so; else unchanged."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = tuple(k for k in kinds if is_dataclass(k) or get_origin(k) is tuple)
    if not kinds or value is None or is_dataclass(value):
        return value
    kind = next((k for k in kinds if is_dataclass(k) and _has_fields(k, value)), kinds[0])
    if is_dataclass(kind):
        return _config_of(kind, value)
    if not isinstance(value, list):
        raise TypeError(f"must be a list, got {value!r:.60}")
    return tuple(_value(get_args(kind)[0], item) for item in value)


def _has_fields(kind: Any, value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= {field.name for field in fields(kind)}


def _wrong_dtypes(arrays: Mapping[str, np.ndarray], backend: backends.Backend) -> str | None:
    """The message of an error if the dtypes of parameters are wrong; None if they are right."""
    dtypes = sorted({str(a.dtype) for a in arrays.values()})
    if len(dtypes) == 1 and dtypes[0] in backend.dtypes:
        return None
    wanted = " or ".join(backend.dtypes)
    return f"parameters must be of one dtype, {wanted}, got {', '.join(dtypes)}"


def _require_parameters(model: Any, have: dict[str, tuple[int, ...]], path: Path) -> None:
    """CheckpointError unless the file has the model's parameters, by name and shape."""
    layers = [value for name, value in vars(model).items() if name.endswith("_layers")]
    if sum(layers) > len(have):
        raise CheckpointError(f"{path} does not have the {sum(layers)} layers of its configuration")
    leaves = tree.flatten(model.init_from(Shapes()))
    wanted = {name: leaf.shape for name, leaf in leaves.items()}
    if wrong := sorted(n for n in wanted.keys() | have.keys() if wanted.get(n) != have.get(n)):
        name = wrong[0]
        raise CheckpointError(
            f"{path}: {len(wrong)} parameters are missing, unexpected or misshapen, "
            f"first {name}: wanted {wanted.get(name)}, got {have.get(name)}"
        )
