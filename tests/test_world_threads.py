"""Processes as threads: collectives, and errors that end all threads."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import numpy as np
import pytest
from hanging import SECONDS

import xformer as xf
from xformer.dispatch import is_inference
from xformer.distributed.world import World, threads
from xformer.distributed.world.processes import World as Base


def limited(n: int, fn: Any) -> list[Any]:
    """`threads.run`, which must end in time."""
    found: list[Any] = []
    context = contextvars.copy_context()

    def call() -> None:
        try:
            found.append(threads.run(n, fn))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=context.run, args=(call,), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert found, "the threads did not end"
    if isinstance(found[0], BaseException):
        raise found[0]
    result: list[Any] = found[0]
    return result


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_thread_knows_its_rank(n: int) -> None:
    def work(world: World) -> tuple[int, ...]:
        return world.rank, world.size, world.local_rank, world.local_size

    assert limited(n, work) == [(rank, n, rank, n) for rank in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_collectives(n: int) -> None:
    def work(world: World) -> dict[str, Any]:
        r = world.rank
        return {
            "broadcast": world.broadcast({"from": r}, root=n - 1),
            "sums": world.sums(r, 2 * r),
            "all_reduce": world.all_reduce(np.asarray([r + 1.0, -r])).tolist(),
            "all_gather": [x.tolist() for x in world.all_gather(np.full(r + 1, r))],
            "all_to_all": [
                x.item() for x in world.all_to_all([np.asarray(10 * r + i) for i in range(n)])
            ],
            "reduce_scatter": world.reduce_scatter(
                [np.asarray([r * i]) for i in range(n)]
            ).tolist(),
        }

    total = n * (n - 1) // 2
    for rank, got in enumerate(limited(n, work)):
        assert got == {
            "broadcast": {"from": n - 1},
            "sums": (total, 2 * total),
            "all_reduce": [total + n, -total],
            "all_gather": [[r] * (r + 1) for r in range(n)],
            "all_to_all": [10 * r + rank for r in range(n)],
            "reduce_scatter": [total * rank],
        }


def test_sums_have_the_same_bits_everywhere() -> None:
    """And are a tree: ((0 + 1) + (2 + 3)) + 4."""
    parts = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32)
    wanted = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + parts[4]
    assert not np.array_equal(wanted, parts.sum(axis=0))
    for got in limited(5, lambda world: world.all_reduce(parts[world.rank])):
        assert np.array_equal(got, wanted)


def test_send_and_receive_in_order() -> None:
    def work(world: World) -> list[int]:
        to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        for i in range(3):
            world.send(np.asarray(10 * world.rank + i), to)
        return [int(world.receive(source)) for _ in range(3)]

    assert limited(3, work) == [[20, 21, 22], [0, 1, 2], [10, 11, 12]]


def test_split() -> None:
    """A mesh of two by two: rows and columns, also at the same time."""

    def work(world: World) -> tuple[Any, ...]:
        row, column = world.split(world.rank // 2), world.split(world.rank % 2)
        sums = row.sums(world.rank) + column.sums(world.rank)
        to = 1 - column.rank
        column.send(np.asarray(world.rank), to)
        return row.rank, column.rank, *sums, int(column.receive(to))

    assert limited(4, work) == [(0, 0, 1, 2, 2), (1, 0, 1, 4, 3), (0, 1, 5, 2, 0), (1, 1, 5, 4, 1)]


def test_threads_run_in_the_context_of_the_caller() -> None:
    with xf.inference():
        assert limited(2, lambda _: is_inference()) == [True, True]
    assert limited(2, lambda _: is_inference()) == [False, False]


class Broken(Exception):
    pass


def test_an_error_ends_all_threads() -> None:
    ended = []

    def work(world: World) -> None:
        if world.rank == 1:
            raise Broken("here")
        try:
            world.sums(1)
        except threads.Ended as error:
            ended.append(str(error))
            raise

    with pytest.raises(Broken, match="here"):
        limited(3, work)
    assert ended == ["a collective: another thread failed"] * 2


def test_an_error_ends_threads_of_other_groups() -> None:
    def work(world: World) -> None:
        group = world.split(world.rank % 2)
        if world.rank == 0:
            raise Broken("here")
        while True:
            group.sums(1)

    with pytest.raises(Broken):
        limited(4, work)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            lambda world: world.sums(1) if world.rank else None,
            "rank 0 has returned, rank 1 waits in a collective, rank 2 waits in a collective",
        ),
        (
            lambda world: world.receive((world.rank + 1) % 3),
            r"rank 0 waits in receive\(1\), rank 1 waits in receive\(2\)",
        ),
        (
            lambda world: world.sums(1) if world.rank else world.receive(1),
            r"rank 0 waits in receive\(1\), rank 1 waits in a collective",
        ),
        (
            lambda world: world.split(world.rank).receive(0),
            r"rank 0 waits in receive\(0\), rank 1 waits in receive\(0\)",
        ),
    ],
)
def test_threads_that_wait_for_ever_are_ended(work: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"threads: none can go on: .*{message}"):
        limited(3, work)


def test_end_is_an_error_of_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"^enough$"):
        limited(2, lambda world: world.end("enough"))


@pytest.mark.parametrize(
    ("n", "work", "message"),
    [
        (0, lambda world: None, "threads: n must be"),
        (2, lambda world: world.all_reduce(np.ones(world.rank + 2)), "all_reduce: .*shape"),
        (2, lambda world: world.reduce_scatter([np.ones(1)]), "reduce_scatter: parts must be 2"),
        (2, lambda world: world.send(np.ones(1), 2), r"a rank must be in \[0, 2\), got 2"),
        (2, lambda world: world.receive(-1), r"a rank must be in \[0, 2\), got -1"),
    ],
)
def test_bad_input(n: int, work: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        limited(n, work)


def test_an_engine_defines_what_others_inherit() -> None:
    """Sums, the gathering and the broadcast are those of MPI, so that the bits are too."""
    own = {"send", "receive", "split", "end", "_exchange"}
    theirs = {name for name in vars(Base) if callable(getattr(Base, name)) and name not in own}
    assert not {name for name in theirs - {"__init__", "__repr__"} if name in vars(threads.Threads)}
