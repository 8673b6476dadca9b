"""Time forward, backward and a training step of a shape, by several contestants."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from benchmarks import contestants, harness, machine, shapes
from benchmarks.contestants import PEER
from benchmarks.fitting import has_room, is_alone, require_memory
from benchmarks.harness import Disagreement
from benchmarks.shapes import Shape
from benchmarks.worker import JUDGE, LIGHT

WORKS = {"forward": "forward", "forward+backward": "backward", "step": "step"}


def works(shape: Shape) -> tuple[str, ...]:
    """Return the works that are measured by default."""
    return ("step",) if shape.training else ("forward",)


def start(name: str, folder: Path) -> harness.Process:
    """Start a worker process and return it.

    name: a contestant; JUDGE, the model in float64 that all must agree with; or LIGHT, which runs
        only the necessary matmuls
    folder: shape and weights, written by `shapes.store`
    """
    command = [sys.executable, "-m", "benchmarks.worker", folder, name]
    return harness.Process(name, command, machine.environment())


def error(path: Path, truth: Path, losses: Mapping[str, float], true: Mapping[str, float]) -> Any:
    """Return the largest relative error of a loss or an array, and its name.

    path, truth: files with a contestant's and the judge's arrays   losses, true: their losses.
    """
    errors = {name: abs(losses[name] / true[name] - 1) for name in true}
    with safe_open(path, "np") as got, safe_open(truth, "np") as want:
        if differ := sorted(set(got.keys()) ^ set(want.keys())):
            return np.inf, f"arrays that only one side has, {', '.join(differ)}"
        # A gradient that is exactly zero in theory (a key's bias) is rounding noise in practice.
        norms = {name: _norm(want.get_tensor(name)) for name in want.keys()}  # noqa: SIM118
        floor = 1e-2 * max(norms.values())
        for name, norm in norms.items():
            a, b = got.get_tensor(name), want.get_tensor(name)
            if a.shape != b.shape:
                return np.inf, f"{name}, which must be {b.shape}, not {a.shape}"
            errors[name] = _norm(a - b) / max(norm, floor)
    where = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return errors[where], where


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


class Check:
    """Compare contestants with the judge, which computes in float64.

    The constructor runs the judge once; the judge's process has then ended. Call
    check(name, process) for each contestant, then finish(), which raises Disagreement if one was
    wrong.

    folder: has the files of `shapes.store`. The arrays of the judge and of the contestants are
        written there.
    """

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape, self.truth, self.outcome = shape, folder / "truth", folder / "outcome"
        self.wrong: list[str] = []
        with start(JUDGE, folder) as judge:
            self.true = judge.ask(outcome={"path": str(self.truth)})

    def __call__(self, name: str, one: Any) -> float | None:
        """Return the largest relative error of the contestant `name`, whose process is `one`.

        None: not compared, because the contestant draws other dropout masks than the judge. If the
        error is above the shape's tolerance, a message is added to `wrong`, which `finish` raises.
        """
        losses = one.ask(outcome={"path": str(self.outcome)})
        if not contestants.is_judged(name, self.shape):
            self.outcome.unlink()
            return None
        off, where = error(self.outcome, self.truth, losses, self.true)
        self.outcome.unlink()
        if not off <= self.shape.tolerance:
            self.wrong.append(
                f"{self.shape.name}: {name} is wrong in {where}: relative error {off:.1e} to "
                f"float64, allowed {self.shape.tolerance:.0e}"
            )
        return off

    def finish(self) -> None:
        """Raise Disagreement, with a line for each wrong contestant, if there are any."""
        if self.wrong:
            raise Disagreement("\n".join(self.wrong))


def measure(
    shape: Shape,
    names: Sequence[str],
    rounds: int,
    chosen: Sequence[str],
    tick: Callable[[], Any] = lambda: None,
    failed: list[str] | None = None,
    keep: Callable[[dict[str, Any]], Any] = lambda result: None,
) -> dict[str, Any]:
    """Compare the contestants `names` with the judge, then time the works `chosen`.

    A run times, in interleaved rounds, all contestants that fit into memory together. The others
    follow in further runs, each beside the peer; the peer's row is that of the first run. On a
    device, a contestant that does not fit beside the peer is timed alone. One that does not fit
    alone is named in "left_out".

    tick: called after each check and each timed run
    failed: a line is appended for each contestant that fails or is wrong, and the others continue;
    if None, a failure is raised
    keep: called with the result so far, whenever a time is added.
    Returns the result for report and JSON. Raises MemoryError if the first contestant does not fit,
    or none but the peer does.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(shape, Path(folder), names, rounds, chosen, tick, failed, keep)
        waiting = sorted(names, key=lambda name: name != PEER)  # each run needs the peer
        while waiting:
            has_peer = PEER in runs.rows
            waiting = runs.run([PEER, *waiting] if has_peer else waiting, later=bool(runs.rows))
        for name in runs.alone:
            runs.run([name], later=False, alone=True)
    if not set(runs.rows) - {PEER} and runs.left_out:
        raise MemoryError("\n".join(runs.left_out))
    if not runs.rows:
        raise RuntimeError(f"{shape.name}: no contestant came to be measured")
    return runs.result()


class Runs:
    """The runs of a shape, each with all contestants that fit into memory, and their rows.

    Arguments as of `measure`; folder: for the shape's files and the contestants' outcomes.
    """

    def __init__(
        self,
        shape: Shape,
        folder: Path,
        names: Sequence[str],
        rounds: int,
        chosen: Sequence[str],
        tick: Callable[[], Any],
        failed: list[str] | None,
        keep: Callable[[dict[str, Any]], Any],
    ) -> None:
        self.shape, self.folder, self.names, self.rounds = shape, folder, names, rounds
        self.chosen, self.tick, self.failed, self.keep = chosen, tick, failed, keep
        self.left_out: list[str] = []  # a line for each contestant that does not fit
        self.alone: list[str] = []  # contestants that do not fit beside the peer
        self.rows: dict[str, dict[str, Any]] = {}
        self.runs: list[dict[str, Any]] = []
        shapes.store(shape, folder)
        self.check = Check(shape, folder)

    def result(self) -> dict[str, Any]:
        """Return the result so far, for report and JSON."""
        shape, rows = self.shape, self.rows
        return {
            "shape": shape.name,
            "model": shape.describe(),
            "dtype": shape.precision or "float32",
            "rounds": self.rounds,
            "repeats": shape.repeats,
            "tolerance": shape.tolerance,
            "judge": contestants.judge_of(shape),
            "peer": PEER if PEER in rows else None,
            "work": works(shape)[0],
            "works": list(self.chosen),
            "products": self.runs[0]["products"],
            "runs": self.runs,
            "left_out": self.left_out,
            "rows": [rows[name] for name in self.names if name in rows],
        }

    def run(self, names: Sequence[str], *, later: bool, alone: bool = False) -> list[str]:
        """Check and time those of `names` that fit into memory; return the names of the others.

        later: whether this is a later run, which is skipped if only the peer is running
        alone: whether `names` is one contestant that does not fit beside the peer.
        """
        with ExitStack() as stack:
            limit = machine.free_memory(self.shape.device)
            light = None
            if not (alone and self.runs):  # then the matmuls were timed in the first run
                light = stack.enter_context(start(LIGHT, self.folder))
            running: dict[str, Any] = {} if light is None else {LIGHT: light}
            rows, waiting = [], list[str]()
            for name in names:
                if not has_room(running, limit, self.shape.device):
                    waiting.append(name)
                    continue
                with ExitStack() as process:
                    try:
                        one = process.enter_context(start(name, self.folder))
                        row = {"name": name, "error": self.check(name, one)}
                        require_memory(running | {name: one}, limit)
                    except (RuntimeError, MemoryError) as error:
                        self._failed(name, error, running, waiting, alone)
                        continue
                    if self.failed is not None and self.check.wrong:
                        self.failed.append(self.check.wrong.pop())
                        continue
                    stack.push(process.pop_all())
                running[name] = one
                rows.append(row | ({"alone": True} if alone else {}))
                self.tick()
            self.check.finish()
            running.pop(LIGHT, None)
            if running and not (later and is_alone(running)):
                self._measured(running, rows, light, waiting, alone)
        return waiting

    def _failed(
        self,
        name: str,
        error: Exception,
        running: Mapping[str, Any],
        waiting: list[str],
        alone: bool,
    ) -> None:
        """Handle the error of a contestant beside the processes of `running`.

        Out of memory: its name is added to `waiting` for a later run, to `alone`, or to `left_out`.
        Another error is added to `failed`. Raises `error` if `measure` must raise it.
        """
        others_running = set(running) - {LIGHT, PEER, name}
        if isinstance(error, harness.Stopped):
            raise error
        if not isinstance(error, MemoryError):
            if self.failed is None:
                raise error
            self.failed.append(f"{self.shape.name}: {name}: {error}")
        elif alone:
            self.left_out.append(f"{name}: out of memory, alone too: {error}")
        elif others_running:
            waiting.append(name)
        elif self.shape.device is not None:
            self.alone.append(name)
        elif name == self.names[0]:
            raise error
        else:
            self.left_out.append(f"{name}: {error}")

    def _measured(
        self,
        running: dict[str, Any],
        rows: list[dict[str, Any]],
        light: Any,
        waiting: list[str],
        alone: bool,
    ) -> None:
        """Time all contestants of `running` in interleaved rounds; write times into `rows`.

        light: the process of the matmuls, or None   waiting: gets names for a later run.
        """
        shape, chosen, default = self.shape, self.chosen, works(self.shape)[0]
        processes = {(name, work): one for name, one in running.items() for work in chosen}
        turns = {
            key: partial(one.ask, run={"work": WORKS[key[1]], "repeats": shape.repeats})
            for key, one in (processes | ({(LIGHT, default): light} if light else {})).items()
        }
        by_name = {row["name"]: row for row in rows}
        run: dict[str, Any] = {"contestants": list(running), "peer": None}
        run["products"] = None if light else self.runs[0]["products"]
        flops = light.ask(about={})["flops"] if light else 0
        self.runs.append(run)

        def noted(key: tuple[str, str], seconds: dict[Any, list[float]]) -> None:
            name, work = key
            if name == LIGHT:
                run["products"] = _products(flops, seconds[key])
            else:
                row = by_name[name]
                row |= running[name].ask(about={})
                row[work] = harness.summary(seconds[key], seconds.get((PEER, work)) or None)
                self._add(name, row)
            if PEER in running:
                run["peer"] = {
                    w: harness.summary(seconds[PEER, w], None)
                    for w in chosen
                    if seconds.get((PEER, w))
                }
            self.keep(self.result())

        def dropped(key: tuple[str, str], error: Exception) -> list[tuple[str, str]] | None:
            name = key[0]
            if not isinstance(error, RuntimeError | MemoryError) or name == LIGHT:
                return None
            self._failed(name, error, running, waiting, alone)
            del running[name]
            run["contestants"].remove(name)
            if name != PEER or not self.runs[:-1]:
                self.rows.pop(name, None)
            return [(name, work) for work in chosen]

        seconds = harness.interleave(turns, self.rounds, self.tick, noted=noted, dropped=dropped)
        if self.runs[1:] and not set(running) - {PEER}:  # all contestants but the peer failed
            self.runs.pop()
            return
        for name, one in running.items():
            self._finish(by_name[name], one, seconds, run["products"])
        self.keep(self.result())

    def _finish(
        self,
        row: dict[str, Any],
        one: Any,
        seconds: Mapping[tuple[str, str], list[float]],
        products: dict[str, float],
    ) -> None:
        """Write the final times, the rates and the cost of dispatch into `row`.

        seconds: of all contestants and works   products: the summary of the matmuls alone.
        """
        name, default = row["name"], works(self.shape)[0]
        for work in self.chosen:
            row[work] = harness.summary(seconds[name, work], seconds.get((PEER, work)))
        self._beside_the_first(row)
        if default in self.chosen:
            row |= _rates(self.shape, row[default]["min_ms"], products["min_ms"])
        if name.endswith("kernel"):
            row["dispatch"] = one.ask(dispatch={"work": WORKS[default]})
        self._add(name, row)

    def _add(self, name: str, row: dict[str, Any]) -> None:
        """Store a contestant's row; the peer's row is that of the first run."""
        if name != PEER or len(self.runs) == 1 or PEER not in self.rows:
            self.rows[name] = row

    def _beside_the_first(self, row: dict[str, Any]) -> None:
        """Write the ratios of a contestant that ran alone to the peer's times in the first run."""
        if row.get("alone") and PEER in self.rows:
            for work in self.chosen:
                least = self.rows[PEER][work]["min_ms"]
                row[work] = row[work] | {"ratio": row[work]["min_ms"] / least}


def _products(flops: int, seconds: Sequence[float]) -> dict[str, float]:
    times = harness.summary(seconds, None)
    return {"gflop": flops / 1e9, "gflop_per_s": flops / 1e9 / min(seconds)} | times


def _rates(shape: Shape, step_ms: float, products_ms: float) -> dict[str, float]:
    """Return the tokens per second, and the speed of light: the matmuls' share of the time."""
    return {"tokens_per_s": shape.n_tokens / (1e-3 * step_ms), "light": products_ms / step_ms}


def ticks(names: Sequence[str], rounds: int, chosen: Sequence[str]) -> int:
    """Return how often `measure` calls `tick` if all contestants fit into memory together."""
    return len(names) + (len(names) * len(chosen) + 1) * (rounds + 1)
