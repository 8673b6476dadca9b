"""One contestant of `benchmarks.step`, in a process of its own: `worker.py FOLDER NAME`.

A process has one peak of memory and one set of threads, so each contestant has its own. FOLDER
holds what `shapes.store` wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks import contestants, dispatching, harness, machine, shapes
from benchmarks.contestants import Contestant
from benchmarks.products import Light
from benchmarks.shapes import Shape

# Beside the contestants: "judge", and the products alone.
JUDGE, LIGHT = "judge", "products"


class Worker:
    """A contestant, and the answers that it gives."""

    def __init__(self, shape: Shape, contestant: Contestant) -> None:
        self.shape, self.contestant = shape, contestant
        self.n_batches = len(shape.lengths) or 1  # of a run
        self._most: int | None = None  # bytes of a GPU, whatever was done
        self._peak: int | None = None  # in what was timed

    def outcome(self, path: str) -> dict[str, float]:
        """Losses before and after some steps; gradients are written to a file, or what comes out.

        On a device three of them: of captured steps the first is made as ever, the second recorded.
        """
        if not self.shape.training:
            save_file({"output": np.ascontiguousarray(self.contestant.output())}, path)
            return {}
        loss, grads = self.contestant.gradients()
        save_file({f"gradient {n}": np.ascontiguousarray(g) for n, g in grads.items()}, path)
        del grads
        self._give_back()
        losses = {"loss": loss}
        for n in range(self.n_batches if self.shape.device is None else 3):
            found = self.contestant.step()
            if self.shape.lengths:  # the gradients above are of one length alone
                losses[f"loss of step {n}"] = float(found)
        self._give_back()
        after = self.contestant.gradients()[0]
        self._give_back()
        return losses | {"loss after steps": after}

    def run(self, work: str, repeats: int) -> list[float]:
        """Seconds of each of several runs on end.

        On a GPU what is freed is given back afterwards, since others have their turn there, and one
        run that is not timed asks for it again.
        """
        if self.shape.device == "cuda":
            self._finish(work)
        found = harness.timed(lambda: self._finish(work), repeats)
        if self.shape.device == "cuda":
            self._peak = max(self._peak or 0, self.contestant.backend.memory().peak or 0)
        self._give_back()
        return found

    def about(self) -> dict[str, Any]:
        """Threads; memory of the process, or on its device: now, at most, and in what was timed."""
        in_use, peak = self.contestant.backend.memory()
        if self.shape.device == "cuda":
            in_use = machine.held()
        found = {"bytes": in_use, "most_bytes": peak if self._most is None else self._most}
        found["peak_bytes"] = peak if self._peak is None else self._peak
        return found | {"threads": machine.threads()}

    def dispatch(self, work: str) -> dict[str, float]:
        """What choosing kernels costs."""
        return dispatching.cost(lambda: self._finish(work))

    def _give_back(self) -> None:
        """The other contestants have their turns on the same GPU."""
        if self.shape.device == "cuda":
            self._most = max(self._most or 0, self.contestant.backend.memory().peak or 0)
            machine.give_back()

    def _finish(self, work: str) -> Any:
        """One run: of all batches of a cycle where lengths vary."""
        for _ in range(self.n_batches):
            result = getattr(self.contestant, work)()
        self.contestant.backend.synchronize()
        return result


def answers(folder: Path, name: str) -> dict[str, Callable[..., Any]]:
    """What a contestant can be asked, or the judge, or the products alone."""
    shape, weights = shapes.load(folder)
    if name == LIGHT:
        light = Light(shape)
        run = lambda work, repeats: harness.timed(light.run, repeats)  # noqa: E731
        return {"run": run, "about": light.about}
    make = contestants.judge if name == JUDGE else lambda *given: contestants.make(name, *given)
    texts = list[str]()
    with harness.noting(texts):
        worker = Worker(shape, make(shape, weights))
    names = ("outcome", "run", "about", "dispatch")
    return harness.noted({name: getattr(worker, name) for name in names}, texts)


if __name__ == "__main__":
    harness.serve(answers(Path(sys.argv[1]), sys.argv[2]))
