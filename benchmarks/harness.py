"""Measuring: processes that answer requests, and interleaved rounds."""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakSet

K = TypeVar("K", bound=Hashable)

ROOT = Path(__file__).parents[1]
# Idle threads of BLAS and OpenMP spin for up to 30 ms, at the cost of whoever comes next.
SETTLE = 0.05  # seconds
READY = "ready"


class Disagreement(AssertionError):
    """A contestant's results are wrong: its times mean nothing."""


class Ended(RuntimeError):
    """A contestant's process is no more."""


class Stopped(Ended):
    """It was ended by `Process.stop`, since time was over."""


class OutOfMemory(Ended, MemoryError):
    """It ended for want of memory: it may have room when others are gone."""


# What torch, CuPy, CUDA's libraries and JAX say of a GPU's memory, and Python of the host's.
_NO_MEMORY = re.compile(
    r"out of memory|out_of_memory|OutOfMemory|\bMemoryError|MemoryAllocation|ALLOC_FAILED"
    r"|RESOURCE_EXHAUSTED",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of any library means out of memory."""
    said = f"{type(error).__name__}: {error}"
    return isinstance(error, MemoryError) or _NO_MEMORY.search(said) is not None


class Process:
    """A contestant's process, once it has said that it is ready: requests and answers in JSON."""

    running: ClassVar[WeakSet[Process]] = WeakSet()

    def __init__(self, name: str, command: Sequence[str | Path], env: Mapping[str, str]) -> None:
        self.name = name
        self._stopped = False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
        )
        self.running.add(self)
        if self._line() != READY:
            raise self._ended(f"{name} did not start: {' '.join(map(str, command))}")

    def ask(self, **request: Any) -> Any:
        """Its answer. Ended, with what it wrote to standard error, where it has ended.

        OutOfMemory where that was for want of memory, Stopped where `stop` has ended it.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and has no answer
        line = self._line()
        if not line:
            raise self._ended(f"{self.name} ended")
        return json.loads(line)

    @classmethod
    def stop(cls) -> None:
        """End all that run, whatever they do; who waits for an answer is told so."""
        for process in list(cls.running):
            process._stopped = True
            process._process.kill()

    def close(self) -> None:
        """The end of its input ends it."""
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def _ended(self, what: str) -> Ended:
        """How it ended, and the last of what it said."""
        self._process.communicate()
        self._errors.seek(0)
        status, said = self._process.returncode, self._errors.read()[-2000:]
        if self._stopped:
            return Stopped(f"{what}: it was stopped, time was over")
        why = " (killed, as the system does where memory is short)" if status == -9 else ""
        kind = OutOfMemory if why or _NO_MEMORY.search(said) else Ended
        return kind(f"{what}, exit status {status}{why}\n{said}")


def serve(answers: Mapping[str, Callable[..., Any]]) -> None:
    """A contestant's side: `{"name": {arguments}}` is answered by answers[name](**arguments).

    What libraries print goes to standard error, so that it is not taken for an answer.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(READY, file=out, flush=True)
    for line in sys.stdin:
        ((name, arguments),) = json.loads(line).items()
        print(json.dumps(answers[name](**arguments)), file=out, flush=True)


@contextmanager
def noting(texts: list[str]) -> Iterator[None]:
    """Within it every RuntimeWarning is added to `texts`, each text once; all are shown behind it.

    So this library says that it goes on with another kernel than the one that is measured.
    """
    recorded = list[warnings.WarningMessage]()
    try:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always", RuntimeWarning)
            yield
    finally:
        said = [str(w.message) for w in recorded if issubclass(w.category, RuntimeWarning)]
        texts += [text for text in dict.fromkeys(said) if text not in texts]
        for w in recorded:
            warnings.showwarning(w.message, w.category, w.filename, w.lineno)


def noted(
    answers: Mapping[str, Callable[..., Any]], texts: list[str]
) -> dict[str, Callable[..., Any]]:
    """Answers for `serve`, whose RuntimeWarnings are added to `texts`.

    `about` answers with them too, as "warnings".
    """

    def wrapped(answer: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            with noting(texts):
                return answer(*arguments, **named)

        return watched

    watched = {name: wrapped(answer) for name, answer in answers.items()}
    about = watched["about"]
    return watched | {"about": lambda: about() | {"warnings": list(texts)}}


def timed(run: Callable[[], Any], repeats: int = 1) -> list[float]:
    """Seconds of each of `repeats` runs on end. Freeing what a run returns is not timed."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
        del result
    return seconds


def interleave(
    turns: dict[K, Callable[[], list[float]]],
    rounds: int,
    tick: Callable[[], Any],
    *,
    noted: Callable[[K, dict[K, list[float]]], Any] = lambda key, seconds: None,
    dropped: Callable[[K, Exception], Sequence[K] | None] = lambda key, error: None,
) -> dict[K, list[float]]:
    """Seconds of the runs of each turn in all rounds; `tick` is called after each turn.

    In a round each has one turn, so that all see the same disturbances, in an order drawn anew (a
    fixed cycle would give each always the same predecessor). A turn is several runs on end where
    they are short, as in a training loop: one alone would find threads asleep and caches cold. One
    round before the first warms up and is not counted.

    noted: called after each turn that is counted, with all seconds so far. dropped: asked where a
    turn fails; it returns the keys that have no further turns, or None, and the error goes on.
    """
    seconds: dict[K, list[float]] = {name: [] for name in turns}
    shuffle = random.Random(0).shuffle
    gone = set[K]()
    for n in range(rounds + 1):
        order = [name for name in turns if name not in gone]
        shuffle(order)
        for name in order:
            if name in gone:
                continue
            time.sleep(SETTLE)
            try:
                found = turns[name]()
            except Exception as error:
                if (keys := dropped(name, error)) is None:
                    raise
                gone.update(keys)
                continue
            if n:
                seconds[name] += found
                noted(name, seconds)
            tick()
    return {name: found for name, found in seconds.items() if name not in gone}


def summary(seconds: Sequence[float], peer: Sequence[float] | None) -> dict[str, float | None]:
    """Minimum and median in milliseconds, and the ratio of the minima to a peer's."""
    return {
        "min_ms": 1e3 * min(seconds),
        "median_ms": 1e3 * statistics.median(seconds),
        "ratio": None if peer is None else min(seconds) / min(peer),
    }
