"""The cost of dispatch: time in an op's call before its kernel or reference runs."""

from __future__ import annotations

import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from xformer.dispatch import Kernel, Overridable

RUNS, REPEATS = 200, 10


def cost(run: Callable[[], Any]) -> dict[str, float]:
    """Return the number of op calls in `run`, and the seconds that dispatch takes in all of them.

    Each op is timed again with the arguments of its first call and with kernels that do nothing.
    The remaining time is that of checking arguments and choosing a kernel.
    """
    calls: Counter[Overridable[..., Any]] = Counter()
    first: dict[Overridable[..., Any], tuple[Any, Any]] = {}
    call = Overridable.__call__

    def recorded(op: Overridable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls[op] += 1
        first.setdefault(op, (args, kwargs))
        return call(op, *args, **kwargs)

    with mock.patch.object(Overridable, "__call__", recorded):
        run()
    seconds = sum(n * _one(op, *first[op]) for op, n in calls.items())
    return {"calls": calls.total(), "seconds": seconds}


def _one(op: Overridable[..., Any], args: Any, kwargs: Any) -> float:
    """Return the seconds of an op's call without its work, less those of a plain function call."""
    with _idle(op):
        whole = _best(lambda: op(*args, **kwargs))
    return max(whole - _best(lambda: _nothing(*args, **kwargs)), 0.0)


def _best(fn: Callable[[], Any]) -> float:
    return min(timeit.repeat(fn, number=RUNS, repeat=REPEATS)) / RUNS


@contextmanager
def _idle(op: Overridable[..., Any]) -> Iterator[None]:
    """Within this context, all kernels and the reference of `op` do nothing."""
    idle = {
        library: [Kernel(_nothing, library, kernel.unsupported) for kernel in kernels]
        for library, kernels in op.kernels.items()
    }
    with mock.patch.object(op, "kernels", idle), mock.patch.object(op, "reference", _nothing):
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
