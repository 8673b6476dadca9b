"""What each of several processes does in a test: mpiexec -n W python processes.py NAME ..."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import runs
from hanging import SECONDS

import xformer as xf
from xformer.distributed.world import World, end_all

LOSSES = [1.0, 1e16, 3.0, -1e16, 2.0, 5.0]
SHAPES = [(7, 5), (), (3,), (2, 0), (1, 2, 3)]


def term(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """The array of a process, of which no two sums in another order have the same bits."""
    return np.random.default_rng([rank, *shape]).normal(size=shape).astype("float32")


def say(**found: Any) -> None:
    """Print one line in one write, since the lines of all processes are mixed."""
    os.write(1, (json.dumps(found) + "\n").encode())


def collectives(world: World) -> None:
    """Print what each collective gives."""
    rank, size = world.rank, world.size
    summed = [world.all_reduce(term(rank, shape)) for shape in SHAPES]
    assert [x.dtype.name for x in summed] == ["float32"] * len(SHAPES)
    sent = [np.full((to + 1, rank), 10 * rank + to) for to in range(size)]
    world.send(np.full(3, rank), (rank + 1) % size)
    world.send(np.asfortranarray(term(rank, (7, 5))), (rank + 1) % size)
    pair = [world.receive((rank - 1) % size) for _ in range(2)]
    world.sums(0)  # all have received
    assert not world._sent  # type: ignore[attr-defined]  # no copy is kept
    half = world.split(rank % 2)
    say(
        rank=rank,
        size=size,
        local=[world.local_rank, world.local_size],
        all_reduce=[x.tobytes().hex() for x in summed],
        shapes=[x.shape for x in summed],
        all_gather=[x.tolist() for x in world.all_gather(np.arange(rank))],
        all_to_all=[x.tolist() for x in world.all_to_all(sent)],
        reduce_scatter=world.reduce_scatter([np.full(2, i + 1) for i in range(size)]).tolist(),
        sums=world.sums(rank, 1 << 40),
        broadcast=[world.broadcast({"rank": rank}, root) for root in range(size)],
        gather=world.gather("x" * rank),
        first=world.first(lambda: rank),
        received=[pair[0].tolist(), pair[1].tobytes().hex()],
        half=[half.rank, half.size, half.sums(rank)[0]],
        halves=half.all_gather(np.asarray(rank))[-1].tolist(),
    )


def libraries(world: World) -> None:
    """Sums of arrays of other libraries stay with them."""
    strict = xf.backends.get("array-api-strict")
    got = world.all_reduce(strict.asarray(term(world.rank, (7, 5))))
    say(type=type(got).__module__, sum=strict.to_numpy(got).tobytes().hex())


def unlike(world: World) -> None:
    """Each method refuses what does not fit; process 0's own error is raised everywhere."""
    with_messages = {}
    for name, call in {
        "shapes": lambda: world.all_reduce(np.zeros(3 * world.size + 2 * world.size * world.rank)),
        "dtypes": lambda: world.reduce_scatter(
            [np.zeros(2, ("f4", "f8")[world.rank])] * world.size
        ),
        "number": lambda: world.all_to_all([np.zeros(2)]),
        "objects": lambda: world.all_gather(np.asarray([None])),
        "void": lambda: world.all_gather(np.zeros(2, "V2")),  # as bfloat16 of ml_dtypes
        "first": lambda: world.first(lambda: [][0]),
        "odd": lambda: world.first(_odd),
        "unsent": lambda: world.first(lambda: lambda: 0),
    }.items():
        try:
            call()
        except Exception as error:
            with_messages[name] = f"{type(error).__name__}: {error}"
    say(rank=world.rank, **with_messages)


class Odd(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} {code}")


def _odd() -> None:
    raise Odd(3, "a problem")


def ends(world: World, *ranks: str) -> None:
    """The processes `ranks` fail at once; the others wait for them."""
    from xformer.distributed.world import mpi

    mpi.PATIENCE = SECONDS if len(ranks) == world.size else 0.1
    mpi.STAGGER = 2.0  # two processes may begin to fail so far from one another
    world.sums(0)
    if str(world.rank) in ranks:
        end_all(f"error: {world.rank}")
        sys.exit(1)
    world.sums(1)


def silent(world: World, *ranks: int) -> None:
    """The processes `ranks` come to a collective when another one has said that it waits."""
    from xformer.distributed.world import mpi

    said, speaker = Path("said"), min({*range(world.size)} - {*ranks})
    tell = mpi.Mpi._tell

    def told(self: Any, silent: set[int]) -> None:
        tell(self, silent)
        if world.rank == speaker:
            said.touch()

    world.sums(0)  # all have begun
    mpi.SILENCE, mpi.Mpi._tell = 2.0, told
    while world.rank in ranks and not said.exists():
        time.sleep(0.01)
    assert world.sums(1) == (world.size,)


def evaluated(world: World) -> None:
    """A mean loss whose bits tell the order in which the losses were added."""
    batches = [xf.training.Batch((np.asarray(x),), {}, 1, 1) for x in LOSSES]

    def loss(params: Any, batch: Any, *_: Any) -> Any:
        return batch.arrays[0], None

    numpy = xf.backends.get("numpy")
    say(mean=xf.training.evaluate(loss, None, batches, numpy, world=world))


class Uneven:
    """Batches of which some have fewer targets; number 5 has none."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def batch(self, i: int) -> Any:
        batch = self.source.batch(i)
        tokens, targets = batch.arrays
        targets = np.where(np.arange(targets.size).reshape(targets.shape) % 6 < i % 6, -1, targets)
        targets[:] = -1 if i == 5 else targets
        return batch._replace(arrays=(tokens, targets), n_targets=int((targets != -1).sum()))


def trained(
    world: World,
    folder: str,
    accumulate: int,
    n_steps: int = 6,
    optimiser: str = "adamw",
    sharded: str | int = "",
) -> None:
    """A run in a folder, with dropout, a moving average, validation and uneven targets.

    sharded: the rank whose optimiser is sharded, or "all"
    """
    config = xf.training.TrainConfig(
        **vars(runs.CONFIG) | {"steps": 6, "accumulate": accumulate, "optimiser": optimiser}
    )
    chosen = config.chosen_optimiser()
    if sharded in ("all", world.rank):
        chosen = xf.optim.sharded(chosen, world)
    loss = xf.training.loss_of(runs.MODEL, ignore_index=-1)
    with runs.opened(Path(folder), world=world) as run:
        state = run.begin(xf.training.start(runs.begun(config).params, config, chosen))
        n_bytes = xf.tree.nbytes(state.optimiser)
        source = Uneven(runs.source(config))
        held_out = list(xf.training.Windows(runs.TOKENS[500:], 8, 4, 0).held_out(5))
        options: Any = {"held_out": held_out, "world": world, "donate": True, "optimiser": chosen}
        steps = xf.training.train(loss, state, source, config, runs.NUMPY, **options)
        for step in run.record(itertools.islice(steps, n_steps - state.step)):
            state = step.state
    assert state.step == n_steps
    found = {"norm": step.norm, "loss": step.loss, "validation": step.validation}
    say(rank=world.rank, **found, **({"bytes": n_bytes} if sharded else {}))


def command(fault: str, *argv: str) -> int:
    """`xformer` with a fault, NAME@RANK.

    Variables: PIDS, a folder for the id of each rank's process. HOLD, the step that process 0
    waits after, for Ctrl-C or the file GO. PATIENCE, the seconds in which all may fail alike.
    """
    from xformer.cli import main, steps, train
    from xformer.training import loss, run, windows

    steps.EVERY, train.SAMPLE = math.inf, 20  # the same lines, however long it takes
    rank = os.environ.get("PMI_RANK", "0")
    if pids := os.environ.get("PIDS"):
        Path(pids, rank).write_text(str(os.getpid()))
    if rank == "0" and (step := os.environ.get("HOLD")):
        runs.hold(int(step), Path("GO"))
    if seconds := os.environ.get("PATIENCE"):
        from xformer.distributed.world import mpi

        mpi.PATIENCE = float(seconds)
    name, _, where = fault.partition("@")
    full = OSError(errno.ENOSPC, "No space left on device")
    if where != rank:
        return main(argv)
    if name == "version":
        run.__version__ = "0.0.1"
    elif name == "log":
        run.append = _failing(run.append, 6, full)
    elif name == "checkpoint":
        run.write_state = _failing(run.write_state, 1, full)
    elif name == "model":
        run.checkpoint.save = _failing(run.checkpoint.save, 1, full)
    elif name == "value":
        windows.Windows.batch = _failing(windows.Windows.batch, 30, ValueError("a bad batch"))
    elif name == "bug":
        windows.Windows.batch = _failing(windows.Windows.batch, 30, KeyError("a bug"))
    elif name == "nan":
        of = loss.ModelLoss.of

        def nan(*args: Any) -> Any:
            value, cache = of(*args)
            return value * np.nan, cache

        loss.ModelLoss.of = nan
    elif name == "drift":  # as another processor could
        step = xf.training.loop._after

        def drifting(state: Any, value: float, params: Any, *rest: Any) -> Any:
            params = xf.tree.map(lambda p: np.nextafter(p, np.float32(9)), params)
            return step(state, value, params, *rest)

        xf.training.loop._after = drifting
    else:
        raise ValueError(name)
    return main(argv)


def _failing(fn: Any, n: int, error: Exception) -> Any:
    """`fn`, whose call number n raises."""
    calls = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == n:
            raise error
        return fn(*args, **options)

    return wrapped


def main(name: str, *args: str) -> int:
    if name == "command":
        return command(*args)
    if name == "program":
        runpy.run_path(args[0])
        return 0
    numbers = [int(arg) if arg.isdecimal() else arg for arg in args]
    given = args if name == "ends" else numbers
    {
        "collectives": collectives,
        "libraries": libraries,
        "unlike": unlike,
        "evaluated": evaluated,
        "ends": ends,
        "silent": silent,
        "trained": trained,
    }[name](xf.world(), *given)
    return 0


if __name__ == "__main__":
    # pytest's parent may ignore Ctrl-C, as a script's `command &` does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(*sys.argv[1:]))
