"""Commands that several processes run together: who prints, and how many threads each has."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

from threadpoolctl import threadpool_limits

from xformer.backends.numpy.threads import n_threads
from xformer.cli.run_options import RunOptions
from xformer.distributed.world import World, world
from xformer.optim import Optimiser, sharded
from xformer.training import TrainConfig

# With one of these, the user has chosen the number of threads.
CHOSEN = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"),
    "VECLIB_MAXIMUM_THREADS",
)


@contextmanager
def together() -> Iterator[World]:
    """A context that yields the processes started together, of which process 0 alone prints.

    The processes of a machine share its cores, unless the user has chosen a number of threads. All
    wait at the end for process 0. Errors as of `world`.
    """
    found = world()
    with ExitStack() as stack:
        if found.rank:
            nothing = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nothing))
            stack.enter_context(redirect_stderr(nothing))
        if found.size > 1 and not any(os.environ.get(name) for name in CHOSEN):
            stack.enter_context(threadpool_limits(_share(found)))
        yield found
        found.broadcast(None)


def optimiser_of(config: TrainConfig, options: RunOptions, found: World) -> Optimiser:
    """The optimiser of a configuration, sharded with --shard-optimiser."""
    optimiser = config.chosen_optimiser()
    return sharded(optimiser, found) if options.shard_optimiser else optimiser


def description(found: World) -> str:
    """How many processes work together, by which engine, on how many machines: for people.

    Empty for a process alone.
    """
    if found.size == 1:
        return ""
    n_hosts, threads = len(set(found.gather(found.host))), n_threads()
    machines = "1 machine" if n_hosts == 1 else f"{n_hosts} machines"
    each = "1 thread" if threads == 1 else f"{threads} threads"
    return f"; {found.size} processes by {type(found).__name__.upper()} on {machines}, {each} each"


def _share(found: World) -> int:
    """The number of this machine's cores for each of its processes. They may be bound to some."""
    cores = set(range(os.cpu_count() or 1))
    if sys.platform == "linux":
        cores = os.sched_getaffinity(0)
    everywhere = found.gather((found.host, cores))
    here = {core for host, cores in everywhere if host == found.host for core in cores}
    return max(1, len(here) // found.local_size)
