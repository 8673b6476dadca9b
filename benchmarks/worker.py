"""One contestant of `benchmarks.step`, in a process of its own: `worker.py FOLDER NAME`.

A process has one peak of memory and one set of threads, so each contestant has its own. FOLDER
holds what `shapes.store` wrote.
"""

from __future__ import annotations

import sys
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
        self._peak: int | None = None  # bytes

    def outcome(self, path: str) -> dict[str, float]:
        """Losses before and after a step; gradients are written to a file, or what comes out."""
        if not self.shape.training:
            save_file({"output": np.ascontiguousarray(self.contestant.output())}, path)
            return {}
        loss, grads = self.contestant.gradients()
        save_file({f"gradient {n}": np.ascontiguousarray(g) for n, g in grads.items()}, path)
        del grads
        self.contestant.step()
        return {"loss": loss, "loss after a step": self.contestant.gradients()[0]}

    def run(self, work: str, repeats: int) -> list[float]:
        """Seconds of each of several runs on end.

        On a GPU what is freed is given back afterwards, since others have their turn there, and one
        run that is not timed asks for it again.
        """
        on_gpu = self.shape.device == "cuda"
        if on_gpu:
            self._finish(work)
        found = harness.timed(lambda: self._finish(work), repeats)
        if on_gpu:
            self.about()
            machine.give_back()
        return found

    def about(self) -> dict[str, Any]:
        """Memory of the process, or on its device: now, and the most so far; threads."""
        in_use, peak = self.contestant.backend.memory()
        if peak is not None:
            self._peak = max(self._peak or 0, peak)
        return {"bytes": in_use, "peak_bytes": self._peak, "threads": machine.threads()}

    def dispatch(self, work: str) -> dict[str, float]:
        """What choosing kernels costs."""
        return dispatching.cost(lambda: self._finish(work))

    def _finish(self, work: str) -> Any:
        result = getattr(self.contestant, work)()
        self.contestant.backend.synchronize()
        return result


def main(folder: str, name: str) -> None:
    """Answer until standard input ends."""
    shape, weights = shapes.load(Path(folder))
    if name == LIGHT:
        light = Light(shape)
        harness.serve(
            {
                "run": lambda work, repeats: harness.timed(light.run, repeats),
                "about": lambda: {"flops": light.flops},
            }
        )
        return
    make = contestants.judge if name == JUDGE else lambda *given: contestants.make(name, *given)
    worker = Worker(shape, make(shape, weights))
    del weights  # those that the contestant needs it has
    names = ("outcome", "run", "about", "dispatch")
    harness.serve({name: getattr(worker, name) for name in names})


if __name__ == "__main__":
    main(*sys.argv[1:])
