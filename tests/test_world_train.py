"""Training in several processes: the run of one process, whatever happens to one of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import launched
import pytest
import runs
from hanging import SECONDS
from processes import LOSSES
from runs import rows

from xformer import training
from xformer.cli import main
from xformer.distributed.world import Alone
from xformer.training import TrainConfig
from xformer.training.compiled_step import why_not_compiled

launched.needs_mpi()


class Several(Alone):
    """Process 0 of `size`, for what is refused before anything is sent."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


# ---- The loop ----


def trained(n: int, folder: str, accumulate: int, *more: Any) -> list[dict[str, Any]]:
    """What each process says of its last step."""
    lines = launched.good(n, "trained", folder, accumulate, *more).splitlines()
    return sorted(map(json.loads, lines), key=lambda row: row["rank"])


@pytest.mark.parametrize(("accumulate", "sizes"), [(4, (2, 4)), (3, (3,))])
def test_the_run_of_one_process_bit_for_bit(accumulate: int, sizes: tuple[int, ...]) -> None:
    """With dropout, targets that are not even, and as many batches a process as a power of two."""
    (said,) = trained(1, "one", accumulate)
    for n in sizes:
        found = trained(n, f"of-{n}", accumulate)
        assert found == [said | {"rank": rank} for rank in range(n)]
        runs.require_alike(Path(f"of-{n}"), Path("one"))
        assert (Path(f"of-{n}", "run.json").read_text().count("accumulate")) == 0


@pytest.mark.parametrize("optimiser", ["adamw", "adafactor", "muon"])
def test_a_sharded_optimiser(optimiser: str) -> None:
    """Begun by four processes, continued by two without it, by two with it, and by one."""
    trained(1, "one", 4, 6, optimiser)
    for n, n_steps, sharded in ((4, 2, "all"), (2, 3, ""), (2, 5, "all"), (1, 6, "all")):
        said = trained(n, "run", 4, n_steps, optimiser, sharded)
        if n == 4:
            sizes = [row["bytes"] for row in said]
    runs.require_alike(Path("run"), Path("one"))
    assert sum(sizes) == said[0]["bytes"] and max(sizes) < 0.5 * said[0]["bytes"]


def test_an_optimiser_that_is_sharded_in_one_process_alone() -> None:
    status, _, err = launched.run(2, "trained", "run", 4, 6, "adamw", "1")
    message = (
        "the processes differ: the optimiser of process 1 is sharded, that of process 0 is not"
    )
    assert status != 0 and message in err


@pytest.mark.parametrize("n", [2, 4])
def test_losses_of_validation_are_added_in_the_order_of_one(n: int) -> None:
    total = 0.0
    for x in LOSSES:
        total += x
    assert total != sum(sorted(LOSSES))
    lines = launched.good(n, "evaluated").splitlines()
    assert [json.loads(line) for line in lines] == [{"mean": total / len(LOSSES)}] * n


def test_the_run_of_one_process_to_rounding() -> None:
    """Three batches a process: their sums are in another tree."""
    trained(1, "one", 12)
    trained(4, "four", 12)
    one, four = (rows(Path(name)) for name in ("one", "four"))
    for row, other in zip(one, four, strict=True):
        assert (row["step"], row["tokens"]) == (other["step"], other["tokens"])
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert other["norm"] == pytest.approx(row["norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("batch", "accumulate", "size", "message"),
    [
        (
            8,
            1,
            4,
            "1 batch a step cannot be shared by 4 processes, which take whole batches: 4",
        ),
        (8, 1, 4, r"4 batches of 2 are the same step \(batch 2, accumulate 4\)"),
        (
            5,
            3,
            2,
            "3 batches a step cannot.*: the number of batches a step must be a multiple of",
        ),
    ],
)
def test_batches_that_cannot_be_shared(
    batch: int, accumulate: int, size: int, message: str
) -> None:
    config = TrainConfig(3, batch, accumulate=accumulate)
    with pytest.raises(ValueError, match=message):
        next(runs.steps(runs.begun(config), config, world=Several(size)))


def test_a_segment_memory_and_reduce_are_refused() -> None:
    state = runs.begun()
    with pytest.raises(ValueError, match="world and reduce exclude each other"):
        next(runs.steps(state, world=Several(2), reduce=lambda flat: flat))
    loss = training.segment_loss_of(runs.xf.GPT(16, 1, 8, 2, 8, positions="xl", memory_len=8))
    message = "2 processes cannot share the batches of a model with a segment memory"
    with pytest.raises(ValueError, match=message):
        training.evaluate(loss, None, [], runs.NUMPY, world=Several(2))
    why = why_not_compiled(training.loss_of(runs.MODEL), runs.CONFIG, runs.NUMPY, Several(2))
    assert why == "the 2 processes add their gradients within the step"


def test_a_world_that_one_of_run_and_train_lacks(tmp_path: Path) -> None:
    with runs.opened(tmp_path / "run") as run:
        steps = runs.steps(run.begin(runs.begun()))
        run.world = Several(4)
        message = "record: the run has 4 processes, and each step was made by 1: give Run and train"
        with pytest.raises(ValueError, match=message):
            next(run.record(steps))
        run.world = Alone()


# ---- The command ----

COMMAND: list[Any] = [
    *("train", "--data", "fox.txt", "--preset", "tiny", "--layers", 1, "--d-model", 16),
    *("--max-len", 16, "--batch", 2, "--accumulate", 4, "--dropout", 0.1, "--ema", 0.9),
    *("--steps", 40, "--validate-every", 10, "--checkpoint-every", 5),
]


def without_time(text: str) -> str:
    """Lines of the command that do not depend on time or on the folder."""
    kept = ("data:", "model:", "loss of", "validation loss", "perplexity")
    return "\n".join(line for line in text.splitlines() if line.startswith(kept))


def test_one_run_by_four_two_and_one(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Begun by four, stopped by Ctrl-C, continued by two, of which one is killed, ended by one."""
    assert main([*map(str, COMMAND), "--out", "never"]) == 0
    wanted = capfd.readouterr().out
    process = launched.start((4, ("command", "", *COMMAND, "--out", "run")), HOLD="10")
    _wait_for(process, "step 10/")
    process.send_signal(signal.SIGINT)
    status, out, err = launched.finish(process)
    assert status == 0, out + err
    assert err.count("stopping after this step") == 1 and err.count("stopped early, after") == 1
    assert "xformer train --resume run" in out
    n = len(rows(Path("run")))
    assert 10 <= n < 40

    again = ("command", "", *COMMAND, "--out", "run", "--auto-resume")
    # From now on with a sharded optimiser: the checkpoints stay the same.
    group = (2, (*again, "--shard-optimiser"))
    process = launched.start(group, PIDS=_folder(tmp_path / "pids"), HOLD="20")
    line = _wait_for(process, "step 20/")
    assert line.startswith("step 20/40")
    os.kill(int((tmp_path / "pids" / "1").read_text()), signal.SIGKILL)
    status, out, err = launched.finish(process)  # the other one does not wait for ever
    assert status != 0
    assert 20 <= len(rows(Path("run"))) < 40

    out = launched.good(1, *again)
    assert "resuming after step" in out and without_time(out) == without_time(wanted)
    runs.require_alike(Path("run"), Path("never"))


def test_process_0_alone_prints() -> None:
    """What the command prints, and the line that names the engine."""
    out = launched.good(2, "command", "", *COMMAND, "--steps", 2, "--out", "run")
    assert out.count("data: fox.txt") == out.count("a sample, continuing") == 1
    assert "; 2 processes by MPI on 1 machine, 1 thread each\n" in out


def test_cores_are_shared_unless_threads_are_chosen() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    none = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "")
    for chosen, threads in (({}, max(1, (cores or 1) // 2)), ({"OPENBLAS_NUM_THREADS": "2"}, 2)):
        env = none | chosen
        out = launched.good(2, "command", "", *COMMAND, "--steps", 1, "--out", f"{threads}", **env)
        each = "1 thread" if threads == 1 else f"{threads} threads"
        assert f"2 processes by MPI on 1 machine, {each} each" in out


def test_a_signal_to_one_process_ends_all_after_the_step(tmp_path: Path) -> None:
    pids = _folder(tmp_path / "pids")
    process = launched.start((2, ("command", "", *COMMAND, "--out", "run")), PIDS=pids, HOLD="10")
    _wait_for(process, "step 10/")
    os.kill(int((tmp_path / "pids" / "1").read_text()), signal.SIGTERM)
    Path("GO").touch()
    status, out, err = launched.finish(process)
    assert status == 0, out + err
    n = len(rows(Path("run")))
    assert 10 <= n < 40 and f"stopped early, after step {n}" in err


@pytest.mark.parametrize(
    ("fault", "message", "alike"),
    [
        ("value@1", "xformer: error: a bad batch (process 1 of 2, on ", False),
        ("value@0", "xformer: error: a bad batch\n", False),
        ("bug@1", "KeyError: 'a bug'", False),
        ("nan@1", "xformer: error: the loss of step 1 is nan, the norm of its gradient", True),
        ("log@0", "no space left on device; the last good checkpoint is run/", False),
        ("checkpoint@0", "no space left on device; there is no checkpoint yet", True),
        ("model@0", "no space left on device; there is no checkpoint yet", True),
        ("drift@1", "after step 5, the parameters of process 1 are not those of process 0", True),
    ],
)
def test_an_error_in_one_process_ends_all(fault: str, message: str, alike: bool) -> None:
    patience = {"PATIENCE": f"{SECONDS}"} if alike else {}
    status, out, err = launched.run(2, "command", fault, *COMMAND, "--out", "run", **patience)
    assert status == 1 and message in err, out + err
    assert err.count("xformer: error") == (0 if fault.startswith("bug") else 1)
    assert ("MPI_Abort" in err) == (not alike)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (("--lr", 0.1), "training.lr is 0.1 in process 1 on {host}, 0.005 in process 0 on {host}"),
        (("--d-model", 32), "model.embed.width is 32 in process 1 on {host}, 16 in process 0"),
        (("--steps", 41), "training.steps is 41 in process 1"),
        (("--dtype", "float64"), 'dtype is "float64" in process 1 on {host}, "float32" in process'),
        (("--shard-optimiser",), "shard_optimiser is true in process 1 on {host}, false in"),
        (("--checkpoint-every", 7), "checkpoint_every is 7 in process 1 on {host}, 5 in"),
        (("--data", "other.txt"), "data.training is "),
        ("version@1", 'versions.xformer is "0.0.1" in process 1 on {host}, "'),
    ],
)
def test_processes_that_differ(other: Any, message: str, text: Path) -> None:
    (text.parent / "other.txt").write_text("jackdaws love my big sphinx of quartz. " * 220)
    command = [*COMMAND, "--out", "run"]
    fault = other if isinstance(other, str) else ""
    more = () if fault else other
    first, second = ("command", fault, *command), ("command", fault, *command, *more)
    process = launched.start((1, first), (1, second), PATIENCE=f"{SECONDS}")
    status, _, err = launched.finish(process)
    assert status == 1 and err.count("\n") == 1, err
    assert err.startswith("xformer: error: the processes differ: ")
    assert message.format(host=os.uname().nodename) in err
    assert not Path("run").exists()


@pytest.mark.parametrize("wrong", [("--config", "missing.toml"), ("--stepz", "3")])
def test_an_error_before_the_first_words_ends_all(wrong: tuple[str, str]) -> None:
    """In the second process alone, which has met the others by then."""
    command = [*COMMAND, "--out", "run"]
    first, second = ("command", "", *command), ("command", "", *command, *wrong)
    status, _, err = launched.finish(launched.start((1, first), (1, second)))
    assert status == 1 and err.count("error: ") == 1 and wrong[0].lstrip("-") in err
    assert not Path("run").exists()


def test_a_step_that_cannot_be_shared_writes_nothing() -> None:
    command = ("command", "", *COMMAND, "--out", "run")
    status, _, err = launched.run(3, *command, PATIENCE=f"{SECONDS}")
    assert status == 1 and err == (
        "xformer: error: train: 4 batches a step cannot be shared by 3 processes, which take whole "
        "batches: the number of batches a step must be a multiple of 3\n"
    )
    assert not Path("run").exists()


def test_the_folder_of_another_run() -> None:
    """Process 0 alone looks at it; its error is that of all."""
    Path("run").mkdir()
    Path("run", "letter").write_text("dear")
    for more, message in (((), "--out: run is not empty"), (("--auto-resume",), "run is no run")):
        command = ("command", "", *COMMAND, "--out", "run", *more)
        status, _, err = launched.run(2, *command, PATIENCE=f"{SECONDS}")
        assert status == 1 and message in err and err.count("\n") == 1
    assert [path.name for path in Path("run").iterdir()] == ["letter"]


def test_a_new_run_from_another_model() -> None:
    """Which is validated before the first step, and saved."""
    launched.good(1, "command", "", *COMMAND, "--steps", 3, "--out", "first")
    more = ("--from", "first", "--data", "fox.txt", "--batch", 2, "--accumulate", 2, "--steps", 4)
    more = (*more, "--preset", "tiny")
    said = [launched.good(n, "command", "", "train", *more, "--out", f"{n}") for n in (1, 2)]
    assert without_time(said[0]) == without_time(said[1]) and "before training" in said[1]
    runs.require_alike(Path("2"), Path("1"))


def test_finetuning() -> None:
    """An adapter and a new head, with dropout, by two processes, stopped by one of them."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from finetuning import write_folder, write_lines
    from test_finetune import records
    from tunings import DROPOUT

    write_folder(Path("base"), DROPOUT["causal"], "gpt")
    labelled = [{**row, "label": "xyz"[row["label"]]} for row in records("classify", 60)]
    write_lines(Path("labels.jsonl"), labelled)
    command: list[Any] = [
        *("finetune", "--model", "base", "--data", "labels.jsonl", "--lora", 2, "--lr", 0.01),
        *("--batch", 3, "--accumulate", 2, "--steps", 20, "--validate-every", 6),
        *("--checkpoint-every", 5),
    ]
    wanted = launched.good(1, "command", "", *command, "--out", "one")
    out = launched.good(2, "command", "", *command, "--shard-optimiser", "--out", "two")
    assert "; 2 processes by MPI on 1 machine, 1 thread each" in out
    assert out.count("validation loss ") == out.count("to use it: xformer classify") == 1
    lines = [[x for x in t.splitlines() if x.startswith("validation")] for t in (wanted, out)]
    assert lines[0] == lines[1] and "before training" in lines[0][0]
    assert rows(Path("two")) == rows(Path("one"))
    for path in Path("one").glob("*.safetensors"):
        assert Path("two", path.name).read_bytes() == path.read_bytes()
    again = ("command", "", *command, "--seed", 1, "--resume", "two")
    status, _, err = launched.run(2, *again, PATIENCE=f"{SECONDS}")
    assert status == 1 and err.count("\n") == 1 and "--seed: the run in two has 0, got 1" in err


def test_the_program_of_the_page() -> None:
    page = Path(__file__).parents[1] / "docs" / "scaling.md"
    program = page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    Path("program.py").write_text(program)
    said = launched.good(1, "program", "program.py")
    assert said.count("\n") == 20 and said.startswith("1 ")
    Path("run").rename("one")
    assert launched.good(2, "program", "program.py") == said
    runs.require_alike(Path("run"), Path("one"))


def _folder(path: Path) -> str:
    path.mkdir()
    return str(path)


def _wait_for(process: Any, start: str) -> str:
    """The first line of standard output that begins so."""
    for line in process.stdout:
        if line.startswith(start):
            return str(line)
    _, out, err = launched.finish(process)
    raise AssertionError(f"there was no line {start!r}: {out}{err}")
