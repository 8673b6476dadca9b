"""All that a run needs to go on, in one file: arrays in safetensors, numbers and words in JSON.

A SHA-256 over names, dtypes, shapes, bytes and words is verified before anything is used.
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

from xformer import tree
from xformer.backends import Backend
from xformer.files import replacing
from xformer.optim import LossScale
from xformer.showing import short
from xformer.training.checkpoint import CheckpointError, write_arrays
from xformer.training.storable import dtype_name, on_host, require_storable

FORMAT = "xformer-state-1"
WORDS, DIGEST = "xformer", "sha256"  # keys of the file's metadata
SHOWN = 3  # differences that a message names


@short
class State(NamedTuple):
    """Where a run stands. What is random follows from its seed and the counters `batches`."""

    params: Any  # all of them; what is not trained is Frozen
    optimiser: Any  # the state of the optimiser, of what is trained
    ema: Any  # the moving average of what is trained; None: there is none
    step: int = 0  # steps made
    batches: int = 0  # the data cursor: the next micro-batch is source.batch(batches)
    tokens: int = 0  # seen
    seconds: float = 0.0  # taken, validation included
    first: float = math.nan  # loss of the first step
    mean: float = math.nan  # running mean of the losses
    best: float = math.inf  # the lowest validation loss,
    best_step: int = 0  # of this step; 0: none was measured
    stale: int = 0  # validations since then
    loss_scale: LossScale | None = None  # of float16

    @property
    def averaged(self) -> Any:
        """The parameters to validate and to keep: the moving average where there is one."""
        return self.params if self.ema is None else tree.join(self.params, self.ema)


@short
class Saved(NamedTuple):
    """What a file holds, verified."""

    path: Path
    arrays: dict[str, np.ndarray]
    numbers: dict[str, Any]
    about: Any  # what `write_state` was told

    def restored(self, like: Any, backend: Backend) -> Any:
        """A tree of the structure of `like` on `backend`.

        ValueError naming what differs in names, shapes or dtypes, as for another architecture.
        """
        have: dict[str, Any] = self.arrays | self.numbers
        wanted = {name: tree.value(leaf) for name, leaf in tree.flatten(like).items()}
        differ = [
            f"{name} is {_kind(have.get(name))} there, {_kind(wanted.get(name))} here"
            for name in [*wanted, *(name for name in have if name not in wanted)]
            if _kind(have.get(name)) != _kind(wanted.get(name))
        ]
        _require_none(self.path, differ)
        rest = iter(wanted)

        def one(leaf: Any) -> Any:
            name = next(rest)
            if name in self.arrays:
                return backend.asarray(self.arrays[name])
            return type(leaf)(self.numbers[name])

        return tree.map(one, like)

    def require(self, about: Any, free: Collection[str] = ()) -> None:
        """ValueError naming what differs from what the file was made with, as `require_same`."""
        require_same(self.path, self.about, about, free)


def write_state(
    path: str | os.PathLike[str], state: Any, backend: Backend, about: Any = None
) -> None:
    """Write a tree of arrays and Python's bools, ints and floats.

    Arrays are of bool, integers or a dtype that the backend computes in; big-endian ones come back
    as native ones, and NumPy's scalars as arrays. An interrupted write leaves the old file.
    about: JSON that says what the state is of, such as a model's configuration.

    TypeError, ValueError as `require_storable`, which name a leaf that would not come back; OSError
    where the file cannot be written.
    """
    numbers, leaves = _parted(state)
    require_storable("write_state", leaves, backend)
    arrays = on_host(leaves, backend)
    # As text where JSON has no such number: inf, nan.
    plain = {
        name: repr(n) if isinstance(n, float) and not math.isfinite(n) else n
        for name, n in numbers.items()
    }
    words = json.dumps({"format": FORMAT, "about": about, "numbers": plain})
    metadata = {WORDS: words, DIGEST: _digest(arrays, words)}
    with replacing(Path(path)) as (part,):
        write_arrays(arrays, part, Path(path), metadata)


def require_state(what: str, state: Any, backend: Backend) -> None:
    """Raise what `write_state` would raise for a leaf; what: begins the message."""
    require_storable(what, _parted(state)[1], backend)


def read_state(path: str | os.PathLike[str]) -> Saved:
    """What a file of `write_state` holds.

    FileNotFoundError where there is none, CheckpointError where a bit of it is not as written.
    """
    place = Path(path)
    if not place.is_file():
        raise FileNotFoundError(f"there is no checkpoint {place}")
    try:
        with safetensors.safe_open(place, "np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        words = metadata[WORDS]
        intact = metadata[DIGEST] == _digest(arrays, words)
        content = json.loads(words)
        format_, about, numbers = (content[key] for key in ("format", "about", "numbers"))
    except KeyError as error:
        raise CheckpointError(f"{place} is no checkpoint of a run: it lacks {error}") from error
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{place} is damaged: {error}") from error
    if not intact:
        raise CheckpointError(f"{place} is damaged: its content is not what its SHA-256 says")
    if format_ != FORMAT:
        raise CheckpointError(f"{place}: format must be {FORMAT}, got {format_!r}")
    return Saved(place, arrays, {name: _number(n) for name, n in numbers.items()}, about)


def require_same(path: Path, there: Any, here: Any, free: Collection[str] = ()) -> None:
    """ValueError naming the differences between what a file says, nested JSON, and what is so.

    free: dotted names of values that may differ.
    """
    old, new = dict(_parts(there)), dict(_parts(here))
    differ = [
        f"{name} is {_shown(old, name)} there, {_shown(new, name)} here"
        for name in differences(there, here)
        if name not in free
    ]
    _require_none(path, differ)


def differences(there: Any, here: Any) -> list[str]:
    """Dotted names of the values in which nested JSON differs."""
    old, new = dict(_parts(there)), dict(_parts(here))
    return [
        name
        for name in [*old, *(name for name in new if name not in old)]
        # What is null is as good as absent: an option that is younger than the file.
        if json.dumps(old.get(name)) != json.dumps(new.get(name))
    ]


def _digest(arrays: Mapping[str, np.ndarray], words: str) -> str:
    sha = hashlib.sha256(words.encode())
    for name in sorted(arrays):
        array = arrays[name]
        sha.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        sha.update(array.reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def _parted(state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numbers of a tree by their names, and its other leaves."""
    leaves = {name: tree.value(leaf) for name, leaf in tree.flatten(state).items()}
    numbers = {name: leaf for name, leaf in leaves.items() if _is_number(leaf)}
    return numbers, {name: leaf for name, leaf in leaves.items() if name not in numbers}


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (bool, int, float)  # exactly: NumPy's scalars are arrays


def _number(n: Any) -> Any:
    return float(n) if isinstance(n, str) else n


def _kind(leaf: Any) -> str:
    """What a leaf is, where two must be alike."""
    if leaf is None:
        return "absent"
    if _is_number(leaf):
        return f"a Python {type(leaf).__name__}"
    return f"{dtype_name(leaf)} {tuple(leaf.shape)}"


def _parts(about: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested JSON objects by dotted names."""
    if isinstance(about, dict):
        for key, value in about.items():
            yield from _parts(value, f"{name}.{key}".lstrip("."))
    else:
        yield name, about


def _shown(parts: Mapping[str, Any], name: str) -> str:
    return json.dumps(parts[name]) if name in parts else "absent"


def _require_none(path: Path, differ: list[str]) -> None:
    if differ:
        more = f"; and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
        raise ValueError(f"{path} is of another run: {'; '.join(differ[:SHOWN])}{more}")
