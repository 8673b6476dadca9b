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
        self.truth.unlink()
        if self.wrong:
            raise Disagreement("\n".join(self.wrong))


def require_memory(running: Mapping[str, Any], limit: int | None) -> None:
    """MemoryError where what all processes hold, and one in its step, comes near the limit."""
    if limit is None:
        return
    found = {name: one.ask(about={}) for name, one in running.items()}
    sizes = {n: (a["bytes"], a["most_bytes"]) for n, a in found.items() if a["bytes"] is not None}
    held = sum(now for now, _ in sizes.values())
    more = max((peak - now for now, peak in sizes.values()), default=0)
    if held + more > limit:
        raise MemoryError(
            f"{', '.join(running)} together need {(held + more) / 1e9:.1f} GB, and there are "
            f"{limit / 1e9:.1f}; name fewer with --contestant"
        )


def measure(
    shape: Shape,
    names: Sequence[str],
    rounds: int,
    chosen: Sequence[str],
    tick: Callable[[], Any] = lambda: None,
    failed: list[str] | None = None,
) -> dict[str, Any]:
    """Check, then measure. Returns what the report prints and stores.

    failed: there to say which contestants but the first did not come to be measured; without it the
    first such is an error.
    """
    limit = machine.free_memory(shape.device)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shapes.store(shape, folder)
        check = Check(shape, folder)
        running: dict[str, Any] = {}
        rows: dict[str, dict[str, Any]] = {}
        light = stack.enter_context(start(LIGHT, folder))
        for name in names:
            try:
                one = stack.enter_context(start(name, folder))
                rows[name] = {"name": name, "error": check(name, one)}
            except RuntimeError as error:
                if failed is None or name == names[0]:
                    raise
                failed.append(f"{shape.name}: {name}: {error}")
                continue
            running[name] = one
            require_memory(running | {LIGHT: light}, limit)
            tick()
        check.finish()
        own = works(shape)[0]
        asked = {(name, work): one for name, one in running.items() for work in chosen}
        turns = {
            key: partial(one.ask, run={"work": WORKS[key[1]], "repeats": shape.repeats})
            for key, one in (asked | {(LIGHT, own): light}).items()
        }
        seconds = harness.interleave(turns, rounds, tick)
        products = _products(light.ask(about={})["flops"], seconds[LIGHT, own])
        for name, row in rows.items():
            row |= running[name].ask(about={})
            for work in chosen:
                row[work] = harness.summary(seconds[name, work], seconds.get((PEER, work)))
            if own in chosen:
                row |= _rates(shape, row[own]["min_ms"], products["min_ms"])
            if name.endswith("kernel"):
                row["dispatch"] = running[name].ask(dispatch={"work": WORKS[own]})
    return {
        "shape": shape.name,
        "model": shape.describe(),
        "dtype": shape.precision or "float32",
        "rounds": rounds,
        "repeats": shape.repeats,
        "tolerance": shape.tolerance,
        "judge": "torch eager" if contestants.why_not(PEER) is None else "numpy reference",
        "peer": PEER if PEER in rows else None,
        "work": own,
        "works": list(chosen),
        "products": products,
        "rows": list(rows.values()),
    }


def _products(flops: int, seconds: Sequence[float]) -> dict[str, float]:
    found = harness.summary(seconds, None)
    return {"gflop": flops / 1e9, "gflop_per_s": flops / 1e9 / min(seconds)} | found


def _rates(shape: Shape, step_ms: float, products_ms: float) -> dict[str, float]:
    """Tokens a second, and the speed of light: the products' share of the time."""
    tokens = shape.batch * shape.length
    return {"tokens_per_s": tokens / (1e-3 * step_ms), "light": products_ms / step_ms}


def ticks(names: Sequence[str], rounds: int, chosen: Sequence[str]) -> int:
    """How often `measure` calls `tick`."""
    return len(names) + (len(names) * len(chosen) + 1) * (rounds + 1)
