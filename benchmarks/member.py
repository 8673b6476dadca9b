"""One of the processes of `benchmarks.together`: mpiexec -n W python member.py SHAPE STEPS FLOATS.

Process 0 prints one line of JSON: the seconds of each training step and the last loss, then the
seconds of an exact sum over the processes, and of MPI's own, of an array of FLOATS numbers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import xformer as xf
from xformer.training import TrainConfig, Windows

MODELS = {
    "tiny": (xf.GPT(256, 4, 128, 4, 64), 12),
    "char-gpt": (xf.GPT(65, 6, 384, 6, 256), 6),
}
ACCUMULATE = 4  # batches a step, so that up to 4 processes can share them
WARM = 2  # steps that are not counted
CALLS = 7  # of a sum; the first is not counted


def main(shape: str, n_steps: str, n_floats: str) -> int:
    """Train, add, and print the times."""
    world = xf.world()
    model, batch = MODELS[shape]
    config = TrainConfig(WARM + int(n_steps), batch, accumulate=ACCUMULATE, eval_every=1 << 30)
    text = np.random.default_rng(0).integers(0, model.embed.vocab_size, 100_000)
    numpy = xf.backends.get("numpy")
    loss, first = xf.training.loss_of(model), xf.training.start(model.init(0), config)
    source = Windows(text, model.context, config.batch_size)
    options: Any = {"donate": True, "world": world}
    steps = xf.training.train(loss, first, source, config, numpy, **options)
    ends, losses = zip(*((time.perf_counter(), step.loss) for step in steps), strict=True)
    found = {"steps": np.diff(ends[WARM - 1 :]).tolist(), "loss": losses[-1]}
    x = np.ones(int(n_floats), np.float32)
    found["exact"] = list(_timed(lambda: world.all_reduce(x)))
    if world.size > 1:
        from mpi4py import MPI

        y = np.empty_like(x)
        found["engine"] = list(_timed(lambda: MPI.COMM_WORLD.Allreduce(x, y)))
    if world.rank == 0:
        print(json.dumps(found), flush=True)
    return 0


def _timed(fn: Callable[[], Any]) -> Iterator[float]:
    for i in range(CALLS):
        begun = time.perf_counter()
        fn()
        if i:
            yield time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
