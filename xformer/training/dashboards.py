"""The numbers of a run's log in TensorBoard or in Weights & Biases."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from xformer.base.files import replacing
from xformer.training.log import LOG, numbers_of, rows
from xformer.training.loop import Step

# Name of the dashboard and of its extra -> the module to import. tensorboardX (3 MB) writes the
# files; TensorBoard (88 MB) is needed only to look at them.
MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
COLUMNS = ("loss", "validation", "accuracy", "f1", "lr", "norm")  # of the log
SUFFIX = ".xformer"  # of our files of TensorBoard
EVENTS = re.compile(rf"events\.out\.tfevents\.\d+\.[^ ]+{re.escape(SUFFIX)}")  # their names
PAUSE = 5.0  # seconds between flushes of them
ID = "run-id"  # in the folder wandb/ of a run


def require_dashboard(name: str) -> None:
    """ValueError for an unknown dashboard; ImportError, which names the extra, without its package.

    name: "tensorboard" or "wandb"
    """
    if name not in MODULES:
        raise ValueError(f"dashboard must be one of {', '.join(MODULES)}, got {name!r}")
    try:
        import_module(MODULES[name])
    except ImportError as error:
        raise ImportError(
            f"{MODULES[name]} is not installed: pip install 'xformer-array[{name}]'"
        ) from error


@contextmanager
def dashboard(
    name: str,
    folder: str | os.PathLike[str],
    options: Mapping[str, Any],
    *,
    again: bool = False,
) -> Iterator[Callable[[Step], None]]:
    """A context that yields `report(step)`, which shows a step of a run on a dashboard.

    name: "tensorboard": a file in the folder; "wandb": Weights & Biases, in the mode and the
        project that its environment variables name
    folder: of the run, after `Run.begin`
    options: JSON that W&B shows beside the curves
    again: steps that W&B already has are run again, with other numbers; W&B starts a new run

    The steps in the log come first, unless W&B has them already. So a resumed run continues its
    curve, without gaps and without steps that occur twice. A step has the numbers of its line in
    the log, and tokens_per_second since the line before, with the time of validation.

    ValueError and ImportError as from `require_dashboard`. RuntimeError if W&B refuses the run.
    """
    require_dashboard(name)
    root, is_tensorboard = Path(folder), name == "tensorboard"
    shown: _TensorBoard | _WandB
    shown = _TensorBoard(root) if is_tensorboard else _WandB(root, options, again)
    before: Mapping[str, Any] = {"tokens": 0, "seconds": 0.0}

    def add(row: Mapping[str, Any]) -> None:
        nonlocal before
        numbers = {name: row[name] for name in COLUMNS if _is_number(row.get(name))}
        if all(
            _is_number(line.get(key)) for line in (row, before) for key in ("tokens", "seconds")
        ):
            tokens, seconds = (row[key] - before[key] for key in ("tokens", "seconds"))
            if seconds > 0:
                numbers["tokens_per_second"] = tokens / seconds
        shown.add(row["step"], row.get("seconds") or 0.0, numbers)
        before = row

    failed = True
    try:
        for row in rows(root / LOG):
            add(row)
        yield lambda step: add(numbers_of(step))
        failed = False
    finally:
        shown.close(failed)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


class _TensorBoard:
    """A file of events. It is written anew from the log when a run is resumed.

    The times in it exclude pauses of training; the last time is now.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self.event, self.summary = Event, Summary
        last = 0.0
        for row in rows(folder / LOG):
            last = row.get("seconds") or last
        self.start = time.time() - last
        # The last file stays: a TensorBoard that reads it would not find the new one without it.
        files = (path for path in folder.iterdir() if EVENTS.fullmatch(path.name))
        for path in sorted(files)[:-1]:
            path.unlink()
        # One event a step, from this thread: the package's SummaryWriter is seven times as slow,
        # and waits for ever if its thread has ended by an error.
        self.writer = EventsWriter(str(folder / "events"), SUFFIX)
        # Here TensorBoard drops the points of the old file.
        first = SessionLog(status=SessionLog.START)
        self.writer.write_event(Event(step=1, wall_time=self.start, session_log=first))
        self.due = time.monotonic() + PAUSE

    def add(self, step: int, seconds: float, numbers: dict[str, float]) -> None:
        """Show the numbers of a step, which ended `seconds` after the start of training."""
        values = [self.summary.Value(tag=tag, simple_value=x) for tag, x in numbers.items()]
        summary = self.summary(value=values)
        event = self.event(step=step, wall_time=self.start + seconds, summary=summary)
        self.writer.write_event(event)
        if time.monotonic() >= self.due:
            self.writer.flush()
            self.due = time.monotonic() + PAUSE

    def close(self, failed: bool) -> None:
        self.writer.close()


class _WandB:
    """A run of Weights & Biases. Its id is stored, and a resumed run continues it."""

    def __init__(self, folder: Path, options: Mapping[str, Any], again: bool) -> None:
        import wandb

        path = folder / "wandb" / ID
        path.parent.mkdir(exist_ok=True)
        if again or not path.is_file():
            with replacing(path) as (part,):
                part.write_text(secrets.token_hex(8))
        settings = wandb.Settings(console="off")  # or it would replace our standard output
        try:
            self.run = wandb.init(
                id=path.read_text().strip(),
                resume="allow",
                name=folder.absolute().name,
                dir=str(folder),
                config=dict(options),
                settings=settings,
            )
        except wandb.Error as error:
            raise RuntimeError(f"wandb: {error}") from error
        self.next = self.run.step  # offline, W&B knows no steps: each process sends all of them

    def add(self, step: int, seconds: float, numbers: dict[str, float]) -> None:
        if step >= self.next:
            self.run.log(numbers, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))
