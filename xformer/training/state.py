"""The state of a run in one file: arrays in safetensors, numbers and text in its metadata.

Reading verifies a SHA-256 over names, dtypes, shapes, bytes and text.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from xformer import backends
from xformer.backends import Backend
from xformer.base import tree
from xformer.base.files import replacing, require_readable, write_arrays
from xformer.base.printing import short
from xformer.optim import LossScale
from xformer.training.checkpoint import CheckpointError
from xformer.training.checkpoint_dtypes import on_host, require_storable, stored_dtype_name

FORMAT = "xformer-state-1"
WORDS, DIGEST = "xformer", "sha256"  # keys of the file's metadata
SHOWN = 3  # most differences in a message


@short
class State(NamedTuple):
    """The state of training. Random numbers depend only on the seed and the counter `batches`."""

    params: Any  # all parameters; those that are not trained are Frozen
    optimiser: Any  # the state of the optimiser, for trained parameters
    ema: Any  # the moving average of trained parameters; None: no average
    step: int = 0  # the number of finished steps
    batches: int = 0  # the data cursor: the next micro-batch is source.batch(batches)
    tokens: int = 0  # tokens read so far
    seconds: float = 0.0  # training time so far, with validation
    first: float = math.nan  # the loss of the first step
    mean: float = math.nan  # the running mean of the losses
    best: float = math.inf  # the lowest validation loss
    best_step: int = 0  # its step; 0: nothing was validated
    stale: int = 0  # validations since then
    loss_scale: LossScale | None = None  # for float16
    memory: Any = None  # the segment memory after the last batch; None: the loss has no memory

    @property
    def averaged(self) -> Any:
        """The parameters to validate and to save: the moving average if there is one."""
        return self.params if self.ema is None else tree.join(self.params, self.ema)


@short
class Saved(NamedTuple):
    """The verified content of a file of `write_state`."""

    path: Path
    arrays: dict[str, np.ndarray]
    numbers: dict[str, Any]
    about: Any  # the argument of `write_state`

    def restored(self, like: Any, backend: str | Backend) -> Any:
        """The tree on `backend`, with the structure of `like`.

        ValueError, which lists differences, if names, shapes or dtypes differ from `like`.
        """
        backend = backends.get(backend)
        wanted = {name: tree.value(leaf) for name, leaf in tree.flatten(like).items()}
        have: dict[str, Any] = self.arrays | self.numbers
        differ = [
            f"{name} is {_kind(have.get(name))} there, {_kind(wanted.get(name))} here"
            for name in [*wanted, *(name for name in have if name not in wanted)]
            if _kind(have.get(name)) != _kind(wanted.get(name))
        ]
        _require_none(self.path, differ)
        names = iter(wanted)

        def one(leaf: Any) -> Any:
            name = next(names)
            if name in self.arrays:
                return backend.asarray(self.arrays[name])
            return type(leaf)(self.numbers[name])

        return tree.map(one, like)

    def require(self, about: Any, free: Collection[str] = ()) -> None:
        """ValueError, which lists differences, if the file's `about` differs. free: may differ."""
        require_same(self.path, self.about, about, free)


def write_state(
    path: str | os.PathLike[str], state: Any, backend: str | Backend, about: Any = None
) -> None:
    """Write a tree of arrays and of Python bools, ints and floats.

    An interrupted write leaves the old file.

    state: arrays of bool, integers or a dtype that the backend computes in. They are read back in
        native byte order, and NumPy scalars as arrays.
    about: JSON that describes the state, such as a model's configuration

    TypeError or ValueError, which names the leaf, for one that cannot be stored. OSError if the
    file cannot be written.
    """
    backend = backends.get(backend)
    numbers, leaves = _parted(state)
    require_storable("write_state", leaves, backend)
    arrays = on_host(leaves, backend)
    # inf and nan as text, since JSON has no such numbers.
    plain = {
        name: repr(n) if isinstance(n, float) and not math.isfinite(n) else n
        for name, n in numbers.items()
    }
    words = json.dumps({"format": FORMAT, "about": about, "numbers": plain})
    metadata = {WORDS: words, DIGEST: _digest(arrays, words)}
    with replacing(Path(path)) as (part,):
        write_arrays(arrays, part, Path(path), metadata)


def require_state(what: str, state: Any, backend: Backend) -> None:
    """TypeError or ValueError for a leaf that `write_state` cannot store. what: in the message."""
    require_storable(what, _parted(state)[1], backend)


def read_state(path: str | os.PathLike[str]) -> Saved:
    """The content of a file of `write_state`.

    FileNotFoundError if there is none, PermissionError if it may not be read, CheckpointError if
    a bit of it has changed.
    """
    file_path = Path(path)
    if not file_path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {file_path}")
    require_readable(file_path)
    try:
        with safetensors.safe_open(file_path, "np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        words = metadata[WORDS]
        intact = metadata[DIGEST] == _digest(arrays, words)
        content = json.loads(words)
        format_, about, numbers = (content[key] for key in ("format", "about", "numbers"))
    except KeyError as error:
        raise CheckpointError(f"{file_path} is no checkpoint of a run: it lacks {error}") from error
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file_path} is damaged: {error}") from error
    if not intact:
        raise CheckpointError(f"{file_path} is damaged: its content has another SHA-256")
    if format_ != FORMAT:
        raise CheckpointError(f"{file_path}: format must be {FORMAT}, got {format_!r}")
    plain = {name: float(n) if isinstance(n, str) else n for name, n in numbers.items()}
    return Saved(file_path, arrays, plain, about)


def require_same(path: Path, stored: Any, current: Any, free: Collection[str] = ()) -> None:
    """ValueError, which lists differences, if nested JSON of a file differs from that of this run.

    free: dotted names of values that may differ
    """
    old, new = dict(parts(stored)), dict(parts(current))
    differ = [
        f"{name} is {_shown(old, name)} there, {_shown(new, name)} here"
        for name in differences(stored, current)
        if name not in free
    ]
    _require_none(path, differ)


def differences(stored: Any, current: Any) -> list[str]:
    """The dotted names of the values in which two nested JSON objects differ."""
    old, new = dict(parts(stored)), dict(parts(current))
    return [
        name
        for name in [*old, *(name for name in new if name not in old)]
        # null equals absent: the option may be newer than the file.
        if json.dumps(old.get(name)) != json.dumps(new.get(name))
    ]


def digest(leaves: Mapping[str, Any], backend: Backend) -> str:
    """The SHA-256 of arrays on `backend`, in hex: of their names, dtypes, shapes and bytes."""
    return _digest(on_host({name: tree.value(leaf) for name, leaf in leaves.items()}, backend))


def _digest(arrays: Mapping[str, np.ndarray], words: str = "") -> str:
    sha = hashlib.sha256(words.encode())
    for name in sorted(arrays):
        array = arrays[name]
        sha.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        sha.update(array.reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def _parted(state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numbers of a tree and its other leaves, each by name."""
    leaves = {name: tree.value(leaf) for name, leaf in tree.flatten(state).items()}
    numbers = {name: leaf for name, leaf in leaves.items() if is_number(leaf)}
    return numbers, {name: leaf for name, leaf in leaves.items() if name not in numbers}


def is_number(leaf: Any) -> bool:
    """Whether a leaf of a state is a Python number, not an array."""
    return type(leaf) in (bool, int, float)  # exactly: NumPy's scalars are arrays


def _kind(leaf: Any) -> str:
    """The type of a leaf: dtype and shape of an array. Two leaves must agree in it."""
    if leaf is None:
        return "absent"
    if is_number(leaf):
        return f"a Python {type(leaf).__name__}"
    return f"{stored_dtype_name(leaf)} {tuple(leaf.shape)}"


def parts(about: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested JSON objects with their dotted names."""
    if isinstance(about, dict):
        for key, value in about.items():
            yield from parts(value, f"{name}.{key}".lstrip("."))
    else:
        yield name, about


def _shown(parts: Mapping[str, Any], name: str) -> str:
    return json.dumps(parts[name]) if name in parts else "absent"


def _require_none(path: Path, differ: list[str]) -> None:
    if differ:
        more = f"; and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
        raise ValueError(f"{path} is of another run: {'; '.join(differ[:SHOWN])}{more}")
