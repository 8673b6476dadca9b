"""A training run in a folder. It can be stopped at any time, and resumed.

run.json                                 the model, the configuration and the data
log.jsonl                                a line for each step
checkpoints/step-00000100.safetensors    the last checkpoints, and the best validated one, without
                                         frozen parameters
model.safetensors, config.json           the best model so far, for `training.load`; if it started
                                         from a pretrained model, for `pretrained.load`
lock                                     held by the process that trains
events.out.tfevents.*, wandb/            of `dashboard`
*.aside, *.aside-2                       files of steps after the resumed one; never deleted
"""

from __future__ import annotations

import io
import json
import math
import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from xformer import __version__, backends, pretrained
from xformer.backends import Backend
from xformer.base import tree
from xformer.base.files import PART, aside, remove_parts, replacing
from xformer.base.lock import LOCK, locked
from xformer.base.printing import size
from xformer.dispatch.checks import require_sizes
from xformer.distributed.world import Alone, World
from xformer.training import checkpoint
from xformer.training.checkpoint import CheckpointError
from xformer.training.diverged import Diverged
from xformer.training.log import LOG, append, line_of, shorten
from xformer.training.loop import Step
from xformer.training.sharded_checkpoint import gathered, is_sharded, scattered
from xformer.training.state import (
    Saved,
    State,
    differences,
    digest,
    is_number,
    parts,
    read_state,
    require_same,
    require_state,
    write_state,
)

RUN, CHECKPOINTS = "run.json", "checkpoints"
FORMAT = "xformer-run-1"
SHOWN = 5  # most names in a warning
FROZEN = "frozen_parameters"  # in a checkpoint's `about`: the digest of frozen parameters
ASIDE = re.compile(r"\.aside(-\d+)?$")  # ends of names of `aside`


class Run:
    """The folder of a training run, a context manager that locks it for this process.

    about: JSON that describes the model, the configuration and the data. A run can only be resumed
        with the same.
    model: the best parameters are saved for `training.load`, or for `pretrained.load` if the model
        is a pretrained one; None: only checkpoints are saved
    write_model: write_model(params) saves the best parameters in the folder instead. `begin` calls
        it too, so a stopped run may leave another model there.
    every: steps between checkpoints
    keep: the number of last checkpoints that are kept
    notes: more JSON for run.json
    free: dotted names of values in `about` that may differ, such as "training.steps". If one does,
        `begin` writes `about` and `notes` to run.json again.
    world: the processes that train together (`train`). All of them open, begin and record the run.
        Process 0 alone reads and writes the folder; a run may be resumed with another number of
        processes. A checkpoint holds the whole state of a sharded optimiser (`optim.sharded`).

    Checkpoints have the trained parameters and a SHA-256 of the frozen ones, which `begin` takes
    from its argument.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        backend: str | Backend,
        about: dict[str, Any],
        *,
        model: Any = None,
        write_model: Callable[[Any], Any] | None = None,
        every: int = 100,
        keep: int = 2,
        notes: Any = None,
        free: Collection[str] = (),
        world: World | None = None,
    ) -> None:
        every, keep = require_sizes("Run", 1, every=every, keep=keep)
        self.folder, self.backend = Path(folder), backends.get(backend)
        self.about, self.model = about, model
        self.every, self.keep, self.notes, self.free = every, keep, notes, free
        self.write_model = write_model
        self.world = world or Alone()
        self._open = ExitStack()
        self._saved = -1  # the step of the newest checkpoint
        self._left: State | None = None  # the state after the last step, until it is saved
        self._frozen: str | None = None  # the digest of frozen parameters, once it is known

    def __enter__(self) -> Run:
        """Make and lock the folder.

        BlockingIOError if another run trains in it, ValueError if it has another run with a
        checkpoint or a model, FileExistsError if it has other files. ValueError if the processes of
        world differ in `about`, in `every` or in versions; then nothing is written.
        """
        require_alike(self.world, self.backend, self.about, self.every)
        self.world.first(self._enter)
        return self

    def _enter(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        require_ours(self.folder)
        with ExitStack() as stack:
            stack.enter_context(locked(self.folder, "trains"))
            stored = read_run(self.folder) if (self.folder / RUN).is_file() else None
            if stored is not None and is_begun(self.folder):
                require_same(self.folder / RUN, stored["about"], self.about, self.free)
            else:
                self._describe({"about": self.about, "notes": self.notes, "made": self._origin()})
            (self.folder / CHECKPOINTS).mkdir(exist_ok=True)
            for folder in (self.folder, self.folder / CHECKPOINTS):
                remove_parts(folder)
            _warn_of_others(self.folder)
            self._open = stack.pop_all()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Save the last step, unless there was an error, and unlock the folder."""
        with self._open:
            if kind is None:
                with self._explained():
                    self._finish()
            self._left = None

    def begin(self, start: State, at: int | None = None) -> State:
        """The state of the newest checkpoint; `start` if there is none. The log is cut there.

        at: resume from the checkpoint of this step. Newer checkpoints, the model and the log are
            renamed. The model is then the best one up to this step; if its checkpoint was deleted,
            it is the model of this step, and the best loss is unknown.

        Model and log are also renamed if there is no checkpoint, and the log if it is damaged. A
        UserWarning names the new file of the log.

        FileNotFoundError if there is no checkpoint of step `at`. ValueError if a checkpoint does
        not fit `start`, CheckpointError if it is damaged. OSError if the disk has too little room
        for training. TypeError or ValueError for a leaf of `start` and for a model that cannot be
        stored.
        """
        require_state("begin", start, self.backend)
        if self._describes_model:
            checkpoint.describe("begin", self.model)
        if self.world.size == 1:
            return self._begin(start, at)
        own, whole = start.optimiser, start
        sharded = is_sharded(own, self.world)
        if sharded:
            whole = start._replace(optimiser=gathered(own, self.world, self.backend))

        def begin() -> State:
            nonlocal whole
            whole = self._begin(whole, at)
            common = whole._replace(optimiser=None) if sharded else whole
            return _moved(common, self.backend.to_numpy)

        state = _moved(self.world.first(begin), self.backend.asarray)
        self._saved = self.world.broadcast(self._saved)
        if sharded:
            optimiser = scattered(whole.optimiser, own, self.world, self.backend)
            state = state._replace(optimiser=optimiser)
        return state

    def _begin(self, start: State, at: int | None) -> State:
        by_step = checkpoints(self.folder)
        if at is not None and at not in by_step:
            have = ", ".join(map(str, by_step)) or "none"
            raise FileNotFoundError(
                f"{self.folder} has no checkpoint of step {at}; it has those of {have}"
            )
        state = start
        if by_step:
            saved = self._read(by_step, max(by_step) if at is None else at)
            state = self._restored(saved, start, self.backend)
            self._saved = state.step
        needed, free = self.space_needed(state), shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(
                f"{self.folder}: the checkpoints need {size(needed)}, and {size(free)} are free"
            )
        content = read_run(self.folder)
        if differences(content["about"], self.about):
            self._describe(content | {"about": self.about, "notes": self.notes})
        newer = [path for step, path in by_step.items() if step > state.step]
        model = self.folder / checkpoint.WEIGHTS
        if (newer or not by_step) and self._saves_model and model.is_file():
            newer.insert(0, model)  # first: better no model than one of a renamed step
        for path in newer:
            path.replace(aside(path))
        if by_step and self._saves_model:
            state = self._with_model(state)
        shorten(self.folder / LOG, state.step, self.every if by_step and not newer else 0)
        self._prune(state)  # the last process may have been killed before it did
        return state

    def record(
        self, steps: Iterable[Step], stop: Callable[[], bool] = lambda: False
    ) -> Iterator[Step]:
        """Yield the steps. Each is logged first; checkpoints are saved between and at the end.

        stop: called after each step; True, in any process, ends training. After a `break`, the last
            step is saved when the run is closed. All processes have to break after the same step.

        Diverged and OSError get a note that names the last good checkpoint. ValueError for steps of
        another number of processes than the run's.
        """
        with self._explained():
            with self._log() as log:
                for step in steps:
                    if step.processes != self.world.size:
                        raise ValueError(
                            f"record: the run has {self.world.size} processes, and each step was "
                            f"made by {step.processes}: give Run and train the same world"
                        )
                    if log is not None:
                        append(log, line_of(step))
                    self._left = step.state
                    if step.step % self.every == 0 or step.state.best_step == step.step:
                        self._finish()
                    yield step
                    if any(self.world.sums(stop())):
                        break
            self._finish()

    def save(self, state: State) -> None:
        """Save a checkpoint of `state`, unless it exists, and remove old ones.

        The saved model is the best validated one; before the first validation, the newest. All
        processes of world call it with the same state; RuntimeError if their parameters differ.
        """
        if self._saved == state.step:
            return
        require_state("save", state, self.backend)  # before the model is written
        self._require_equal(state)
        whole = state
        if self.world.size > 1 and is_sharded(state.optimiser, self.world):
            optimiser = gathered(state.optimiser, self.world, self.backend)
            whole = state._replace(optimiser=optimiser)
        self.world.first(lambda: self._save(whole))
        self._saved = state.step

    def _require_equal(self, state: State) -> None:
        """RuntimeError, in all processes, if the parameters of one are not those of process 0."""
        if self.world.size == 1:
            return
        trained = tree.flatten(tree.trained(state.params))
        digests = self.world.gather(digest(trained, self.backend))
        differ = [str(rank) for rank, other in enumerate(digests) if other != digests[0]]
        if differ:
            raise RuntimeError(
                f"after step {state.step}, the parameters of process {', '.join(differ)} are not "
                "those of process 0: all need the same kind of processor and the same libraries"
            )

    def _save(self, state: State) -> None:
        if self._saves_model and state.best_step in (0, state.step):
            # First, so that it is never older than a checkpoint that says it is the best.
            self._write_model(state.averaged, self.backend)
        self._write(state)
        self._prune(state)

    def space_needed(self, state: State) -> int:
        """The most bytes that training will add: checkpoints, one of them while it is written."""
        one = _stored(_without_frozen(state))
        models = 2 * _stored(state.params) if self._saves_model else 0
        existing = checkpoints(self.folder).items()
        have = sum(path.stat().st_size for step, path in existing if step <= state.step)
        return max((self.keep + 2) * one - have, one) + models

    def _finish(self) -> None:
        """Save the state after the last step."""
        if self._left is None:
            return
        with self._log() as log:
            if log is not None:
                os.fsync(log.fileno())  # so that the log has all steps of a checkpoint
        self.save(self._left)
        self._left = None

    def _log(self) -> AbstractContextManager[io.FileIO | None]:
        """The log, open for appending, in process 0; None in the others."""
        if self.world.rank:
            return nullcontext()
        return (self.folder / LOG).open("ab", buffering=0)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A context in which an error stops saving; Diverged and OSError name a checkpoint."""
        try:
            yield
        except Exception as error:
            self._left = None
            if isinstance(error, Diverged | OSError):
                last = list(checkpoints(self.folder).values())[-1:]
                good = f"the last good checkpoint is {last[0]}" if last else ""
                error.add_note(good or "there is no checkpoint yet")
            raise

    def _with_model(self, state: State) -> State:
        """Write the best model if it is missing. Return the state, without an unknown best loss."""
        if self.write_model is None and (self.folder / checkpoint.WEIGHTS).is_file():
            return state
        best, backend = state, self.backend
        if state.best_step not in (0, state.step):
            try:
                saved = _read_checkpoint(path_of(self.folder, state.best_step), state.best_step)
                backend = backends.get("numpy")  # so that a device does not hold two states
                best = self._restored(saved, state, backend)
            except (FileNotFoundError, CheckpointError):
                state = best = state._replace(best=math.inf, best_step=0)
                self._write(state)
        self._write_model(best.averaged, backend)
        return state

    @property
    def _saves_model(self) -> bool:
        return self.model is not None or self.write_model is not None

    @property
    def _describes_model(self) -> bool:
        """Whether the model is stored in xformer's own format."""
        if self.model is None or self.write_model is not None:
            return False
        return getattr(self.model, "hf_config", None) is None

    def _write_model(self, params: Any, backend: Backend) -> None:
        if self.write_model is not None:
            self.write_model(params)
        elif self._describes_model:
            checkpoint.save(self.folder, self.model, params, backend)
        else:
            pretrained.save(self.model, params, self.folder)

    def _write(self, state: State) -> None:
        """Write a checkpoint of `state`, without frozen parameters."""
        path, part = path_of(self.folder, state.step), _without_frozen(state)
        write_state(path, part, self.backend, self._about(state))

    def _restored(self, saved: Saved, like: State, backend: Backend) -> State:
        """The state of a checkpoint on `backend`, with the frozen parameters of `like`."""
        saved.require(self._about(like), self.free)
        part: State = saved.restored(_without_frozen(like), backend)
        params = like.params
        if backend is not self.backend:
            params = tree.map(lambda a: backend.asarray(self.backend.to_numpy(a)), params)
        return part._replace(params=tree.join(params, part.params))

    def _about(self, state: State) -> dict[str, Any]:
        """What a checkpoint says of the run: `about`, and a digest of frozen parameters."""
        frozen = tree.frozen(state.params)
        if not frozen:
            return self.about
        if self._frozen is None:
            self._frozen = digest(frozen, self.backend)
        return self.about | {FROZEN: self._frozen}

    def _read(self, by_step: dict[int, Path], step: int) -> Saved:
        try:
            return _read_checkpoint(by_step[step], step)
        except CheckpointError as error:
            older = [n for n in by_step if n < step]
            for n in reversed(older):
                try:
                    _read_checkpoint(by_step[n], n)
                except CheckpointError:
                    continue
                hint = f"that of step {n} is intact: resume from it with --resume-step {n}"
                raise CheckpointError(f"{error}; {hint}") from error
            raise CheckpointError(f"{error}; no older one is intact") from error

    def _prune(self, state: State) -> None:
        """Remove all checkpoints but the last ones and the best one."""
        steps = [step for step in checkpoints(self.folder) if step <= state.step]
        for step in steps[: -self.keep]:
            if step != state.best_step:
                path_of(self.folder, step).unlink()

    def _describe(self, content: dict[str, Any]) -> None:
        with replacing(self.folder / RUN) as (part,):
            text = json.dumps({"format": FORMAT} | content, indent=2) + "\n"
            part.write_text(text, encoding="utf-8")

    def _origin(self) -> dict[str, str]:
        """Versions and machine, for people. They are never compared."""
        return {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "xformer": __version__,
            "python": platform.python_version(),
            "machine": platform.platform(),
            "backend": self.backend.describe(),
        }


def require_alike(world: World, backend: Backend, about: Any, every: int) -> None:
    """ValueError, in all processes, if one differs from process 0 in an argument or in versions.

    about, every: of `Run`
    """
    versions = {"xformer": __version__, "python": platform.python_version()}
    versions |= {"numpy": np.__version__, backend.name: backend.version}
    everything = {"versions": versions, **about, "checkpoint_every": every}
    mine = {"host": world.host, "about": everything}
    first, *others = world.gather(mine)
    for rank, other in enumerate(others, start=1):
        for name in differences(first["about"], other["about"])[:1]:
            here, there = (json.dumps(dict(parts(x["about"])).get(name)) for x in (first, other))
            raise ValueError(
                f"the processes differ: {name} is {there} in process {rank} on {other['host']}, "
                f"{here} in process 0 on {first['host']}"
            )


def require_ours(folder: Path) -> None:
    """FileExistsError unless a folder is empty or has a run, perhaps one just started."""
    if (folder / RUN).is_file():
        return
    for path in folder.iterdir():
        if path.name != LOCK and not PART.fullmatch(path.name):
            raise FileExistsError(f"{folder} is no run and not empty: it has {path.name}")


def is_begun(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has a checkpoint or a model. Otherwise another run may use it."""
    return bool(checkpoints(folder)) or Path(folder, checkpoint.WEIGHTS).is_file()


def is_free(folder: Path) -> bool:
    """Whether a new run may use a folder: it is empty, or has only a run that has not begun."""
    try:
        require_ours(folder)
    except FileExistsError:
        return False
    return not is_begun(folder)


def read_run(folder: str | os.PathLike[str]) -> Any:
    """The content of run.json. FileNotFoundError if there is none, ValueError if it is damaged."""
    path = Path(folder) / RUN
    if not path.is_file():
        why = f"is no run: it has no {RUN}" if os.path.lexists(folder) else "does not exist"
        raise FileNotFoundError(f"{folder} {why}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] == FORMAT and isinstance(content["about"], dict):
            return content
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r:.200}") from error
    raise ValueError(f"{path}: format must be {FORMAT}, got {content['format']!r}")


def checkpoints(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """The checkpoints of a run: step -> path, in order. Files of other names are ignored."""
    root = Path(folder)
    paths = root.joinpath(CHECKPOINTS).glob("step-*.safetensors")
    numbers = {path.stem.removeprefix("step-") for path in paths if path.is_file()}
    steps = sorted(map(int, filter(str.isdecimal, numbers)))
    by_step = {step: path_of(root, step) for step in steps}
    return {step: path for step, path in by_step.items() if path.stem[len("step-") :] in numbers}


def _warn_of_others(folder: Path) -> None:
    """A UserWarning that names the files among the checkpoints that are none of this run."""
    own = {path.name for path in checkpoints(folder).values()}
    names = {path.name for path in folder.joinpath(CHECKPOINTS).iterdir()} - own
    others = sorted(name for name in names if not ASIDE.search(name) and name[0] != ".")
    if others:
        shown = ", ".join(others[:SHOWN]) + (", ..." if len(others) > SHOWN else "")
        warnings.warn(
            f"{folder / CHECKPOINTS} has files that are no checkpoints of this run, which are "
            f"ignored and kept: {shown}",
            stacklevel=3,
        )


def _read_checkpoint(path: Path, step: int) -> Saved:
    """The checkpoint at `path`. CheckpointError if it is damaged or of another step than `step`."""
    saved = read_state(path)
    if saved.numbers.get("step") != step:
        raise CheckpointError(
            f"{path} is a copy under another name: it has step {saved.numbers.get('step')}"
        )
    return saved


def _moved(state: State, move: Callable[[Any], Any]) -> State:
    """The state with `move(leaf)` for each array."""
    return tree.map(lambda leaf: leaf if is_number(leaf) else move(leaf), state)


def _without_frozen(state: State) -> State:
    return state._replace(params=tree.trained(state.params))


def _stored(leaves: Any) -> int:
    """The bytes of a tree in a file. An array that occurs twice in it is stored twice."""
    return sum(tree.nbytes(leaf) for leaf in tree.flatten(leaves).values())


def path_of(folder: Path, step: int) -> Path:
    """The path of the checkpoint of a step."""
    return folder / CHECKPOINTS / f"step-{step:08}.safetensors"
