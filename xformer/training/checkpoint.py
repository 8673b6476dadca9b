"""A trained model in a folder: its configuration and its parameters."""

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

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = "xformer-1"
MODELS = {"GPT": models.GPT}


class CheckpointError(ValueError):
    """A checkpoint that is damaged, or not one of ours; the message names the file and what."""


def save(
    folder: str | os.PathLike[str], model: Any, params: Any, backend: backends.Backend
) -> None:
    """Write the configuration and the parameters; an interrupted write leaves the old file."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "format": FORMAT,
        "model": type(model).__name__,
        "vocabulary": "bytes",
        "config": dataclasses.asdict(model),
    }
    arrays = {
        name: np.ascontiguousarray(backend.to_numpy(array))
        for name, array in tree.flatten(params).items()
    }
    part = target / (WEIGHTS + ".part")
    save_file(arrays, part, metadata={"format": FORMAT, "config": json.dumps(config)})
    _replace(part, target / WEIGHTS)
    part = target / (CONFIG + ".part")
    part.write_text(json.dumps(config, indent=2) + "\n")
    _replace(part, target / CONFIG)


def load(folder: str | os.PathLike[str], backend: backends.Backend) -> tuple[Any, Any]:
    """The model and its parameters on `backend`.

    Raises FileNotFoundError where there is no checkpoint, CheckpointError where it is damaged.
    """
    source = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (source / name).is_file():
            raise FileNotFoundError(f"{folder} is no checkpoint: it has no {name}")
    model = _model(source / CONFIG)
    try:
        arrays = load_file(source / WEIGHTS)
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{source / WEIGHTS}: {error}") from error
    return model, _params(model, arrays, backend, source / WEIGHTS)


def _model(path: Path) -> Any:
    try:
        config = json.loads(path.read_text())
        if config["format"] != FORMAT:
            raise CheckpointError(f"{path}: format must be {FORMAT}, got {config['format']!r}")
        return MODELS[config["model"]](**config["config"])
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error


def _params(
    model: Any, arrays: dict[str, np.ndarray], backend: backends.Backend, path: Path
) -> Any:
    # Before parameters of these sizes are made: a damaged config may ask for any amount of memory.
    table = arrays.get("embed.table")
    blocks = {name.split(".")[2] for name in arrays if name.startswith("stack.blocks.")}
    sizes = (model.vocab_size, model.d_model, model.n_layers)
    if table is None or (*table.shape, len(blocks)) != sizes:
        raise CheckpointError(f"{path} does not hold the parameters that {CONFIG} describes")
    like = model.init()
    wanted = {name: tuple(a.shape) for name, a in tree.flatten(like).items()}
    have = {name: a.shape for name, a in arrays.items()}
    if wrong := sorted(n for n in wanted.keys() | have.keys() if wanted.get(n) != have.get(n)):
        name = wrong[0]
        raise CheckpointError(
            f"{path}: {len(wrong)} parameters are missing, unexpected or misshapen, "
            f"first {name}: wanted {wanted.get(name)}, got {have.get(name)}"
        )
    on_backend = {name: backend.asarray(arrays[name]) for name in wanted}
    return tree.unflatten(like, on_backend)


def _replace(part: Path, target: Path) -> None:
    """Put a finished file in its place, on disk before it gets its name."""
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, target)
