"""The question of `benchmarks.gpu`: how long does a token of some texts take, side by side?

Each contestant is a process (`gpu_decoder.py`). Nothing is reported unless all write the same
texts, but where two logits are too close for float32 to tell.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, machine, shapes
from benchmarks.contestants import OURS_ON_GPU
from benchmarks.harness import Disagreement
from benchmarks.shapes import Shape

NEAR = 1e-5  # two logits so close may change places
FIRST = 5  # the id that the first text begins with; the others with those after it


def decoded(shape: Shape, names: Sequence[str], rounds: int, failed: list[str]) -> dict[str, Any]:
    """Time a step of all texts; Disagreement where a contestant writes others than the first.

    failed: there to say which contestants but the first did not come to be measured.
    """
    n, rows = shape.length, dict[str, Any]()
    vocab_size = shape.network.embed.vocab_size
    firsts = [(FIRST + i) % vocab_size for i in range(shape.batch)]
    asked = {"firsts": firsts, "n": n}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shapes.store(shape, folder)
        running, found = dict[str, Any](), dict[str, Any]()
        for name in names:
            try:
                one = stack.enter_context(start(name, folder))
                found[name] = one.ask(write=asked)["ids"]
            except RuntimeError as error:
                if name == names[0]:
                    raise
                failed.append(f"{shape.name}: {name}: {error}")
            else:
                running[name] = one
        same = {
            name: [
                agreement(name, first, own, peer, running.get(OURS_ON_GPU))
                for first, own, peer in zip(firsts, texts, found[names[0]], strict=True)
            ]
            for name, texts in found.items()
        }

        def turn(one: Any) -> list[float]:
            return [one.ask(write=asked)["seconds"] / n]

        turns = {name: partial(turn, one) for name, one in running.items()}
        seconds = harness.interleave(turns, rounds, lambda: None)
        for name, one in running.items():
            row = harness.summary(seconds[name], seconds[names[0]]) | one.ask(about={})
            rows[name] = row | {"same_ids": sum(same[name])}
    return {"texts": shape.batch, "length": n, "tokens": rows}


def agreement(name: str, first: int, own: list[int], peer: list[int], ours: Any) -> int:
    """How many ids of a text are the peer's. Disagreement unless all, or but for rounding.

    ours: who is asked how far apart two logits are; None where it has failed.
    """
    if own == peer:
        return len(own)
    pairs = enumerate(zip(own, peer, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:
        raise Disagreement(
            f"{name} writes another text than the peer: {len(own)} ids, not {len(peer)}"
        )
    pair = [own[at], peer[at]]
    asked = {"ids": [first, *peer[:at]], "pair": pair}
    gap = float("nan") if ours is None else ours.ask(gap=asked)["gap"]
    if not gap <= NEAR:
        raise Disagreement(
            f"{name} writes another text than the peer: id {at + 1} is {pair[0]}, not {pair[1]}, "
            f"and their logits are {gap:.1e} apart, allowed {NEAR:.0e}"
        )
    return at


def start(name: str, folder: Path) -> Any:
    """The process of a contestant."""
    command = [sys.executable, "-m", "benchmarks.gpu_decoder", folder, name]
    return harness.Process(name, command, machine.environment())
