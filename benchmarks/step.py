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

    def __call__(self, name: str, one: Any) -> float:
        """The error of a contestant; what is beyond the tolerance is kept for `finish`."""
        losses = one.ask(outcome={"path": str(self.found)})
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
) -> dict[str, Any]:
    """Check, then measure. Returns what the report prints and stores.

    Contestants have their turns together as far as they fit into memory; the others in further
    runs, beside the peer again, whose row is that of the first. One too large for that is left out,
    by name; MemoryError where it is the first, or nobody is left. failed: there to say which
    contestants but the first did not come to be measured; without it one such is an error.
    """
    rows: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(shape, Path(folder), names[0], rounds, chosen, tick, failed)
        left = sorted(names, key=lambda name: name != PEER)  # which all others want beside them
        while left:
            found, left = turns.run([PEER, *left] if PEER in rows else left, later=bool(rows))
            if found is not None:
                rows = {row["name"]: row for row in found.pop("rows")} | rows
                runs.append(found)
    if not set(rows) - {PEER} and turns.left_out:
        raise MemoryError("\n".join(turns.left_out))
    return {
        "shape": shape.name,
        "model": shape.describe(),
        "dtype": shape.precision or "float32",
        "rounds": rounds,
        "repeats": shape.repeats,
        "tolerance": shape.tolerance,
        "judge": "torch eager" if contestants.why_not(PEER) is None else "numpy reference",
        "peer": PEER if PEER in rows else None,
        "work": works(shape)[0],
        "works": list(chosen),
        "products": runs[0]["products"],
        "runs": runs,
        "left_out": turns.left_out,
        "rows": [rows[name] for name in names if name in rows],
    }


class Turns:
    """What is asked of every contestant, in runs of as many as fit into memory."""

    def __init__(
        self,
        shape: Shape,
        folder: Path,
        first: str,
        rounds: int,
        chosen: Sequence[str],
        tick: Callable[[], Any],
        failed: list[str] | None,
    ) -> None:
        self.shape, self.folder, self.first, self.rounds = shape, folder, first, rounds
        self.chosen, self.tick, self.failed = chosen, tick, failed
        self.left_out: list[str] = []  # who is too large, and how large
        shapes.store(shape, folder)
        self.check = Check(shape, folder)

    def run(self, names: Sequence[str], *, later: bool) -> tuple[dict[str, Any] | None, list[str]]:
        """What was found of those that fit into memory, and the names of those left for later.

        None of a later run where nobody is left but the peer.
        """
        with ExitStack() as stack:
            limit = machine.free_memory(self.shape.device)
            light = stack.enter_context(start(LIGHT, self.folder))
            running: dict[str, Any] = {LIGHT: light}
            rows, left = [], []
            for name in names:
                if not has_room(running, limit, self.shape.device):
                    left.append(name)
                    continue
                with ExitStack() as own:
                    try:
                        one = own.enter_context(start(name, self.folder))
                        row = {"name": name, "error": self.check(name, one)}
                        require_memory(running | {name: one}, limit)
                    except MemoryError as error:
                        self._does_not_fit(name, error, running, left)
                        continue
                    except RuntimeError as error:
                        if self.failed is None or name == self.first:
                            raise
                        self.failed.append(f"{self.shape.name}: {name}: {error}")
                        continue
                    stack.push(own.pop_all())
                running[name] = one
                rows.append(row)
                self.tick()
            self.check.finish()
            if later and is_alone(running):
                return None, left
            del running[LIGHT]
            return self._measured(running, rows, light), left

    def _does_not_fit(
        self, name: str, error: MemoryError, running: Mapping[str, Any], left: list[str]
    ) -> None:
        """It is for later, or too large beside nobody but the peer."""
        if not is_alone(running):
            left.append(name)
        elif name == self.first:
            raise error
        else:
            self.left_out.append(f"{name}: {error}")

    def _measured(
        self, running: Mapping[str, Any], rows: list[dict[str, Any]], light: Any
    ) -> dict[str, Any]:
        """Turns of all that run; each gets what was found into its row."""
        shape, chosen, own = self.shape, self.chosen, works(self.shape)[0]
        asked = {(name, work): one for name, one in running.items() for work in chosen}
        turns = {
            key: partial(one.ask, run={"work": WORKS[key[1]], "repeats": shape.repeats})
            for key, one in (asked | {(LIGHT, own): light}).items()
        }
        seconds = harness.interleave(turns, self.rounds, self.tick)
        products = _products(light.ask(about={})["flops"], seconds[LIGHT, own])
        for row in rows:
            name = row["name"]
            row |= running[name].ask(about={})
            for work in chosen:
                row[work] = harness.summary(seconds[name, work], seconds.get((PEER, work)))
            if own in chosen:
                row |= _rates(shape, row[own]["min_ms"], products["min_ms"])
            if name.endswith("kernel"):
                row["dispatch"] = running[name].ask(dispatch={"work": WORKS[own]})
        peers = (
            {work: harness.summary(seconds[PEER, work], None) for work in chosen}
            if PEER in running
            else None
        )
        return {"contestants": list(running), "peer": peers, "products": products, "rows": rows}


SPARE = 2  # times what the first takes: about as much as one that keeps every score


def has_room(running: Mapping[str, Any], limit: int | None, device: str | None) -> bool:
    """Whether one more may be started: where memory is short the system ends whom it likes.

    One beside the peer may be; and on a device, where a process that gets no memory says so.
    """
    if limit is None or device is not None or is_alone(running):
        return True
    first = next(one for name, one in running.items() if name != LIGHT)
    return memory(running)[0] + SPARE * sum(memory({"first": first})) <= limit


def is_alone(running: Mapping[str, Any]) -> bool:
    """Whether there is nobody yet but the peer."""
    return not set(running) - {LIGHT, PEER}


def require_memory(running: Mapping[str, Any], limit: int | None) -> None:
    """MemoryError where what all processes hold, and one in its step, comes near the limit."""
    needed = sum(memory(running))
    if limit is not None and needed > limit:
        raise MemoryError(
            f"{', '.join(running)} together need {needed / 1e9:.1f} GB, and there are "
            f"{limit / 1e9:.1f}; name fewer with --contestant"
        )


def memory(running: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes that all processes hold, and the most that one of them takes beside that in a step."""
    found = [one.ask(about={}) for one in running.values()]
    sizes = [(a["bytes"], a["most_bytes"]) for a in found if a["bytes"] is not None]
    return sum(now for now, _ in sizes), max((peak - now for now, peak in sizes), default=0)


def _products(flops: int, seconds: Sequence[float]) -> dict[str, float]:
    found = harness.summary(seconds, None)
    return {"gflop": flops / 1e9, "gflop_per_s": flops / 1e9 / min(seconds)} | found


def _rates(shape: Shape, step_ms: float, products_ms: float) -> dict[str, float]:
    """Tokens a second, and the speed of light: the products' share of the time."""
    tokens = shape.batch * shape.length
    return {"tokens_per_s": tokens / (1e-3 * step_ms), "light": products_ms / step_ms}


def ticks(names: Sequence[str], rounds: int, chosen: Sequence[str]) -> int:
    """How often `measure` calls `tick` where all fit into memory at once."""
    return len(names) + (len(names) * len(chosen) + 1) * (rounds + 1)
