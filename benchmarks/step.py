"""The question: how long do forward, backward and a training step take, where and by whom?"""

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
    """What is measured unless something else is asked for."""
    return ("step",) if shape.training else ("forward",)


def start(name: str, folder: Path) -> harness.Process:
    """The process of a contestant, of the products alone, or of the judge."""
    command = [sys.executable, "-m", "benchmarks.worker", folder, name]
    return harness.Process(name, command, machine.environment())


def error(found: Path, truth: Path, losses: Mapping[str, float], true: Mapping[str, float]) -> Any:
    """The largest relative error of losses and of the arrays in two files, and where it is."""
    errors = {name: abs(losses[name] / true[name] - 1) for name in true}
    with safe_open(found, "np") as got, safe_open(truth, "np") as want:
        if differ := sorted(set(got.keys()) ^ set(want.keys())):
            return np.inf, f"arrays that only one side has, {', '.join(differ)}"
        # A gradient that is zero by mathematics (a key's bias) is nothing but rounding of others'.
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
    """Compares contestants with the judge, a process that has ended before they begin."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape, self.truth, self.found = shape, folder / "truth", folder / "found"
        self.wrong: list[str] = []
        with start(JUDGE, folder) as judge:
            self.true = judge.ask(outcome={"path": str(self.truth)})

    def __call__(self, name: str, one: Any) -> float | None:
        """The error of a contestant; what is beyond the tolerance is kept for `finish`.

        None where it computes something else than the judge, which is not compared.
        """
        losses = one.ask(outcome={"path": str(self.found)})
        if not contestants.is_judged(name, self.shape):
            self.found.unlink()
            return None
        found, where = error(self.found, self.truth, losses, self.true)
        self.found.unlink()
        if not found <= self.shape.tolerance:
            self.wrong.append(
                f"{self.shape.name}: {name} is wrong in {where}: relative error {found:.1e} to "
                f"float64, allowed {self.shape.tolerance:.0e}"
            )
        return found

    def finish(self) -> None:
        """Disagreement, naming all that are wrong."""
        if self.wrong:
            raise Disagreement("\n".join(self.wrong))


def measure(
    shape: Shape,
    names: Sequence[str],
    rounds: int,
    chosen: Sequence[str],
    tick: Callable[[], Any] = lambda: None,
    failed: list[str] | None = None,
    keep: Callable[[dict[str, Any]], Any] = lambda found: None,
) -> dict[str, Any]:
    """Check, then measure. Returns what the report prints and stores.

    Contestants have their turns together as far as they fit into memory; the others in further
    runs, beside the peer again, whose row is that of the first; on a device, where they have no
    room beside the peer either, alone. One too large for that is left out, by name; MemoryError
    where it is the first, or nobody is left. failed: there to say which contestants did not come to
    be measured, or are wrong, while the others go on; without it one such is an error. keep: called
    with what was found so far, whenever there is more.
    """
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(shape, Path(folder), names, rounds, chosen, tick, failed, keep)
        left = sorted(names, key=lambda name: name != PEER)  # which all others want beside them
        while left:
            left = turns.run([PEER, *left] if PEER in turns.rows else left, later=bool(turns.rows))
        for name in turns.alone:
            turns.run([name], later=False, alone=True)
    if not set(turns.rows) - {PEER} and turns.left_out:
        raise MemoryError("\n".join(turns.left_out))
    if not turns.rows:
        raise RuntimeError(f"{shape.name}: no contestant came to be measured")
    return turns.found()


class Turns:
    """What is asked of every contestant, in runs of as many as fit into memory."""

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
        self.left_out: list[str] = []  # who is too large, and how large
        self.alone: list[str] = []  # who has no room beside the peer
        self.rows: dict[str, dict[str, Any]] = {}
        self.runs: list[dict[str, Any]] = []
        shapes.store(shape, folder)
        self.check = Check(shape, folder)

    def found(self) -> dict[str, Any]:
        """All of it, as the report prints and stores it."""
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
        """Check those that fit into memory, and give them turns; the names of those left for later.

        Nobody has turns in a later run where nobody is left but the peer.
        """
        with ExitStack() as stack:
            limit = machine.free_memory(self.shape.device)
            light = None
            if not (alone and self.runs):  # whose products are those of the first run
                light = stack.enter_context(start(LIGHT, self.folder))
            running: dict[str, Any] = {} if light is None else {LIGHT: light}
            rows, left = [], list[str]()
            for name in names:
                if not has_room(running, limit, self.shape.device):
                    left.append(name)
                    continue
                with ExitStack() as own:
                    try:
                        one = own.enter_context(start(name, self.folder))
                        row = {"name": name, "error": self.check(name, one)}
                        require_memory(running | {name: one}, limit)
                    except (RuntimeError, MemoryError) as error:
                        self._failed(name, error, running, left, alone)
                        continue
                    if self.failed is not None and self.check.wrong:
                        self.failed.append(self.check.wrong.pop())
                        continue
                    stack.push(own.pop_all())
                running[name] = one
                rows.append(row | ({"alone": True} if alone else {}))
                self.tick()
            self.check.finish()
            running.pop(LIGHT, None)
            if running and not (later and is_alone(running)):
                self._measured(running, rows, light, left, alone)
        return left

    def _failed(
        self,
        name: str,
        error: Exception,
        running: Mapping[str, Any],
        left: list[str],
        alone: bool,
    ) -> None:
        """It is for later, is left out, or is named; or the error goes on."""
        others = set(running) - {LIGHT, PEER, name}
        if isinstance(error, harness.Stopped):
            raise error
        if not isinstance(error, MemoryError):
            if self.failed is None:
                raise error
            self.failed.append(f"{self.shape.name}: {name}: {error}")
        elif alone:
            self.left_out.append(f"{name}: out of memory, alone too: {error}")
        elif others:
            left.append(name)
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
        left: list[str],
        alone: bool,
    ) -> None:
        """Turns of all that run; each gets what was found into its row as it comes."""
        shape, chosen, own = self.shape, self.chosen, works(self.shape)[0]
        asked = {(name, work): one for name, one in running.items() for work in chosen}
        turns = {
            key: partial(one.ask, run={"work": WORKS[key[1]], "repeats": shape.repeats})
            for key, one in (asked | ({(LIGHT, own): light} if light else {})).items()
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
            self.keep(self.found())

        def dropped(key: tuple[str, str], error: Exception) -> list[tuple[str, str]] | None:
            name = key[0]
            if not isinstance(error, RuntimeError | MemoryError) or name == LIGHT:
                return None
            self._failed(name, error, running, left, alone)
            del running[name]
            run["contestants"].remove(name)
            if name != PEER or not self.runs[:-1]:
                self.rows.pop(name, None)
            return [(name, work) for work in chosen]

        seconds = harness.interleave(turns, self.rounds, self.tick, noted=noted, dropped=dropped)
        if self.runs[1:] and not set(running) - {PEER}:  # nobody was left beside the peer
            self.runs.pop()
            return
        for name, one in running.items():
            self._finish(by_name[name], one, seconds, run["products"])
        self.keep(self.found())

    def _finish(
        self,
        row: dict[str, Any],
        one: Any,
        seconds: Mapping[tuple[str, str], list[float]],
        products: dict[str, float],
    ) -> None:
        """What follows from all rounds, and what choosing kernels costs."""
        name, own = row["name"], works(self.shape)[0]
        for work in self.chosen:
            row[work] = harness.summary(seconds[name, work], seconds.get((PEER, work)))
        self._beside_the_first(row)
        if own in self.chosen:
            row |= _rates(self.shape, row[own]["min_ms"], products["min_ms"])
        if name.endswith("kernel"):
            row["dispatch"] = one.ask(dispatch={"work": WORKS[own]})
        self._add(name, row)

    def _add(self, name: str, row: dict[str, Any]) -> None:
        """The peer's row stays that of the first run."""
        if name != PEER or len(self.runs) == 1 or PEER not in self.rows:
            self.rows[name] = row

    def _beside_the_first(self, row: dict[str, Any]) -> None:
        """Ratios of one that ran alone, to the peer's time in the first run."""
        if row.get("alone") and PEER in self.rows:
            for work in self.chosen:
                least = self.rows[PEER][work]["min_ms"]
                row[work] = row[work] | {"ratio": row[work]["min_ms"] / least}


def _products(flops: int, seconds: Sequence[float]) -> dict[str, float]:
    found = harness.summary(seconds, None)
    return {"gflop": flops / 1e9, "gflop_per_s": flops / 1e9 / min(seconds)} | found


def _rates(shape: Shape, step_ms: float, products_ms: float) -> dict[str, float]:
    """Tokens a second, and the speed of light: the products' share of the time."""
    return {"tokens_per_s": shape.n_tokens / (1e-3 * step_ms), "light": products_ms / step_ms}


def ticks(names: Sequence[str], rounds: int, chosen: Sequence[str]) -> int:
    """How often `measure` calls `tick` where all fit into memory at once."""
    return len(names) + (len(names) * len(chosen) + 1) * (rounds + 1)
