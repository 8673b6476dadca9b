"""Processes that work together: sums with the same bits everywhere, errors that end all."""

from __future__ import annotations

import json
import operator
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launched
import numpy as np
import pytest
from processes import SHAPES, term

from xformer.base.pairwise_sum import PairwiseSum
from xformer.cli import main
from xformer.cli.command_line import COMMANDS, TOGETHER
from xformer.distributed.launcher import SIZES
from xformer.distributed.launcher import launched as n_launched
from xformer.distributed.world import Alone, World
from xformer.distributed.world import world as found_world


def recursive(terms: list[Any], plus: Any) -> Any:
    """Halves at the largest power of two below n: another way to say the same tree."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << ((len(terms) - 1).bit_length() - 1)
    return plus(recursive(terms[:half], plus), recursive(terms[half:], plus))


def pairwise(terms: list[Any], plus: Any) -> Any:
    total = PairwiseSum(plus)
    for each in terms:
        total.add(each)
    return total.total()


def test_the_tree() -> None:
    def plus(a: str, b: str) -> str:
        return f"({a}+{b})"

    assert pairwise(list("01234"), plus) == "(((0+1)+(2+3))+4)"
    for n in range(1, 40):
        names = [str(i) for i in range(n)]
        assert pairwise(names, plus) == recursive(names, plus)


@pytest.mark.parametrize(("n", "world"), [(8, 2), (8, 4), (8, 8), (6, 3), (12, 3), (5, 5), (7, 1)])
def test_blocks_of_a_power_of_two_change_no_bit(n: int, world: int) -> None:
    terms = np.random.default_rng(n).normal(size=(n, 1000)).astype("float32")
    whole = pairwise(list(terms), operator.add)
    blocks = [pairwise(list(part), operator.add) for part in np.split(terms, world)]
    assert np.array_equal(pairwise(blocks, operator.add), whole)
    assert n < 4 or not np.array_equal(sum(terms), whole)  # the order does matter


# ---- One process ----


def test_a_process_alone(capsys: pytest.CaptureFixture[str]) -> None:
    world: World = Alone()
    x = np.arange(3.0)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert world.all_reduce(x) is x and world.sums(3, 4) == (3, 4) and world.gather(5) == [5]
    assert world.broadcast(x) is x and world.first(lambda: 7) == 7
    assert world.all_gather(x)[0] is x and world.all_to_all([x])[0] is x
    assert np.array_equal(world.reduce_scatter([x]), x)
    world.send(x, 0)
    assert world.receive(0) is x and world.split(3).size == 1
    with pytest.raises(ValueError, match="it sent nothing"):
        world.receive(0)
    with pytest.raises(ValueError, match="a process alone has number 0, got 1"):
        world.send(x, 1)
    with pytest.raises(ValueError, match="parts must be 1 arrays, one for each process, got 2"):
        world.all_to_all([x, x])
    world.end("an error")
    assert capsys.readouterr().err == "an error\n"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, and no world yet."""
    for name in (*SIZES, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys.modules["xformer.distributed.world"], "_worlds", [])
    yield


@pytest.mark.parametrize("name", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_the_environment_decides(name: str, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert n_launched() == 1
    for text, n in {"4": 4, "1": 1, "": 1, "many": 1}.items():
        monkeypatch.setenv(name, text)
        assert n_launched() == n
    monkeypatch.setenv("WORLD_SIZE", "16")  # of a container: RANK is missing
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv(name)
    assert n_launched() == 1
    monkeypatch.setenv("RANK", "3")
    assert n_launched() == 16
    # torchrun in a step of Slurm: each of its processes would be alone.
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert n_launched() == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert n_launched() == 16
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    monkeypatch.setenv(name, "1")
    found = found_world()
    assert isinstance(found, Alone) and found_world() is found


def test_the_launcher_nearest_to_the_process_counts(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpiexec in a step of Slurm, in a container that sets WORLD_SIZE."""
    monkeypatch.setenv("RANK", "0")
    for name, size in {"WORLD_SIZE": "16", "SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "2"}.items():
        monkeypatch.setenv(name, size)
        assert n_launched() == int(size)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {*TOGETHER, "info"}))
def test_other_commands_run_in_one_process(
    command: str,
    alone: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    assert main([command]) == 1
    assert capsys.readouterr().err == (
        f"xformer: error: xformer {command} runs in one process, and 2 were started together\n"
    )


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_no_silent_double_run(
    command: str,
    alone: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """mpiexec -n 4 without mpi4py trained four models in four folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "xformer.distributed.world.mpi", raising=False)
    (tmp_path / "fox.txt").write_text("the quick brown fox. " * 200)
    assert main([command, "--data", "fox.txt", "--steps", "1"]) == 1
    assert capsys.readouterr().err == (
        "xformer: error: 4 processes were started together, and mpi4py is missing: "
        "pip install 'xformer-array[mpi]'\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["fox.txt"]


def test_another_launcher_than_that_of_mpi4py(tmp_path: Path) -> None:
    """As torchrun, or the mpiexec of another MPI, whose processes each find themselves alone."""
    launched.needs_mpi()
    program = [sys.executable, "-m", "xformer", "train", "--steps", "1"]
    env = os.environ | {"WORLD_SIZE": "2", "RANK": "1"}
    done = subprocess.run(program, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    wanted = "2 processes were started together, but mpi4py finds 1: start them with the mpiexec of"
    assert wanted in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_info(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for name in ("cupy", *(name for name in sys.modules if name.startswith("cupy."))):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "processes, MPI: mpi4py is not installed: pip install 'xformer-array[mpi]'\n" in out
    assert "processes, NCCL: CuPy is not installed\n" in out


def test_info_does_not_initialise_mpi() -> None:
    """Which can fail, or wait, on the login node of a cluster; afterwards a world can be made."""
    launched.needs_mpi()
    program = (
        "import mpi4py; from xformer.cli import main; main(['info']); from mpi4py import MPI; "
        "print(MPI.Is_initialized(), mpi4py.rc.initialize); "
        "from xformer.distributed.world import mpi; print(mpi.Mpi().size)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^processes, MPI: mpi4py \d+\.\d+\.\d+, \w.*\d\.\d", done.stdout, re.M)
    assert done.stdout.endswith("False True\n1\n")


# ---- Several processes ----


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives(size: int) -> None:
    launched.needs_mpi()
    lines = launched.good(size, "collectives").splitlines()
    found = sorted(map(json.loads, lines), key=lambda row: row["rank"])
    ranks = range(size)
    summed = [recursive([term(r, shape) for r in ranks], operator.add) for shape in SHAPES]
    assert len(found) == size
    for rank, row in enumerate(found):
        before = (rank - 1) % size
        half = list(ranks[rank % 2 :: 2])
        assert row == {
            "rank": rank,
            "size": size,
            # mpiexec -n 1 says that the process is alone
            "local": [rank, size],
            "all_reduce": [x.tobytes().hex() for x in summed],
            "shapes": [list(shape) for shape in SHAPES],
            "all_gather": [list(range(r)) for r in ranks],
            "all_to_all": [[[10 * r + rank] * r] * (rank + 1) for r in ranks],
            "reduce_scatter": [size * (rank + 1)] * 2,
            "sums": [sum(ranks), size << 40],
            "broadcast": [{"rank": root} for root in ranks],
            "gather": ["x" * r for r in ranks],
            "first": 0,
            "received": [[before] * 3, term(before, (7, 5)).tobytes().hex()],
            "half": [half.index(rank), len(half), sum(half)],
            "halves": half[-1],
        }


def test_arrays_of_another_library() -> None:
    launched.needs_mpi()
    wanted = recursive([term(r, (7, 5)) for r in range(2)], operator.add).tobytes().hex()
    for line in launched.good(2, "libraries").splitlines():
        row = json.loads(line)
        assert row["type"].startswith("array_api_strict") and row["sum"] == wanted


def test_what_does_not_fit() -> None:
    launched.needs_mpi()
    rows = [json.loads(line) for line in launched.good(2, "unlike").splitlines()]
    assert len(rows) == 2
    for row in rows:
        wanted = "ValueError: all_reduce: all processes must give the same shape and dtype, got ("
        assert row["shapes"].startswith(wanted)
        assert "(2,) float32 from process" in row["dtypes"] + row["dtypes"].replace("64", "32")
        assert row["number"].startswith("ValueError: all_to_all: parts must be 2 arrays")
        assert "must hold numbers and have at most 8 axes, got dtype object" in row["objects"]
        assert "must hold numbers and have at most 8 axes, got dtype |V2" in row["void"]
        assert row["first"] == "IndexError: list index out of range"
        assert row["odd"] == f"{('Odd: ', 'RuntimeError: Odd: ')[row['rank']]}a problem 3"
        assert "pickle" in row["unsent"]


@pytest.mark.parametrize(
    ("late", "line"),
    [
        ((2,), "process 0 of 3 has waited 2 s for process 2 on {host}\n"),
        ((0, 1), "process 2 of 3 has waited 2 s for process 0 on {host}, process 1 on {host}\n"),
    ],
)
def test_a_long_wait_says_for_whom(
    late: tuple[int, ...], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched.needs_mpi()
    monkeypatch.chdir(tmp_path)
    status, out, err = launched.run(3, "silent", *late)
    assert status == 0 and err == line.format(host=os.uname().nodename), out + err


@pytest.mark.parametrize("ranks", ["0", "2", "012", "12"])
def test_an_error_ends_all_with_one_message(ranks: str) -> None:
    launched.needs_mpi()
    status, _, err = launched.run(3, "ends", *ranks)
    first = f"error: {ranks[0]}"
    assert status == 1 and err.count("error: ") == 1 and first in err
    assert ("MPI_Abort" in err) == (ranks != "012")
    assert (f"(process {ranks[0]} of 3, on " in err) == (ranks[0] != "0")
