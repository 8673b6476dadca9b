"""A trained model in a folder: one safetensors file with its parameters and its configuration.

`config.json` beside it repeats the configuration for people; `load` does not read it, so that the
two parts can never come from different runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

from xformer import backends, models, tree
from xformer.files import replacing
from xformer.initial import Shapes

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = "xformer-1"
MODELS = {"GPT": models.GPT, "Transformer": models.Transformer}


class CheckpointError(ValueError):
    """A checkpoint that is damaged, or not one of ours; the message names the file and what."""


def save(
    folder: str | os.PathLike[str], model: Any, params: Any, backend: backends.Backend
) -> None:
    """Write the configuration and the parameters; an interrupted write leaves the old file.

    TypeError for a model that `load` would not know.
    """
    if type(model) not in MODELS.values():
        raise TypeError(f"save: model must be one of {', '.join(MODELS)}, got {model!r:.60}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "format": FORMAT,
        "model": type(model).__name__,
        "config": dataclasses.asdict(model),
    }
    arrays = {
        name: np.ascontiguousarray(backend.to_numpy(array))
        for name, array in tree.flatten(params).items()
    }
    with replacing(target / WEIGHTS, target / CONFIG) as (weights, text):
        try:
            save_file(arrays, weights, metadata={"xformer": json.dumps(config)})
        except safetensors.SafetensorError as error:  # what it makes of a full disk
            raise OSError(f"{target / WEIGHTS} cannot be written: {error}") from error
        text.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(folder: str | os.PathLike[str], backend: backends.Backend) -> tuple[Any, Any]:
    """The model and its parameters on `backend`.

    Raises FileNotFoundError where there is no checkpoint, CheckpointError where it is damaged.
    """
    model, path = inspect(folder), Path(folder) / WEIGHTS
    try:
        arrays = load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    dtypes = sorted({str(a.dtype) for a in arrays.values()})
    if len(dtypes) != 1 or dtypes[0] not in backend.dtypes:
        raise CheckpointError(
            f"{path}: parameters must be of one dtype, {' or '.join(backend.dtypes)}, "
            f"got {', '.join(dtypes)}"
        )
    leaves = {name: backend.asarray(array) for name, array in arrays.items()}
    return model, tree.unflatten(model.init_from(Shapes()), leaves)


def inspect(folder: str | os.PathLike[str]) -> Any:
    """The model, without its parameters, which are not read. Raises as `load`."""
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
        raise CheckpointError(f"{path} was not made by xformer: it holds no configuration")
    try:
        config = json.loads(text)
        if config["format"] == FORMAT:
            return MODELS[config["model"]](**config["config"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its configuration is damaged: {error!r}") from error
    raise CheckpointError(f"{path}: format must be {FORMAT}, got {config['format']!r}")


def _require_parameters(model: Any, have: dict[str, tuple[int, ...]], path: Path) -> None:
    """CheckpointError unless the file has the model's parameters, by name and shape."""
    layers = [value for name, value in vars(model).items() if name.endswith("_layers")]
    if sum(layers) > len(have):
        raise CheckpointError(f"{path} does not hold the {sum(layers)} layers it is said to have")
    leaves = tree.flatten(model.init_from(Shapes()))
    wanted = {name: leaf.shape for name, leaf in leaves.items()}
    if wrong := sorted(n for n in wanted.keys() | have.keys() if wanted.get(n) != have.get(n)):
        name = wrong[0]
        raise CheckpointError(
            f"{path}: {len(wrong)} parameters are missing, unexpected or misshapen, "
            f"first {name}: wanted {wanted.get(name)}, got {have.get(name)}"
        )
