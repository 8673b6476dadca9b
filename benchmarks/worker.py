"""One contestant of `benchmarks.step`, in a separate process: `worker.py FOLDER NAME`.

Peak memory and threads belong to a process, so each contestant needs one. FOLDER holds the files of
`shapes.store`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks import contestants, dispatching, harness, machine, shapes
from benchmarks.contestants import Contestant
from benchmarks.products import Light
from benchmarks.shapes import Shape

# Names beside those of the contestants: the judge, and the necessary matmuls alone.
JUDGE, LIGHT = "judge", "products"


class Worker:
    """A contestant, and the functions that answer its requests."""

    def __init__(self, shape: Shape, contestant: Contestant) -> None:
        self.shape, self.contestant = shape, contestant
        self.n_batches = len(shape.lengths) or 1  # in a run
        self._most: int | None = None  # peak bytes on a GPU, so far
        self._peak: int | None = None  # peak bytes on a GPU, in timed runs

    def outcome(self, path: str) -> dict[str, float]:
        """Return losses before and after some steps; write gradients, or the output, to `path`.

        On a device there are three steps: of captured steps the first runs op by op, the second is
        recorded, and the third replays the graph.
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
            loss_of_step = self.contestant.step()
            if self.shape.lengths:  # the gradients above are of one length alone
                losses[f"loss of step {n}"] = float(loss_of_step)
        self._give_back()
        after = self.contestant.gradients()[0]
        self._give_back()
        return losses | {"loss after steps": after}

    def run(self, work: str, repeats: int) -> list[float]:
        """Return the seconds of each of `repeats` consecutive runs of `work` (a method's name).

        On a GPU the memory pools are freed afterwards, for the other contestants. A first run,
        which is not timed, allocates them again.
        """
        if self.shape.device == "cuda":
            self._finish(work)
        seconds = harness.timed(lambda: self._finish(work), repeats)
        if self.shape.device == "cuda":
            self._peak = max(self._peak or 0, self.contestant.backend.memory().peak or 0)
        self._give_back()
        return seconds

    def about(self) -> dict[str, Any]:
        """Return threads and memory of the process, or of its GPU.

        "bytes": now; "most_bytes": the peak so far; "peak_bytes": the peak in timed runs.
        """
        in_use, peak = self.contestant.backend.memory()
        if self.shape.device == "cuda":
            in_use = machine.held()
        sizes = {"bytes": in_use, "most_bytes": peak if self._most is None else self._most}
        sizes["peak_bytes"] = peak if self._peak is None else self._peak
        return sizes | {"threads": machine.threads()}

    def dispatch(self, work: str) -> dict[str, float]:
        """Return the cost of dispatch in a run of `work`."""
        return dispatching.cost(lambda: self._finish(work))

    def _give_back(self) -> None:
        """On a GPU, free the memory pools for the other contestants."""
        if self.shape.device == "cuda":
            self._most = max(self._most or 0, self.contestant.backend.memory().peak or 0)
            machine.give_back()

    def _finish(self, work: str) -> Any:
        """Run `work` once for each batch of a cycle, and wait for the device."""
        for _ in range(self.n_batches):
            result = getattr(self.contestant, work)()
        self.contestant.backend.synchronize()
        return result


def answers(folder: Path, name: str) -> dict[str, Callable[..., Any]]:
    """Return the functions that answer the requests of the process `name`, by request."""
    shape, weights = shapes.load(folder)
    if name == LIGHT:
        light = Light(shape)
        run = lambda work, repeats: harness.timed(light.run, repeats)  # noqa: E731
        return {"run": run, "about": light.about}
    make = contestants.judge if name == JUDGE else partial(contestants.make, name)
    texts = list[str]()
    with harness.noting(texts):
        worker = Worker(shape, make(shape, weights))
    names = ("outcome", "run", "about", "dispatch")
    return harness.noted({name: getattr(worker, name) for name in names}, texts)


if __name__ == "__main__":
    harness.serve(answers(Path(sys.argv[1]), sys.argv[2]))
