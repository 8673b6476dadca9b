"""A section of `benchmarks.gpu`: time per token of a batch of sequences, decoded greedily.

Each contestant is a process (`gpu_decoder.py`). All must write the same ids. Only ids after two
nearly equal logits (NEAR) may differ.
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

NEAR = 1e-5  # a smaller difference of two logits may be rounding in float32
FIRST = 5  # the first id of the first sequence; the next sequences begin with 6, 7, ...


def decoded(
    shape: Shape,
    names: Sequence[str],
    rounds: int,
    failed: list[str],
    keep: Callable[[dict[str, Any]], Any] = lambda result: None,
) -> dict[str, Any]:
    """Time a decoding step of all sequences by the contestants `names`. Returns the result.

    A contestant that runs out of memory is timed again without the others.

    failed: a line is appended for each contestant that could not be measured.
    keep: called with the result so far, whenever a time is added.
    Raises Disagreement if a contestant writes other ids than the first contestant.
    """
    with tempfile.TemporaryDirectory() as folder:
        shapes.store(shape, Path(folder))
        texts = Texts(shape, Path(folder), names, rounds, failed, keep)
        for name in texts.run(names):
            texts.run([name], alone=True)
    if not texts.rows:
        raise RuntimeError(f"{shape.name}: no contestant came to be measured")
    return texts.result()


class Texts:
    """The sequences that every contestant decodes, and the rows with their times."""

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
        vocab_size = shape.model.embed.vocab_size
        self.firsts = [(FIRST + i) % vocab_size for i in range(shape.batch)]
        self.asked = {"firsts": self.firsts, "n": shape.length}

    def result(self) -> dict[str, Any]:
        """Return the result so far, for the JSON and `gpu_page`."""
        rows = {name: self.rows[name] for name in self.names if name in self.rows}
        return {"texts": self.shape.batch, "length": self.shape.length, "tokens": rows}

    def run(self, names: Sequence[str], *, alone: bool = False) -> list[str]:
        """Compare the ids of the contestants `names`, and time them in interleaved rounds.

        alone: whether these contestants run without the others, after running out of memory.
        Returns the names of the contestants that ran out of memory.
        """
        running, out_of_memory, new = dict[str, Any](), list[str](), list[str]()

        def lost(name: str, error: Exception) -> None:
            if isinstance(error, harness.Stopped):
                raise error
            if isinstance(error, MemoryError) and not alone:
                out_of_memory.append(name)
                return
            why = "out of memory, alone too: " if isinstance(error, MemoryError) else ""
            self.failed.append(f"{self.shape.name}: {name}: {why}{error}")

        with ExitStack() as stack:
            for name in names:
                with ExitStack() as process:
                    try:
                        one = process.enter_context(start(name, self.folder))
                        self.written[name] = one.ask(write=self.asked)["ids"]
                    except (RuntimeError, MemoryError) as error:
                        lost(name, error)
                        continue
                    stack.push(process.pop_all())
                running[name] = one
                new.append(name)
            same = {name: self._agreement(name, running.get(OURS_ON_GPU)) for name in new}

            def seconds_per_token(one: Any) -> list[float]:
                return [one.ask(write=self.asked)["seconds"] / self.shape.length]

            def noted(name: str, seconds: dict[str, list[float]]) -> None:
                row = harness.summary(seconds[name], seconds.get(PEER) or None)
                row |= running[name].ask(about={}) | {"same_ids": sum(same[name])}
                if alone and PEER in self.rows:
                    row |= {"alone": True, "ratio": row["min_ms"] / self.rows[PEER]["min_ms"]}
                self.rows[name] = row
                self.keep(self.result())

            def dropped(name: str, error: Exception) -> list[str] | None:
                if not isinstance(error, RuntimeError | MemoryError):
                    return None
                lost(name, error)
                self.rows.pop(name, None)
                return [name]

            runs = {name: partial(seconds_per_token, one) for name, one in running.items()}
            options: Any = {"noted": noted, "dropped": dropped}
            seconds = harness.interleave(runs, self.rounds, lambda: None, **options)
            for name in seconds:
                noted(name, seconds)  # again: the peer's minimum is known only now
        return out_of_memory

    def _agreement(self, name: str, ours: Any) -> list[int]:
        """Return for each sequence how many leading ids equal the first contestant's ids."""
        peers = next(iter(self.written.values()))
        rows = zip(self.firsts, self.written[name], peers, strict=True)
        return [agreement(name, first, ids, peer, ours) for first, ids, peer in rows]


def agreement(name: str, first: int, ids: list[int], peer: list[int], ours: Any) -> int:
    """Return how many leading ids of a sequence equal the ids of the peer.

    name: the contestant that wrote `ids`   first: the id before `ids`
    ours: this library's process, for the difference of two logits. None if it has failed: then
        any two different ids raise Disagreement.
    Raises Disagreement if the logits of the first two different ids are not within NEAR, or if one
    sequence has fewer ids and the other begins with them.
    """
    if ids == peer:
        return len(ids)
    pairs = enumerate(zip(ids, peer, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:
        raise Disagreement(
            f"{name} and the peer write different texts: {len(ids)} ids, not {len(peer)}"
        )
    pair = [ids[at], peer[at]]
    request = {"ids": [first, *peer[:at]], "pair": pair}
    gap = float("nan") if ours is None else ours.ask(gap=request)["gap"]
    if not gap <= NEAR:
        raise Disagreement(
            f"{name} and the peer write different texts: id {at + 1} is {pair[0]}, not {pair[1]}, "
            f"and their logits are {gap:.1e} apart, allowed {NEAR:.0e}"
        )
    return at


def start(name: str, folder: Path) -> Any:
    """Start the process of the contestant `name` on the shape stored in `folder`."""
    command = [sys.executable, "-m", "benchmarks.gpu_decoder", folder, name]
    return harness.Process(name, command, machine.environment())
