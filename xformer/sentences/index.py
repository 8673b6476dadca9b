"""An index of the texts in a folder: a vector for each passage, in one file.

The file is a safetensors file with two tensors, and a description in JSON in its metadata:

    vectors   (N, D), float32
    passages  (N, 4), int64: the number of the file, the line from 1, and the first and the last
              character + 1 in the file
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.base.choices import near_path
from xformer.base.files import file_layout, replacing, require_readable, write_arrays
from xformer.pretrained.config import Config
from xformer.pretrained.files import CONFIG, weight_files
from xformer.pretrained.reading import PretrainedError, parse_json
from xformer.sentences.settings import settings_files

FORMAT = "xformer search index 1"
ANEW = "to make a new index: --rebuild"
SUFFIXES = (".txt", ".md")
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt"),
)
SENTENCE_PIECE = "*.model"


class Stamp(NamedTuple):
    """The state of a file: its time and size, which are compared first, and its SHA-256."""

    mtime: int  # ns since 1970; negative before
    size: int
    digest: str


class Index(NamedTuple):
    """Vectors of the passages in the files of a folder."""

    vectors: np.ndarray  # (N, D), float32
    passages: np.ndarray  # (N, 4), int64, in the order of the files
    files: Mapping[str, Stamp]  # path in the folder, with "/" -> its state; in the order of numbers
    model: Mapping[str, Stamp]  # the same, of the files of the model
    options: Mapping[str, Any]  # of `embed`, as JSON has them


def read_index(path: str | os.PathLike[str]) -> Index:
    """The index in a file, checked.

    FileNotFoundError if there is no file, PermissionError if it may not be read. PretrainedError
    if it is damaged or not an index.
    """
    import safetensors

    path = Path(path)
    if not os.path.lexists(path):
        raise FileNotFoundError(f"there is no file {path}")
    require_readable(path)
    try:
        if not path.is_file():  # a pipe would wait for ever
            raise OSError("not a file")
        with safetensors.safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, TypeError, ValueError) as error:
        raise PretrainedError(f"{path}: is damaged, or no index: {error}; {ANEW}") from error
    if metadata.get("format") != FORMAT:
        raise PretrainedError(f"{path}: is no index of xformer search; {ANEW}")
    index = _described(arrays, parse_json(metadata.get("description", ""), path), path)
    if why := _damage(index):
        raise PretrainedError(f"{path}: is damaged: {why}; {ANEW}")
    return index


def write_index(index: Index, path: str | os.PathLike[str]) -> None:
    """Write an index to a file. An interrupted write leaves the old file. OSError if it fails.

    ValueError for an index that `read_index` would refuse.
    """
    path = Path(path)
    description = json.dumps(
        {
            "files": {name: list(stamp) for name, stamp in index.files.items()},
            "model": {name: list(stamp) for name, stamp in index.model.items()},
            "options": dict(index.options),
        },
        allow_nan=False,
    )
    arrays = {"vectors": file_layout(index.vectors), "passages": file_layout(index.passages)}
    if why := _damage(_described(arrays, parse_json(description, path), path)):
        raise ValueError(f"write_index: {why}")
    with replacing(path) as (part,):
        write_arrays(arrays, part, path, {"format": FORMAT, "description": description})


def _described(arrays: Mapping[str, np.ndarray], data: dict[str, Any], path: Path) -> Index:
    """The index of arrays and a description. PretrainedError for a damaged description."""
    c = Config(data, f"{path}: description")
    files, model, options = _stamps(c, "files"), _stamps(c, "model"), c.sub("options")
    c.ignore("options")
    return Index(
        arrays.get("vectors", np.empty(0)),
        arrays.get("passages", np.empty(0)),
        files,
        model,
        {} if options is None else options.data,
    )


def require_folder(folder: str | os.PathLike[str]) -> Path:
    """The path of a folder. NotADirectoryError if it is none."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file, not a folder")
    if not path.is_dir():
        raise NotADirectoryError(f"there is no folder {path}{near_path(path)}")
    return path


def texts_in(folder: str | os.PathLike[str]) -> list[str]:
    """The paths of the texts in a folder, with "/", sorted.

    A text is a regular file whose name ends with .txt or .md. Subfolders are searched too. Links,
    and names that begin with a dot, are ignored. A warning names what may not be read.
    NotADirectoryError if there is no folder, PermissionError if it may not be read.
    """
    root = require_folder(folder)
    found: list[str] = []
    unread: list[str] = []

    def leave_out(error: OSError) -> None:
        if Path(error.filename) == root:
            raise error
        unread.append(Path(error.filename).relative_to(root).as_posix())

    for where, folders, names in os.walk(root, onerror=leave_out):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(where, name) for name in names if not name.startswith(".")]
        found += [
            path.relative_to(root).as_posix()
            for path in paths
            if path.suffix.lower() in SUFFIXES and path.is_file() and not path.is_symlink()
        ]
    unread += [name for name in found if not os.access(root / name, os.R_OK)]
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        warnings.warn(f"search: may not be read, left out: {min(unread)}{more}", stacklevel=3)
    return sorted(set(found) - set(unread))


def model_files(folder: str | os.PathLike[str]) -> list[str]:
    """The paths of the files in a folder that change what a model computes, with "/", sorted.

    They are the files of its configuration, weights, tokenizer and settings, with its modules'
    folders. NotADirectoryError if there is no folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise NotADirectoryError(f"the model must be a folder, got {root}")
    names = {CONFIG, *weight_files(root), *tokenizer_files(root), *settings_files(root)}
    return sorted(name for name in names if (root / name).is_file())


def tokenizer_files(path: Path) -> list[str]:
    """The names of the files of a tokenizer in a folder; of a tokenizer's file, its own name."""
    if path.is_file():
        return [path.name]
    found = [path / name for name in TOKENIZER] + list(path.glob(SENTENCE_PIECE))
    return sorted(one.name for one in found if one.is_file())


def stamps(
    folder: str | os.PathLike[str], names: Iterable[str], old: Mapping[str, Stamp]
) -> dict[str, Stamp]:
    """The states of files. A file of the same time and size as in `old` is not read."""
    made = {}
    for name in names:
        path = Path(folder, name)
        status = path.stat()
        before = old.get(name)
        if before is not None and before[:2] == (status.st_mtime_ns, status.st_size):
            made[name] = before
        else:
            made[name] = Stamp(status.st_mtime_ns, status.st_size, _digest(path))
    return made


def digests(states: Mapping[str, Stamp]) -> dict[str, str]:
    """The digest of each file."""
    return {name: stamp.digest for name, stamp in states.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamps(c: Config, name: str) -> dict[str, Stamp]:
    part = c.sub(name)
    if part is None:
        raise c.refused(name, "an object")
    made = {}
    for key, value in part.data.items():
        kinds = [type(item) for item in value] if isinstance(value, list) else []
        if kinds != [int, int, str] or value[1] < 0:
            raise part.refused(key, "a time, a size and a digest")
        made[key] = Stamp(*value)
    part.ignore(*part.data)
    return made


def _damage(index: Index) -> str | None:
    """What is wrong with the arrays of an index; None if they are right."""
    vectors, passages = index.vectors, index.passages
    n = len(vectors)
    if vectors.ndim != 2 or vectors.dtype != np.float32 or not np.isfinite(vectors).all():
        return "vectors must be finite float32 numbers (N, D)"
    if passages.shape != (n, 4) or passages.dtype != np.int64:
        return f"passages must be int64 of shape ({n}, 4)"
    number, line, start, end = passages.T
    if ((number < 0) | (number >= len(index.files)) | (line < 1)).any():
        return "a passage has no such file or line"
    if (number[1:] < number[:-1]).any():
        return "passages must be in the order of their files"
    if ((start < 0) | (end <= start)).any():
        return "a passage has no characters"
    return None
