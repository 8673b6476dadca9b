"""A run small enough to be done hundreds of times, with everything that a run can have."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import xformer as xf
from xformer import training
from xformer.backends import Backend
from xformer.training import Run, State, Step, TrainConfig

NUMPY = xf.backends.get("numpy")
SIZES: Any = {"vocab_size": 16, "n_layers": 1, "d_model": 8, "n_heads": 2, "max_len": 8}
MODEL = xf.GPT(**SIZES, dropout=0.1)
TOKENS = np.random.default_rng(0).integers(0, 16, 600).cumsum() % 16  # not all alike
CONFIG = TrainConfig(
    steps=30, batch_size=3, accumulate=2, lr=1e-2, warmup=3, ema=0.9, eval_every=4, seed=5
)
ABOUT: dict[str, Any] = {"model": {"layers": 1}, "data": "tokens"}


def source(config: TrainConfig = CONFIG) -> training.Windows:
    return training.Windows(TOKENS[:500], MODEL.context, config.batch_size, config.seed)


def held_out() -> list[training.Batch]:
    return list(training.Windows(TOKENS[500:], MODEL.context, 4, 0).held_out(2))


def begun(config: TrainConfig = CONFIG, place: Backend = NUMPY) -> State:
    params = xf.tree.map(place.asarray, MODEL.init(config.seed))
    return training.start(params, config)


def hold(step: int, until: Path | None = None) -> None:
    """From now on `xformer train` waits after the line of a step, of which it prints one.

    It waits until Ctrl-C is pressed, or a file `until` is there.
    """
    from xformer.cli import train

    def held(*args: Any, **options: Any) -> None:
        if not (args and str(args[0]).startswith(f"step {step}/")):
            return print(*args, **options)
        handle, pressed = signal.getsignal(signal.SIGINT), threading.Event()
        signal.signal(signal.SIGINT, lambda *signalled: (pressed.set(), handle(*signalled)))
        print(*args, **options)
        while not pressed.is_set() and not (until and until.exists()):
            time.sleep(0.01)
        signal.signal(signal.SIGINT, handle)

    vars(train)["print"] = held


def steps(
    state: State, config: TrainConfig = CONFIG, place: Backend = NUMPY, **options: Any
) -> Iterator[Step]:
    """The steps that come after a state."""
    options = {"held_out": held_out(), **options}
    loss = training.loss_of(MODEL)
    return training.train(loss, state, source(config), config, place, **options)


def opened(folder: Path, **options: Any) -> Run:
    options = {"model": MODEL, "every": 3, "keep": 2, **options}
    return Run(folder, NUMPY, ABOUT, **options)


def trained(folder: Path, *, n: int | None = None, at: int | None = None, **options: Any) -> State:
    """What is left of the run in a folder, or its next n steps."""
    with opened(folder, **options) as run:
        state = run.begin(begun(), at)
        last = CONFIG.steps if n is None else state.step + n
        made = steps(state, donate=True)
        for step in run.record(itertools.islice(made, last - state.step)):
            state = step.state
    return state


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of the log, but for what another run has otherwise."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k not in ("seconds", "memory")} for row in found]


def leaves(state: Any) -> dict[str, Any]:
    """All that decides how a run goes on, as bytes."""
    flat = xf.tree.flatten(state)
    return {name: np.asarray(leaf).tobytes() for name, leaf in flat.items() if name != "seconds"}


def require_alike(folder: Path, other: Path) -> None:
    """AssertionError unless two finished runs are the same bit for bit."""
    assert rows(folder) == rows(other)
    ends = [training.read_state(_newest(path)) for path in (folder, other)]
    assert leaves(ends[0].arrays) == leaves(ends[1].arrays)
    assert {**ends[0].numbers, "seconds": 0} == {**ends[1].numbers, "seconds": 0}
    assert _names(folder) == _names(other)
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, other)]
    assert weights[0] == weights[1]


def _names(folder: Path) -> list[str]:
    """The files, but for checkpoints: a run keeps that of where it was stopped as one of the last.

    Before its first checkpoint it begins anew, and its log is set aside.
    """
    names = [path.name for path in folder.rglob("*") if ".aside" not in path.name]
    return sorted(name for name in names if not name.startswith("step-"))


def _newest(folder: Path) -> Path:
    found: Iterable[Path] = folder.glob("checkpoints/step-*.safetensors")
    return max(found)
