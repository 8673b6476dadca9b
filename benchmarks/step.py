"""The question: how long do forward, backward and a training step take, where and by whom?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks import contestants, harness
from benchmarks.contestants import PEER, Contestant
from benchmarks.shapes import Shape

WORKS = {"forward": "forward", "forward+backward": "backward", "step": "step"}


class Disagreement(AssertionError):
    """A contestant's results are wrong: its times mean nothing."""


class Outcome(NamedTuple):
    """What contestants are compared by."""

    loss: float
    grads: dict[str, np.ndarray]
    next_loss: float  # after a step of AdamW


def outcome(contestant: Contestant) -> Outcome:
    """Loss and gradients at the start, and the loss one step on."""
    loss, grads = contestant.gradients()
    contestant.step()
    return Outcome(loss, grads, contestant.gradients()[0])


def error(found: Outcome, truth: Outcome) -> tuple[float, str]:
    """The largest relative error of losses and gradients, and where it is."""
    if found.grads.keys() != truth.grads.keys():
        differ = ", ".join(sorted(found.grads.keys() ^ truth.grads.keys()))
        return np.inf, f"gradients that only one side has, {differ}"
    errors = {
        "loss": abs(found.loss / truth.loss - 1),
        "loss after a step": abs(found.next_loss / truth.next_loss - 1),
    }
    # A gradient that is zero by mathematics (a key's bias) is nothing but rounding of others'.
    floor = 1e-2 * max(_norm(g) for g in truth.grads.values())
    for name, right in truth.grads.items():
        got = found.grads[name]
        if got.shape != right.shape:
            return np.inf, f"gradient {name}, which must be {right.shape}, not {got.shape}"
        errors[f"gradient {name}"] = _norm(got - right) / max(_norm(right), floor)
    where = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return errors[where], where


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def check(shape: Shape, taking_part: dict[str, Contestant]) -> dict[str, dict[str, float]]:
    """Errors of each contestant against the float64 judge and against the peer.

    Raises Disagreement, naming all that are beyond the shape's tolerance.
    """
    truths = {"numpy float64": outcome(contestants.judge(shape))}
    found = {name: outcome(contestant) for name, contestant in taking_part.items()}
    if PEER in found:
        truths[PEER] = found[PEER]
    errors: dict[str, dict[str, float]] = {}
    wrong = []
    for name, theirs in found.items():
        errors[name] = {}
        for judge, truth in truths.items():
            if judge == name:
                continue
            errors[name][judge], where = error(theirs, truth)
            if not errors[name][judge] <= shape.tolerance:
                wrong.append(
                    f"{shape.name}: {name} is wrong in {where}: relative error "
                    f"{errors[name][judge]:.1e} to {judge}, allowed {shape.tolerance:.0e}"
                )
    if wrong:
        raise Disagreement("\n".join(wrong))
    return errors


def measure(
    shape: Shape,
    backend_names: Sequence[str],
    rounds: int,
    tick: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Check, then measure: times, and peak memory. Returns what the report prints and stores."""
    taking_part = {name: contestants.make(name, shape) for name in contestants.names(backend_names)}
    errors = check(shape, taking_part)
    rows: dict[str, dict[str, Any]] = {name: {"name": name} for name in taking_part}
    runs = {
        (name, work): partial(_finish, contestant, method)
        for name, contestant in taking_part.items()
        for work, method in WORKS.items()
    }
    seconds = harness.interleave(runs, rounds, shape.repeats, tick)
    for name, row in rows.items():
        for work in WORKS:
            row[work] = harness.summary(seconds[name, work], seconds.get((PEER, work)))
        row["tokens_per_s"] = shape.batch * shape.length / (1e-3 * row["step"]["min_ms"])
        row["peak_bytes"] = harness.peak_memory(shape, name)
        row["error"] = errors[name]
        tick()
    return {
        "shape": shape.name,
        "model": shape.describe(),
        "dtype": "float32",
        "rounds": rounds,
        "repeats": shape.repeats,
        "tolerance": shape.tolerance,
        "peer": PEER if PEER in rows else None,
        "rows": list(rows.values()),
    }


def ticks(backend_names: Sequence[str], rounds: int) -> int:
    """How often `measure` calls `tick`."""
    return len(contestants.names(backend_names)) * (len(WORKS) * (rounds + 1) + 1)


def _finish(contestant: Contestant, method: str) -> Any:
    result = getattr(contestant, method)()
    contestant.backend.synchronize()
    return result
