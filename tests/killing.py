"""Kill a training with SIGKILL, hundreds of times, and compare what comes of it bit for bit.

python tests/killing.py --folder DIR --kills 300 --seed 0
python tests/killing.py --folder DIR --kills 300 --seed 0 --finetune

Each kill ends a process of its own. Half of them come at a random moment; the others at a chosen
event: before or after a file is written, synchronised, renamed, removed or cut, and with half of
the file written. After each the run goes on from what lies in its folder.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import runs
import safetensors.numpy

from xformer.base import files


class Events:
    """Calls that change files are counted; at a chosen one the process kills itself."""

    def __init__(self, fatal: int | None) -> None:
        self.fatal, self.count = fatal, 0

    def happens(self) -> None:
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            self.happens()
            result = fn(*args, **options)
            self.happens()
            return result

        return wrapped

    def around_saving(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """With a moment at which half of the file is there."""

        def wrapped(arrays: Any, path: Path, **options: Any) -> None:
            self.happens()
            fn(arrays, path, **options)
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
            self.happens()
            path.write_bytes(whole)
            self.happens()

        return wrapped

    def install(self) -> None:
        stored = safetensors.numpy
        stored.save_file = self.around_saving(stored.save_file)
        files._sync = self.around(files._sync)
        for name in ("replace", "fsync"):
            setattr(os, name, self.around(getattr(os, name)))
        for name in ("unlink", "replace", "write_text", "mkdir"):
            setattr(Path, name, self.around(getattr(Path, name)))


def life(
    train: Callable[[Path], Any], folder: Path, fatal: int | None, seconds: float | None
) -> bool:
    """Whether a process that trains in the folder came to its end before it was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            Events(fatal).install()
            train(folder)
            status = 0
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if status:
        raise SystemExit(f"killing: a process failed in {folder}")
    return True


def main() -> int:
    """Print how many processes were killed, in how many runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--finetune", action="store_true", help="fine-tune, by adapters")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    train: Callable[[Path], Any] = runs.trained
    if args.finetune:
        from tunings import Tuning  # needs tokenizers

        train = Tuning("classify", args.folder / "base", adapters=True).train
    never, folder = args.folder / "never-killed", args.folder / "killed"
    begun = time.perf_counter()
    assert life(train, never, None, None)
    whole = time.perf_counter() - begun

    draw, killed, n_runs = random.Random(args.seed), 0, 0
    while killed < args.kills:
        shutil.rmtree(folder, ignore_errors=True)
        lives = 0
        while True:
            lives += 1
            at_event = draw.random() < 0.5
            fatal = draw.randint(1, 60) if at_event else None
            seconds = None if at_event else draw.uniform(0, whole / 2)
            # Towards the end none is killed, so that there is one.
            if life(train, folder, *((None, None) if lives > 12 else (fatal, seconds))):
                break
            killed += 1
        n_runs += 1
        runs.require_alike(folder, never)
    print(f"{killed} processes killed in {n_runs} runs, each bit for bit that which never was")
    return 0


if __name__ == "__main__":
    sys.exit(main())
