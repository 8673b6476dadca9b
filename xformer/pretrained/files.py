"""The tensors of a model folder: one safetensors file, or several shards with an index."""

from __future__ import annotations

import json
import os
import re
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xformer.base.files import replacing
from xformer.pretrained.mapped import DTYPES, Tensor, ends_in_zeros, fetch, open_file
from xformer.pretrained.reading import PretrainedError, listed, read_json

CONFIG, WEIGHTS = "config.json", "model.safetensors"
GENERATION = "generation_config.json"
INDEX = WEIGHTS + ".index.json"

INDEX_LIMIT = 16 << 20
MAX_SHARDS = 1000
SHARD = re.compile(r"\w[\w.-]*\.safetensors")


class Tensors(dict[str, Tensor]):
    """The tensors of a model by name, the largest first. Only `Tensor.read` reads their data.

    In this order, memory never needs the whole model and a copy of its largest tensor together.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        order = sorted(tensors, key=lambda name: (tensors[name].start - tensors[name].end, name))
        super().__init__((name, tensors[name]) for name in order)

    def without(self, *names: str) -> Tensors:
        """The tensors but those of these names."""
        return Tensors({name: t for name, t in self.items() if name not in names})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(t.end - t.start for t in self.values())

    def fetch(self, dtype: str) -> None:
        """Start reading into memory the files whose tensors `Tensor.read` returns as views only."""
        views = [name for name, numpy_dtype in DTYPES.items() if numpy_dtype.name == dtype]
        copied = {t.data for t in self.values() if t.dtype not in views}
        for data in {t.data for t in self.values()} - copied:
            fetch(data)


def open_tensors(folder: str | os.PathLike[str]) -> Tensors:
    """The tensors of `model.safetensors`, or of the files that its index names.

    All checks are made here: sizes, the header, the offsets of every tensor, that all files are in
    the folder (see `reading`), and that index and files agree. FileNotFoundError if there is no
    model, PretrainedError for all other errors. A warning names a file that ends in zeros.
    """
    root = Path(folder)
    if os.path.lexists(root / WEIGHTS):
        tensors = open_file(root / WEIGHTS)
    elif os.path.lexists(root / INDEX):
        tensors = _open_shards(root)
    else:
        raise FileNotFoundError(f"{root} is no model: it has no {WEIGHTS} and no {INDEX}")
    of_file: dict[Path, list[Tensor]] = {}
    for tensor in tensors.values():
        of_file.setdefault(tensor.path, []).append(tensor)
    for path in (path for path, held in of_file.items() if ends_in_zeros(held)):
        message = f"{path}: ends in zeros, as a download that was stopped; download it again"
        warnings.warn(message, stacklevel=2)
    return Tensors(tensors)


def weight_files(folder: str | os.PathLike[str]) -> list[str]:
    """The names of the files that `open_tensors` reads; none if there is no model.

    PretrainedError for a damaged index of shards.
    """
    root = Path(folder)
    if os.path.lexists(root / WEIGHTS):
        return [WEIGHTS]
    if os.path.lexists(root / INDEX):
        return [INDEX, *sorted(set(_weight_map(root / INDEX).values()))]
    return []


def write(
    folder: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    names: tuple[str, str] = (WEIGHTS, CONFIG),
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write `model.safetensors` and `config.json`. An interrupted write leaves the old files.

    names: other names for the two files.
    more: further JSON files, by name.

    An index of shards in the folder is removed, because it names weights of another model; the
    shards stay. The folder may be the one that `arrays` are mapped from. TypeError for arrays that
    are not float64, float32 or float16, and for a configuration that JSON cannot represent.
    """
    target = Path(folder)
    texts = {
        name: json.dumps(dict(data), indent=2, sort_keys=True, allow_nan=False) + "\n"
        for name, data in {names[1]: config, **(more or {})}.items()
    }
    order, header = _header(arrays)
    target.mkdir(parents=True, exist_ok=True)
    with replacing(target / names[0], *(target / name for name in texts)) as (weights, *parts):
        with weights.open("xb") as file:
            file.write(header)
            for name in order:
                # One array at a time, as a model's arrays may be views in another order.
                array = np.ascontiguousarray(arrays[name], DTYPES[_word(name, arrays[name])])
                file.write(array.reshape(-1).view(np.uint8).data)
        for part, text in zip(parts, texts.values(), strict=True):
            part.write_text(text, encoding="utf-8")
    (target / f"{names[0]}.index.json").unlink(missing_ok=True)


def _header(arrays: Mapping[str, np.ndarray]) -> tuple[list[str], bytes]:
    """(names, header): names in the order of the data. Wide types are first, for alignment."""
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name in names:
        array, start = arrays[name], end
        end += array.nbytes
        header[name] = {
            "dtype": _word(name, array),
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return names, struct.pack("<Q", len(text)) + text


def _word(name: str, array: np.ndarray) -> str:
    words = {"float64": "F64", "float32": "F32", "float16": "F16"}
    if array.dtype.name not in words:
        raise TypeError(f"write: {name} must be {' or '.join(words)}, got {array.dtype}")
    return words[array.dtype.name]


def _open_shards(folder: Path) -> dict[str, Tensor]:
    path = folder / INDEX
    places = _weight_map(path)
    tensors: dict[str, Tensor] = {}
    held: dict[str, list[str]] = {}
    for shard in sorted(set(places.values())):
        try:
            in_shard = open_file(folder / shard)
        except FileNotFoundError as error:
            raise PretrainedError(f"{path}: names {shard!r}, which is missing") from error
        tensors.update(in_shard)
        for name in in_shard:
            held.setdefault(name, []).append(shard)
    wrong = {
        "missing in their files": [n for n in places if places[n] not in held.get(n, ())],
        "in several files": [n for n in held if len(held[n]) > 1],
        "not in the index": [n for n in held if n not in places],
    }
    if any(wrong.values()):
        what = "; ".join(f"{listed(names)} {word}" for word, names in wrong.items() if names)
        raise PretrainedError(f"{path}: does not agree with its files: {what}")
    return tensors


def _weight_map(path: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file, in the folder of the index."""
    places = read_json(path, INDEX_LIMIT).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise PretrainedError(f"{path}: must have a weight_map of tensors' names to file names")
    for shard in places.values():
        if not isinstance(shard, str) or not SHARD.fullmatch(shard):
            raise PretrainedError(
                f"{path}: weight_map must name .safetensors files of its own folder, "
                f"got {shard!r:.100}"
            )
    if len(set(places.values())) > MAX_SHARDS:
        raise PretrainedError(f"{path}: at most {MAX_SHARDS} files are read, it names more")
    return places
