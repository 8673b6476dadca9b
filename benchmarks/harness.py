"""Measuring: interleaved rounds, peak memory in a process of its own."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.shapes import Shape

K = TypeVar("K", bound=Hashable)

ROOT = Path(__file__).parents[1]
# Idle threads of BLAS and OpenMP spin for up to 30 ms, at the cost of whoever comes next.
SETTLE = 0.05  # seconds


def interleave(
    runs: dict[K, Callable[[], Any]], rounds: int, repeats: int, tick: Callable[[], Any]
) -> dict[K, list[float]]:
    """Seconds of each run, rounds * repeats of them; `tick` is called after each turn.

    In a round each run has one turn, so that all see the same disturbances, in an order drawn anew
    (a fixed cycle would give each always the same predecessor). A turn is `repeats` runs on end,
    as in a training loop: a short run alone would find threads asleep and caches cold. One round
    before the first warms up and is not counted. A run returns when its work is done; freeing what
    it returns is not timed.
    """
    seconds: dict[K, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0).shuffle
    for n in range(rounds + 1):
        order = list(runs)
        shuffle(order)
        for name in order:
            time.sleep(SETTLE)
            for _ in range(repeats):
                start = time.perf_counter()
                result = runs[name]()
                elapsed = time.perf_counter() - start
                del result
                if n:
                    seconds[name].append(elapsed)
            tick()
    return seconds


def summary(seconds: list[float], peer: list[float] | None) -> dict[str, float | None]:
    """Minimum and median in milliseconds, and the ratio of the minima to a peer's."""
    return {
        "min_ms": 1e3 * min(seconds),
        "median_ms": 1e3 * statistics.median(seconds),
        "ratio": None if peer is None else min(seconds) / min(peer),
    }


def peak_memory(shape: Shape, name: str) -> int | None:
    """Peak bytes of contestant `name` over two steps, imports included, in a fresh process.

    Of the process, or of the device's allocator (`Backend.memory`); None where nobody tells.
    """
    command = [sys.executable, "-m", "benchmarks.memory", shape.name, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {name} failed:\n{done.stderr}")
    peak = done.stdout.strip()
    return None if peak == "None" else int(peak)
