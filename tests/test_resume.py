"""A run that is stopped, anywhere and however often, is one that never was: bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from hanging import SECONDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from libraries import only
from runs import CONFIG, NUMPY, begun, rows, trained

import xformer as xf
from xformer import optim, training, tree
from xformer.backends import Backend
from xformer.initializers import fixup
from xformer.training import interruptible

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def never(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("never")
    trained(folder)
    return folder


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(stops=st.lists(st.integers(1, 12), max_size=6))
def test_stops_change_nothing(
    stops: list[int], never: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("stopped")
    for n in stops:
        trained(folder, n=n)
    trained(folder)
    runs.require_alike(folder, never)


@pytest.mark.parametrize("every", [1, 7, 100])
def test_how_often_checkpoints_are_written_changes_nothing(
    every: int, never: Path, tmp_path: Path
) -> None:
    trained(tmp_path, n=11, every=every)
    trained(tmp_path, every=every)
    assert rows(tmp_path) == rows(never)


@pytest.mark.parametrize(
    "options",
    [
        *({"optimiser": name, "lr": 1e-3} for name in optim.OPTIMISERS),
        *({"schedule": name} for name in ("linear", "wsd", "constant", "noam")),
        {"ema": None, "accumulate": 1},
        {"clip": None, "weight_decay": 0.0},
        {"patience": 1, "lr": 0.3, "diverged": None},
    ],
    ids=str,
)
def test_every_option_goes_on(options: dict[str, Any], tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=12, **options)
    whole = list(runs.steps(begun(config), config))
    part = list(itertools.islice(runs.steps(begun(config), config), 5))
    training.write_state(tmp_path / "a", part[-1].state, NUMPY)
    state = training.read_state(tmp_path / "a").restored(begun(config), NUMPY)
    part += runs.steps(state, config)
    assert [s.loss for s in part] == [s.loss for s in whole]
    assert runs.leaves(part[-1].state) == runs.leaves(whole[-1].state)


@only("array-api-strict", "torch", "cupy")  # JAX compiles it for too long
def test_a_run_goes_on_elsewhere(library: Backend, tmp_path: Path) -> None:
    """Begun on NumPy, it goes on with the same numbers to rounding, and comes back."""
    config = dataclasses.replace(CONFIG, steps=5, eval_every=5)

    def moved(state: training.State, place: Backend, to: Backend) -> training.State:
        training.write_state(tmp_path / "a", state, place)
        found: training.State = training.read_state(tmp_path / "a").restored(begun(config), to)
        return found

    whole = list(runs.steps(begun(config), config))
    here = list(itertools.islice(runs.steps(begun(config), config), 2))
    state = moved(here[-1].state, NUMPY, library)
    there = list(itertools.islice(runs.steps(state, config, library), 2))
    back = list(runs.steps(moved(there[-1].state, library, NUMPY), config))
    losses = [s.loss for s in (*here, *there, *back)]
    np.testing.assert_allclose(losses, [s.loss for s in whole], rtol=1e-5)  # float32


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """By SIGKILL, at random and at every kind of moment of writing: see killing.py."""
    if not hasattr(os, "fork"):
        pytest.skip("the system has no fork")
    done = subprocess.run(
        [sys.executable, "killing.py", "--folder", tmp_path, "--kills", "12", "--seed", "1"],
        cwd=TESTS,
        capture_output=True,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "bit for bit that which never was" in done.stdout


# Ctrl-C


def test_ctrl_c_ends_after_the_step_and_is_saved(never: Path, tmp_path: Path) -> None:
    state = begun()
    with runs.opened(tmp_path) as run, interruptible() as stopping:
        for step in run.record(runs.steps(run.begin(state)), stopping):
            if step.step == 5:
                signal.raise_signal(signal.SIGINT)
            state = step.state
    assert state.step == 5 and stopping()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]
    trained(tmp_path)
    runs.require_alike(tmp_path, never)


def test_ctrl_c_twice_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible("again, to end at once") as stopping:
        assert not stopping()
        signal.raise_signal(signal.SIGINT)
        assert stopping()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err == "again, to end at once"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_the_signals_of_batch_systems_end_after_the_step(name: str) -> None:
    if not hasattr(signal, name):
        pytest.skip(f"the system has no {name}")
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interruptible() as stopping:
        signal.raise_signal(number)
        assert stopping()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) is before is signal.SIG_DFL


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "own"])
def test_a_handler_that_is_not_pythons_stays(handler: Any) -> None:
    """As of a script's `command &` and of `nohup`, where Ctrl-C is for others."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interruptible() as stopping:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is handler and not stopping()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("stream", [None, sys.__stderr__])
def test_ctrl_c_without_stderr(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another file's where it is closed; its pipe may be closed."""
    written = []

    def write(number: int, data: bytes) -> int:
        written.append(number)
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "__stderr__", stream)
    with monkeypatch.context() as patch, interruptible("stopping") as stopping:
        patch.setattr(os, "write", write)
        signal.raise_signal(signal.SIGINT)
        assert stopping()
    assert written == ([] if stream is None else [2])


def test_outside_the_main_thread_nothing_is_pressed() -> None:
    found = []

    def inside() -> None:
        with interruptible() as stopping:
            found.append(stopping())

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [False]


# The command


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


COMMAND = [
    *(
        "train",
        "--layers",
        "1",
        "--d-model",
        "16",
        "--heads",
        "2",
        "--max-len",
        "16",
        "--batch",
        "2",
    ),
    *("--preset", "tiny", "--steps", "40", "--validate-every", "10", "--checkpoint-every", "5"),
    *("--dropout", "0.1", "--accumulate", "2", "--ema", "0.9", "--data", "fox.txt"),
]


def test_the_command_stopped_by_ctrl_c_goes_on(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, as a person meets it."""
    from xformer.cli import main

    assert main([*COMMAND, "--out", "never"]) == 0
    program = "import sys, runs; runs.hold(10); from xformer.cli import main; sys.exit(main())"
    environment = os.environ | {"PYTHONPATH": str(TESTS), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *COMMAND, "--out", "stopped"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 10/"):
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "stopping after this step; press Ctrl-C again" in err
    assert "stopped early, after step" in err
    assert "saved to stopped after" in out and "xformer train --resume stopped" in out
    n = len(rows(Path("stopped")))
    assert 10 <= n < 40
    capsys.readouterr()
    assert main(["train", "--resume", "stopped"]) == 0
    assert f"resuming after step {n}" in capsys.readouterr().out
    assert rows(Path("stopped")) == rows(Path("never"))
    weights = [Path(name, "model.safetensors").read_bytes() for name in ("never", "stopped")]
    assert weights[0] == weights[1]


@pytest.fixture
def stopped(text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """A run of the command that was stopped after step 7; its folder."""
    from xformer.cli import main, train

    real = train.train
    with monkeypatch.context() as patch:
        patch.setattr(train, "train", lambda *a, **o: itertools.islice(real(*a, **o), 7))
        assert main([*COMMAND, "--out", "run"]) == 0
    capsys.readouterr()
    return "run"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume", "absent"], "absent does not exist"),
        (["--resume", "run", "--lr", "1"], "--lr: the run in run has 0.005, got 1.0"),
        (["--resume", "run", "--layers", "2"], "--layers: the run in run has 1, got 2"),
        (["--resume", "run", "--ema", "0.5"], "--ema: the run in run has 0.9, got 0.5"),
        (["--resume", "run", "--out", "new"], "--out names a new folder: it excludes --resume"),
        (["--resume", "run", "--data", "other.txt"], "of another run: data.training is"),
        (["--resume", "run", "--steps", "39"], "--steps: must be at least the 40 of the run in"),
        (
            ["--resume", "run", "--steps", "50", "--resume-step", "3"],
            "run has no checkpoint of step 3",
        ),
        (["--resume", "run", "--steps", "50", "--data", "other.txt"], "of another run: data.train"),
        (
            ["--resume", "run", "--resume-step", "3"],
            "run has no checkpoint of step 3; it has those of 5",
        ),
        (["--resume-step", "3"], "--resume-step needs --resume"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, stopped: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from xformer.cli import main

    Path("other.txt").write_text("jackdaws love my big sphinx of quartz. " * 200)
    before = {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()}
    assert main(["train", *options]) == 1
    err = capsys.readouterr().err
    assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1
    assert {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()} == before


def fails(monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
    """Run a command that has too little memory after its folder is made."""
    from xformer.cli import main

    def begin(*_: Any) -> None:
        raise MemoryError("no room for 9 EB")

    with monkeypatch.context() as patch:
        patch.setattr(training.Run, "begin", begin)
        assert main([*command]) == 1


def options_of(folder: str) -> dict[str, Any]:
    notes: dict[str, Any] = json.loads(Path(folder, "run.json").read_text())["notes"]
    return notes


def test_a_run_that_failed_before_its_first_checkpoint(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder can be used again, and --resume takes other options."""
    from xformer.cli import main

    assert main([*COMMAND, "--out", "never", "--steps", "2", "--tokenizer", "characters"]) == 0
    for again in (
        ["train", *COMMAND[1:], "--steps", "2", "--out", "again", "--tokenizer", "characters"],
        ["train", *COMMAND[1:], "--steps", "2", "--out", "again", "--auto-resume"],
        ["train", "--resume", "again", "--d-model", "16", "--steps", "2"],
        ["train", "--resume", "again", "--preset", "small", "--steps", "2", "--batch", "2"],
    ):
        fails(monkeypatch, *COMMAND, "--d-model", "1024", "--out", "again")
        assert "no room" in capsys.readouterr().err and not checkpoints_of("again")
        assert main(again) == 0
        stored = options_of("again")
        assert stored["d_model"] == (128 if "small" in again else 16) and stored["steps"] == 2
        if "characters" in again:
            assert rows(Path("again")) == rows(Path("never"))
        model, _ = training.load("again", NUMPY)
        assert model.embed.vocab_size == training.load_vocabulary("again").size
        shutil.rmtree("again")


def checkpoints_of(folder: str) -> list[Path]:
    return [*Path(folder, "checkpoints").iterdir()]


def test_what_a_failed_run_of_another_model_left_is_not_used(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of its vocabulary, and its options beside those of --from."""
    from xformer.cli import main

    assert main([*COMMAND, "--steps", "1", "--out", "first", "--tokenizer", "characters"]) == 0
    fails(monkeypatch, *COMMAND, "--out", "again")
    command = ["train", "--from", "first", "--data", "fox.txt", "--preset", "tiny", "--steps", "1"]
    assert main([*command, "--out", "again", "--checkpoint-every", "1"]) == 0
    assert training.load_vocabulary("again").size == training.load_vocabulary("first").size
    fails(monkeypatch, *command, "--out", "third")
    assert main(["train", "--resume", "third", "--layers", "2"]) == 1
    assert main(["train", "--resume", "third", "--max-len", "8"]) == 0
    assert options_of("third")["max_len"] == 8


def test_one_command_begins_or_resumes(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same options, however often it is started; a lock alone is no run."""
    from xformer.cli import main, train

    assert main([*COMMAND, "--out", "never"]) == 0
    Path("run").mkdir()
    Path("run", "lock").touch()
    command = [*COMMAND, "--out", "run", "--auto-resume"]
    real, printed = train.train, []
    for n in (7, 9, 100, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "train", lambda *a, n=n, **o: itertools.islice(real(*a, **o), n))
            assert main(command) == 0
        printed.append(capsys.readouterr().out)
    assert ["resuming after step" in out for out in printed] == [False, True, True, True]
    assert "resuming after step 7\n" in printed[1] and "resuming after step 16\n" in printed[2]
    runs.require_alike(Path("run"), Path("never"))


def test_one_command_with_a_config_and_an_origin(text: Path) -> None:
    """Which are of a new run otherwise."""
    from xformer.cli import main

    assert main([*COMMAND, "--steps", "2", "--out", "first"]) == 0
    Path("c.toml").write_text("batch = 3\nsteps = 4\n")
    command = ["train", "--from", "first", "--data", "fox.txt", "--config", "c.toml"]
    for _ in range(2):
        assert main([*command, "--out", "run", "--auto-resume"]) == 0
    assert [row["step"] for row in rows(Path("run"))] == [1, 2, 3, 4]
    assert not list(Path("run").glob("*.aside*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--auto-resume needs --out, the folder of the run"),
        (["--resume", "run"], "--auto-resume excludes --resume: name the folder with --out"),
        (["--out", "run", "--lr", "1"], "--lr: the run in run has 0.005, got 1.0"),
        (["--out", "run", "--from", "run"], "--from: the run in run has None, got "),
        (["--out", "other"], "other is no run and not empty: it has letter"),
        (["--out", "fox.txt"], "fox.txt"),
    ],
)
def test_mistakes_with_auto_resume(
    options: list[str], message: str, stopped: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from xformer.cli import main

    Path("other").mkdir()
    Path("other", "letter").write_text("dear")
    assert main(["train", "--data", "fox.txt", "--auto-resume", *options]) == 1
    err = capsys.readouterr().err
    assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1
    assert [path.name for path in Path("other").iterdir()] == ["letter"]
    assert not Path("runs").exists()


def test_a_damaged_checkpoint_and_the_one_before(
    stopped: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from xformer.cli import main

    newest = Path(stopped, "checkpoints/step-00000007.safetensors")
    newest.write_bytes(newest.read_bytes()[:-8])
    assert main(["train", "--resume", stopped]) == 1
    err = capsys.readouterr().err
    assert (
        "step-00000007.safetensors is damaged" in err
        and "resume from it with --resume-step 5" in err
    )
    with pytest.warns(UserWarning, match=r"the old log is kept: log\.jsonl\.aside"):
        assert main(["train", "--resume", stopped, "--resume-step", "5"]) == 0
    assert [row["step"] for row in rows(Path(stopped))] == list(range(1, 41))


def test_what_may_change_when_a_run_goes_on(stopped: str, text: Path) -> None:
    from xformer.cli import main

    text.rename("moved.txt")
    options = ["--data", "moved.txt", "--checkpoint-every", "10", "--keep-checkpoints", "1"]
    assert main(["train", "--resume", stopped, *options]) == 0
    assert sorted(p.name for p in Path(stopped, "checkpoints").iterdir()) == [
        "step-00000040.safetensors"
    ]


def test_a_run_whose_notes_lack_an_option(stopped: str, capsys: pytest.CaptureFixture[str]) -> None:
    from xformer.cli import main

    description = Path(stopped, "run.json")
    found = json.loads(description.read_text())
    del found["notes"]["lr"]
    description.write_text(json.dumps(found))
    assert main(["train", "--resume", stopped]) == 1
    assert "run is not a run of xformer train" in capsys.readouterr().err


def test_a_run_without_norms(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By Fixup. With a learning rate of 0, the saved weights are the first ones."""
    from xformer.cli import main

    options = ["--norm-placement", "none", "--residual-scale", "1", "--init", "fixup"]
    assert main([*COMMAND, *options, "--lr", "0", "--steps", "2", "--out", "run"]) == 0
    model, params = training.load("run", NUMPY)
    assert (model.blocks[0].norm_placement, model.blocks[0].residual_scale) == ("none", 1)
    wanted = tree.flatten(fixup(model.init(seed=0), n_branches=2 * len(model.blocks)))
    got = tree.flatten(params)
    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[name], p) for name, p in wanted.items())
    capsys.readouterr()
    assert main(["train", "--resume", "run", "--steps", "3"]) == 0
    assert main(["train", "--resume", "run", "--steps", "4", "--init", "gpt2"]) == 1
    assert "--init: the run in run has fixup, got gpt2" in capsys.readouterr().err
    assert main([*COMMAND, "--init", "fixup", "--out", "other"]) == 1
    said = capsys.readouterr().err
    assert said == "xformer: error: --init fixup needs --norm-placement none, got pre\n"
    assert main(["train", "--from", "run", "--residual-scale", "0"]) == 1
    said = capsys.readouterr().err
    assert "--residual-scale excludes --from: the model in run fixes it" in said


def test_a_finished_run_says_so(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from xformer.cli import main

    assert main([*COMMAND, "--out", "run", "--steps", "3"]) == 0
    log = Path("run/log.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["train", "--resume", "run"]) == 0
    assert "saved to run after 3 steps" in capsys.readouterr().out
    assert Path("run/log.jsonl").read_bytes() == log


@pytest.fixture
def quiet(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No samples, which take longer than these runs."""
    from xformer.cli import train

    monkeypatch.setattr(train, "_sample", lambda *_, **__: None)


CONSTANT = ["--schedule", "constant", "--warmup", "5"]


def test_a_finished_run_trains_on(quiet: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty steps and twenty more are forty, where the rate does not follow from their number."""
    from xformer.cli import main

    assert main([*COMMAND, *CONSTANT, "--out", "never"]) == 0
    assert main([*COMMAND, *CONSTANT, "--steps", "20", "--out", "run"]) == 0
    out = capsys.readouterr().out
    assert "to resume: xformer train --resume run --steps 40" in out
    made = json.loads(Path("run/run.json").read_text())
    assert main(["train", "--resume", "run", "--steps", "40", "--keep-checkpoints", "3"]) == 0
    out = capsys.readouterr().out
    assert "resuming after step 20" in out and "saved to run after 40 steps" in out
    runs.require_alike(Path("run"), Path("never"))
    content = json.loads(Path("run/run.json").read_text())
    made["about"]["training"]["steps"] = made["notes"]["steps"] = 40
    assert content == made  # nothing else, such as --keep-checkpoints, is another from now on
    log = Path("run/log.jsonl").read_bytes()
    assert main(["train", "--resume", "run"]) == 0  # of forty
    assert Path("run/log.jsonl").read_bytes() == log


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "noam"])
def test_the_schedule_of_a_longer_run(schedule: str, quiet: None) -> None:
    """From then on the rate is that of a run which had all these steps from the first."""
    from xformer.cli import main

    short = [*COMMAND, "--schedule", schedule, "--warmup", "5", "--steps", "10", "--out", "run"]
    assert main(short) == 0
    assert main(["train", "--resume", "run", "--steps", "20"]) == 0
    config = training.TrainConfig(steps=20, lr=5e-3, schedule=schedule, warmup=5)
    rates = [row["lr"] for row in rows(Path("run"))]
    wanted = config.learning_rate()
    assert rates[10:] == [wanted(step) for step in range(11, 21)]
    first = dataclasses.replace(config, steps=10).learning_rate()
    assert rates[:10] == [first(step) for step in range(1, 11)]


def test_a_longer_run_that_is_stopped_goes_on_to_its_new_end(
    quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xformer.cli import main, train

    assert main([*COMMAND, *CONSTANT, "--out", "never"]) == 0
    assert main([*COMMAND, *CONSTANT, "--steps", "20", "--out", "run"]) == 0
    real = train.train
    with monkeypatch.context() as patch:
        patch.setattr(train, "train", lambda *a, **o: itertools.islice(real(*a, **o), 7))
        assert main(["train", "--resume", "run", "--steps", "40"]) == 0
    assert len(rows(Path("run"))) == 27
    assert main(["train", "--resume", "run"]) == 0
    assert rows(Path("run")) == rows(Path("never"))


def test_a_run_whose_patience_is_over_trains_on(
    quiet: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from xformer.cli import main

    options = ["--lr", "0", "--patience", "1", "--steps", "60", "--ema", "0"]
    assert main([*COMMAND, *options, "--out", "run"]) == 0
    assert "to resume: xformer train --resume run --patience 2" in capsys.readouterr().out
    assert len(rows(Path("run"))) == 20
    assert main(["train", "--resume", "run", "--patience", "3"]) == 0
    assert len(rows(Path("run"))) == 40
    assert json.loads(Path("run/run.json").read_text())["notes"]["patience"] == 3


def test_training_that_diverges_names_its_checkpoint(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from xformer.cli import main

    with np.errstate(all="ignore"):
        options = ["--lr", "1e30", "--clip", "1e30", "--warmup", "0", "--checkpoint-every", "1"]
        assert main([*COMMAND, *options, "--out", "run"]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert "the loss of step 2 is" in err
    assert "the last good checkpoint is run/checkpoints/step-00000001.safetensors" in err


def test_a_run_on_prepared_text_goes_on(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from xformer.cli import main, train

    assert main(["prepare", "fox.txt", "tokens", "--tokenizer", "characters"]) == 0
    command = [*COMMAND, "--data", "tokens", "--steps", "12"]
    assert main([*command, "--out", "never"]) == 0
    real = train.train
    with monkeypatch.context() as patch:
        patch.setattr(train, "train", lambda *a, **o: itertools.islice(real(*a, **o), 7))
        assert main([*command, "--out", "run"]) == 0
    assert main(["train", "--resume", "run"]) == 0
    assert rows(Path("run")) == rows(Path("never"))
    assert "nats per character" in capsys.readouterr().out


@pytest.mark.parametrize("vocabulary", ["characters", "bpe:300"])
def test_a_run_has_its_vocabulary(
    vocabulary: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from xformer.cli import main

    if vocabulary != "characters":
        pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    options = ["--tokenizer", vocabulary, "--steps", "2", "--sample-every", "2"]
    assert main([*COMMAND, *options, "--out", "run"]) == 0
    out = capsys.readouterr().out
    unit = "character" if vocabulary == "characters" else "token"
    assert f"nats per {unit}" in out and "--- step 2" in out and "a sample, continuing 'the " in out
    command = ["generate", "--model", "run", "--prompt", "the fox", "--max-new-tokens", "5"]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("the fox")
    assert main(["train", "--resume", "run"]) == 0
    model, _ = training.load("run", xf.backends.get("numpy"))
    assert model.embed.vocab_size == training.load_vocabulary("run").size


def test_a_warning_is_one_line(stopped: str) -> None:
    program = "import sys; from xformer.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "train", "--resume", stopped, "--resume-step", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stderr.splitlines() if "log.jsonl" in line]
    assert line.startswith("xformer: warning: ") and line.endswith("is kept: log.jsonl.aside")
    assert "warn(" not in done.stderr
