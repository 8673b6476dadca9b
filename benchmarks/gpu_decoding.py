"""The question of `benchmarks.gpu`: how long does a token of some texts take, side by side?

Each contestant is a process (`gpu_decoder.py`). Nothing is reported unless all write the same
texts, but where two logits are too close for float32 to tell.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, machine, shapes
from benchmarks.contestants import OURS_ON_GPU, PEER
from benchmarks.harness import Disagreement
from benchmarks.shapes import Shape

NEAR = 1e-5  # two logits so close may change places
FIRST = 5  # the id that the first text begins with; the others with those after it


def decoded(
    shape: Shape,
    names: Sequence[str],
    rounds: int,
    failed: list[str],
    keep: Callable[[dict[str, Any]], Any] = lambda found: None,
) -> dict[str, Any]:
    """Time a step of all texts; Disagreement where a contestant writes others than the first.

    failed: there to say which contestants did not come to be measured, while the others go on. Who
    has too little memory has turns alone, after the others, and is named where that is too little
    too. keep: called with what was found so far, whenever there is more.
    """
    with tempfile.TemporaryDirectory() as folder:
        shapes.store(shape, Path(folder))
        texts = Texts(shape, Path(folder), names, rounds, failed, keep)
        for name in texts.run(names):
            texts.run([name], alone=True)
    if not texts.rows:
        raise RuntimeError(f"{shape.name}: no contestant came to be measured")
    return texts.found()


class Texts:
    """What is asked of every contestant."""

    def __init__(
        self,
        shape: Shape,
        folder: Path,
        names: Sequence[str],
        rounds: int,
        failed: list[str],
        keep: Callable[[dict[str, Any]], Any],
    ) -> None:
        self.shape, self.folder, self.names, self.rounds = shape, folder, names, rounds
        self.failed, self.keep = failed, keep
        self.rows: dict[str, dict[str, Any]] = {}
        self.written: dict[str, list[list[int]]] = {}  # ids, by name
        vocab_size = shape.network.embed.vocab_size
        self.firsts = [(FIRST + i) % vocab_size for i in range(shape.batch)]
        self.asked = {"firsts": self.firsts, "n": shape.length}

    def found(self) -> dict[str, Any]:
        """All of it, as the page prints it."""
        rows = {name: self.rows[name] for name in self.names if name in self.rows}
        return {"texts": self.shape.batch, "length": self.shape.length, "tokens": rows}

    def run(self, names: Sequence[str], *, alone: bool = False) -> list[str]:
        """Compare their texts, and give them turns; the names of those that want more memory."""
        running, later, new = dict[str, Any](), list[str](), list[str]()

        def lost(name: str, error: Exception) -> None:
            if isinstance(error, harness.Stopped):
                raise error
            if isinstance(error, MemoryError) and not alone:
                later.append(name)
                return
            why = "out of memory, alone too: " if isinstance(error, MemoryError) else ""
            self.failed.append(f"{self.shape.name}: {name}: {why}{error}")

        with ExitStack() as stack:
            for name in names:
                with ExitStack() as own:
                    try:
                        one = own.enter_context(start(name, self.folder))
                        self.written[name] = one.ask(write=self.asked)["ids"]
                    except (RuntimeError, MemoryError) as error:
                        lost(name, error)
                        continue
                    stack.push(own.pop_all())
                running[name] = one
                new.append(name)
            same = {name: self._agreement(name, running.get(OURS_ON_GPU)) for name in new}

            def turn(one: Any) -> list[float]:
                return [one.ask(write=self.asked)["seconds"] / self.shape.length]

            def noted(name: str, seconds: dict[str, list[float]]) -> None:
                row = harness.summary(seconds[name], seconds.get(PEER) or None)
                row |= running[name].ask(about={}) | {"same_ids": sum(same[name])}
                if alone and PEER in self.rows:
                    row |= {"alone": True, "ratio": row["min_ms"] / self.rows[PEER]["min_ms"]}
                self.rows[name] = row
                self.keep(self.found())

            def dropped(name: str, error: Exception) -> list[str] | None:
                if not isinstance(error, RuntimeError | MemoryError):
                    return None
                lost(name, error)
                self.rows.pop(name, None)
                return [name]

            turns = {name: partial(turn, one) for name, one in running.items()}
            options: Any = {"noted": noted, "dropped": dropped}
            seconds = harness.interleave(turns, self.rounds, lambda: None, **options)
            for name in seconds:
                noted(name, seconds)  # beside all of the peer's
        return later

    def _agreement(self, name: str, ours: Any) -> list[int]:
        """For each text, how many ids equal the first contestant's."""
        firsts = next(iter(self.written.values()))
        rows = zip(self.firsts, self.written[name], firsts, strict=True)
        return [agreement(name, first, own, peer, ours) for first, own, peer in rows]


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
