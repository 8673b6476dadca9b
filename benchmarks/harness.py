"""Processes that answer requests, and timing in interleaved rounds."""

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
# Idle threads of BLAS and OpenMP spin for up to 30 ms, and would slow down the next contestant.
SETTLE = 0.05  # seconds
READY = "ready"


class Disagreement(AssertionError):
    """A contestant's results are wrong, so its times mean nothing."""


class Ended(RuntimeError):
    """A contestant's process has ended."""


class Stopped(Ended):
    """A contestant's process was killed by `Process.stop`, since time was over."""


class OutOfMemory(Ended, MemoryError):
    """A contestant's process ran out of memory; it may fit after other processes have ended."""


# Messages and names of the out-of-memory errors of torch, CuPy, CUDA's libraries, JAX and Python.
_NO_MEMORY = re.compile(
    r"out of memory|out_of_memory|OutOfMemory|\bMemoryError|MemoryAllocation|ALLOC_FAILED"
    r"|RESOURCE_EXHAUSTED",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that the host or the device is out of memory.

    This is true of a MemoryError, and of an error whose type or message says so, as errors of
    torch, CuPy, CUDA's libraries and JAX do.
    """
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, MemoryError) or _NO_MEMORY.search(text) is not None


class Process:
    """A contestant's process, which answers requests in JSON (see `serve`).

    The constructor starts `command` in ROOT, with `env` added to the environment, and waits for
    READY. Raises Ended, with the process's error output, if the process ends instead.
    """

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
        """Send {name: arguments} and return the answer.

        Raises Ended, with the process's error output, if the process has ended: OutOfMemory if it
        ran out of memory, Stopped if `stop` killed it.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended: there is no answer to read
        line = self._line()
        if not line:
            raise self._ended(f"{self.name} ended")
        return json.loads(line)

    @classmethod
    def stop(cls) -> None:
        """Kill all running processes; an `ask` that waits for an answer raises Stopped."""
        for process in list(cls.running):
            process._stopped = True
            process._process.kill()

    def close(self) -> None:
        """Close the process's standard input, which ends it, and wait for its end."""
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
        """Return the exception for the ended process: `what`, its status, its error output."""
        self._process.communicate()
        self._errors.seek(0)
        status, error_output = self._process.returncode, self._errors.read()[-2000:]
        if self._stopped:
            return Stopped(f"{what}: it was stopped, time was over")
        why = " (killed, as the system does where memory is short)" if status == -9 else ""
        exception = OutOfMemory if why or _NO_MEMORY.search(error_output) else Ended
        return exception(f"{what}, exit status {status}{why}\n{error_output}")


def serve(answers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests from standard input until it ends; called in a contestant's process.

    A request `{"name": {arguments}}` is answered by answers[name](**arguments). The output of
    libraries is redirected to standard error, so that it is not read as an answer.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(READY, file=out, flush=True)
    for line in sys.stdin:
        ((name, arguments),) = json.loads(line).items()
        print(json.dumps(answers[name](**arguments)), file=out, flush=True)


@contextmanager
def noting(texts: list[str]) -> Iterator[None]:
    """Within this context, record RuntimeWarnings in `texts`, each text once.

    This library warns so if another kernel runs than the one that is measured. All warnings are
    shown after the context.
    """
    recorded = list[warnings.WarningMessage]()
    try:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always", RuntimeWarning)
            yield
    finally:
        messages = [str(w.message) for w in recorded if issubclass(w.category, RuntimeWarning)]
        texts += [text for text in dict.fromkeys(messages) if text not in texts]
        for w in recorded:
            warnings.showwarning(w.message, w.category, w.filename, w.lineno)


def noted(
    answers: Mapping[str, Callable[..., Any]], texts: list[str]
) -> dict[str, Callable[..., Any]]:
    """Return `answers` for `serve`, with each function's RuntimeWarnings recorded in `texts`.

    The answer of `about` also holds `texts`, as "warnings".
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
    """Return the seconds of each of `repeats` consecutive runs, without freeing their results."""
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
    """Call every function of `turns` once per round; return all their seconds by key.

    A turn times one contestant, and returns the seconds of one or several consecutive runs. Short
    runs need several: the first run after a pause has idle threads and cold caches. Rounds spread
    disturbances over all contestants. The order within a round is random, so that the predecessor
    varies. A first round warms up and is not counted.

    tick: called after each turn   noted: called after each counted turn, with all seconds so far
    dropped: called if a turn fails; returns the keys to remove, or None to raise the error.
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
                new_seconds = turns[name]()
            except Exception as error:
                if (keys := dropped(name, error)) is None:
                    raise
                gone.update(keys)
                continue
            if n:
                seconds[name] += new_seconds
                noted(name, seconds)
            tick()
    return {name: times for name, times in seconds.items() if name not in gone}


def summary(seconds: Sequence[float], peer: Sequence[float] | None) -> dict[str, float | None]:
    """Return minimum and median in milliseconds, and the minimum over the minimum of `peer`."""
    return {
        "min_ms": 1e3 * min(seconds),
        "median_ms": 1e3 * statistics.median(seconds),
        "ratio": None if peer is None else min(seconds) / min(peer),
    }
