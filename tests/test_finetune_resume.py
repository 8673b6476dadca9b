"""Fine-tuning that is stopped, or killed, goes on as if it never was: bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from finetuning import write_folder, write_lines
from libraries import slow_but
from test_finetune import NUMPY, examples, made, records
from tunings import CONFIG, DROPOUT, Tuning, require_alike

from xformer import finetune, pretrained, training, tree
from xformer.base import lock
from xformer.cli import main
from xformer.cli.finetune_options import FinetuneOptions
from xformer.cli.run_options import add_options
from xformer.cli.train_options import TrainOptions
from xformer.finetune import TrainConfig, lora
from xformer.ops import RandomKey
from xformer.training import Diverged
from xformer.training.run import checkpoints


@pytest.fixture(params=[False, True], ids=["whole", "adapters"])
def adapters(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("name", slow_but(["causal", "classify", "seq2seq"], finetune.TASKS))
def test_killed_it_goes_on_bit_for_bit(name: str, adapters: bool, tmp_path: Path) -> None:
    """Every loss and gradient norm of the log, the state at the end, and the model."""
    tuning = Tuning(name, tmp_path / "base", adapters)
    tuning.train(tmp_path / "never")
    tuning.train(tmp_path / "killed", 2, kill=True)  # before the first checkpoint
    assert not checkpoints(tmp_path / "killed")
    with pytest.warns(UserWarning, match="ends with step 2, but the run resumes after step 0"):
        tuning.train(tmp_path / "killed", 5, kill=True)
    assert len(runs.rows(tmp_path / "killed")) == 5  # of the steps 4 and 5 nothing else is left
    tuning.train(tmp_path / "killed", 8)  # resumes after 4, the best one, and is stopped
    tuning.train(tmp_path / "killed", 11, kill=True)
    tuning.train(tmp_path / "killed")
    require_alike(tmp_path / "killed", tmp_path / "never")


def test_dropout_and_masks_are_drawn(tmp_path: Path) -> None:
    """Or the tests above would not know of a generator that is lost."""
    for name in DROPOUT:
        task, params, found, *_ = Tuning(name, tmp_path / "base").begun(CONFIG)
        batch = task.batch(found[:3], np.random.default_rng(0))
        losses = [float(task.loss(params, batch, NUMPY, RandomKey(0, i))[0]) for i in (1, 2)]
        assert losses[0] != losses[1], name


def test_it_trains_on_with_more_steps(adapters: bool, tmp_path: Path) -> None:
    """With a constant rate, ten steps and six more are sixteen."""
    tuning = Tuning("causal", tmp_path / "base", adapters)
    options: dict[str, Any] = {"schedule": "constant", "free": ["training.steps"], "eval_every": 5}
    tuning.train(tmp_path / "never", steps=16, **options)
    tuning.train(tmp_path / "run", steps=10, **options)
    tuning.train(tmp_path / "run", steps=16, **options)
    require_alike(tmp_path / "run", tmp_path / "never")


def test_it_goes_back_to_an_older_step(tmp_path: Path) -> None:
    tuning = Tuning("classify", tmp_path / "base", adapters=True)
    tuning.train(tmp_path / "never")
    tuning.train(tmp_path / "run", 7)
    with pytest.warns(UserWarning, match="the old log is kept: log"):
        tuning.train(tmp_path / "run", 8, at=6)
    tuning.train(tmp_path / "run")
    require_alike(tmp_path / "run", tmp_path / "never")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimiser": "lion"}, 'training.optimiser is "adamw" there, "lion" here'),
        ({"accumulate": 1}, "training.accumulate is 2 there, 1 here"),
        ({"batch_size": 2}, "data.training is .* there"),
        ({"seed_of_params": 1}, 'model.parameters is "[0-9a-f]{64}" there, "[0-9a-f]{64}" here'),
    ],
)
def test_another_training_is_refused(
    changes: dict[str, Any], message: str, adapters: bool, tmp_path: Path
) -> None:
    tuning = Tuning("classify", tmp_path / "base", adapters)
    tuning.train(tmp_path / "run", 4)
    with pytest.raises(ValueError, match=f"is of another run: .*{message}"):
        tuning.train(tmp_path / "run", **changes)


def test_another_task_rank_or_model_is_refused(tmp_path: Path) -> None:
    Tuning("causal", tmp_path / "base", adapters=True).train(tmp_path / "run", 4)
    with pytest.raises(ValueError, match=r'task\.name is "Causal" there, "Completion" here'):
        Tuning("prefix", tmp_path / "base", adapters=True).train(tmp_path / "run")
    with pytest.raises(ValueError, match=r"adapters\.\S+\.rank is 2 there, absent here"):
        Tuning("causal", tmp_path / "base").train(tmp_path / "run")
    task, params, *rest = Tuning("causal", tmp_path / "base").begun(CONFIG)
    for rank, alpha, wanted in ((3, 6, "rank is 2 there, 3"), (2, 5, r"scale is 2.0 there, 2.5")):
        other = lora.attach(params, rank, alpha, ("*",))
        with (
            pytest.raises(ValueError, match=wanted),
            finetune.run(tmp_path / "run", task, other, *rest),
        ):
            pass


def test_a_model_that_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    task, *rest = Tuning("causal", tmp_path / "base").begun(CONFIG)
    task = dataclasses.replace(task, model=dataclasses.replace(task.model, hf_config=None))
    with pytest.raises(ValueError, match="run: the model must be a pretrained one"):
        finetune.run(tmp_path / "run", task, *rest)
    assert not (tmp_path / "run").exists()


def test_adapters_have_small_checkpoints(tmp_path: Path) -> None:
    """The file has the adapters and two moments of each, and nothing of the model."""
    tuning = Tuning("causal", tmp_path / "base", adapters=True)
    state = tuning.train(tmp_path / "run")
    trained = tree.trained(state.params)
    (*_, newest) = checkpoints(tmp_path / "run").values()
    arrays = training.read_state(newest).arrays
    assert all(name.endswith((".a", ".b")) for name in arrays)
    assert sum(a.nbytes for a in arrays.values()) == 3 * tree.nbytes(trained)
    whole = Tuning("causal", tmp_path / "base").train(tmp_path / "whole")
    (*_, large) = checkpoints(tmp_path / "whole").values()
    about = len(training.read_state(newest).path.read_bytes()) - 3 * tree.nbytes(trained)
    assert newest.stat().st_size - about == 3 * tree.nbytes(trained)
    assert large.stat().st_size > 3 * tree.nbytes(whole.params) > 4 * newest.stat().st_size


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """By SIGKILL, at random and at every kind of moment of writing: see killing.py."""
    if not hasattr(os, "fork"):
        pytest.skip("the system has no fork")
    command = [sys.executable, "killing.py", "--finetune", "--folder", tmp_path, "--kills", "8"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "bit for bit that which never was" in done.stdout


# ---- Accumulation ----


@pytest.mark.parametrize("name", ["causal", "prefix", "classify", "seq2seq"])
def test_batches_of_a_step_are_one_large_batch(name: str, adapters: bool, tmp_path: Path) -> None:
    """Of texts of many lengths, so that a mean of the batches' means would be another loss."""
    still = {"attention_probs_dropout_prob": 0.0} if name == "classify" else {}
    task, params = made(name, tmp_path, config=still)  # each batch has other dropout masks
    if adapters:
        params = lora.attach(params, 2, 4, ("*",))
    found = examples(task, *records(name, 24))
    if name == "causal":
        counts = {task.batch([e], np.random.default_rng(0)).n_targets for e in found}
        assert len(counts) > 3
    steps = []
    for size, n in ((8, 1), (2, 4)):
        config = TrainConfig(6, size, accumulate=n, lr=1e-2, warmup=1)
        steps.append(list(finetune.train(task, params, found, config, NUMPY)))
    for one, four in zip(*steps, strict=True):
        np.testing.assert_allclose(four.loss, one.loss, rtol=1e-11)
        np.testing.assert_allclose(four.norm, one.norm, rtol=1e-9)
        assert four.tokens == one.tokens


# ---- The command ----


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with dropout and its data, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, config, style in (
        ("base", DROPOUT["causal"], "gpt"),
        ("wide", DROPOUT["causal"] | {"n_embd": 32}, "gpt"),
    ):
        Path(name).mkdir()
        write_folder(Path(name), config, style)
    write_lines(Path("data.jsonl"), records("causal", 60))
    write_lines(Path("other.jsonl"), records("causal", 60, seed=1))
    labelled = [{**row, "label": "xyz"[row["label"]]} for row in records("classify", 60)]
    write_lines(Path("labels.jsonl"), labelled)


COMMAND = [
    *("finetune", "--model", "base", "--data", "data.jsonl", "--steps", "20", "--lr", "0.01"),
    *("--batch", "3", "--accumulate", "2", "--warmup", "4", "--clip", "0.5", "--seed", "1"),
    *("--weight-decay", "0.1", "--validate-every", "6", "--checkpoint-every", "5"),
]
KINDS: dict[str, list[str]] = {
    "whole": [],
    "adapters": ["--lora", "2"],
    "classes": ["--data", "labels.jsonl", "--optimiser", "lion"],
    "classes-adapters": ["--data", "labels.jsonl", "--lora", "2", "--optimiser", "adafactor"],
}


KILLED = """
import os, signal, sys
from xformer.cli import main
from xformer.training import run

append = run.append

def appended(log, line):
    append(log, line)
    if b'"step": 13,' in line:
        os.kill(os.getpid(), signal.SIGKILL)

run.append = appended
sys.exit(main())
"""


def weights(folder: str) -> dict[str, bytes]:
    """The saved model and adapter."""
    files = ("*.safetensors", "adapter/*")
    return {str(p.relative_to(folder)): p.read_bytes() for f in files for p in Path(folder).glob(f)}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", KINDS)
def test_the_command_killed_goes_on(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By SIGKILL, in a process of its own, three steps after a checkpoint."""
    if os.name != "posix":
        pytest.skip("the system has no SIGKILL")
    command = [*COMMAND, *KINDS[kind]]
    assert main([*command, "--out", "never"]) == 0
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    args = [sys.executable, "-c", KILLED, *command, "--out", "killed"]
    done = subprocess.run(args, capture_output=True, text=True, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert max(checkpoints("killed")) == 12 and len(runs.rows(Path("killed"))) == 13
    capsys.readouterr()
    assert main(["finetune", "--resume", "killed"]) == 0
    out = capsys.readouterr().out
    assert "resuming after step 12" in out and "saved to killed after 20 steps" in out
    assert runs.rows(Path("killed")) == runs.rows(Path("never"))
    assert len(weights("never")) == (3 if kind == "adapters" else 1)
    assert weights("killed") == weights("never")


def stopped(n: int, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """The command, stopped by Ctrl-C in step n."""

    def train(*args: Any, **kwargs: Any) -> Iterator[training.Step]:
        for step in real(*args, **kwargs):
            if step.step == n:
                signal.raise_signal(signal.SIGINT)
            yield step

    real = finetune.train
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "train", train)
        assert main([*COMMAND, "--out", "run", *options]) == 0


@pytest.mark.usefixtures("here")
def test_a_last_step_that_is_better_is_saved_until_the_run_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its best model is then again the one of step 6, as in a run that was never stopped."""
    losses = itertools.cycle([5.0, 9.0, 9.0, 9.0])  # after the steps 6, 12, 18 and 20
    monkeypatch.setattr("xformer.training.loop.evaluate", lambda *_, **__: next(losses))
    assert main([*COMMAND, "--out", "never"]) == 0
    assert "the best model is from step 6" in capsys.readouterr().out
    stopped(10, monkeypatch)
    said = capsys.readouterr()
    assert "stopped early, after step 10" in said.err
    assert "the best model" not in said.out and "saved to run after 10 steps" in said.out
    assert "to resume: xformer finetune --resume run\n" in said.out
    last = training.read_state(checkpoints("run")[10])
    assert last.numbers["best_step"] == 6
    table = pretrained.load("run")[1].embed.table
    assert np.array_equal(table, last.arrays["params.embed.table"])
    assert main(["finetune", "--resume", "run"]) == 0
    assert runs.rows(Path("run")) == runs.rows(Path("never"))
    assert weights("run") == weights("never")


@pytest.mark.usefixtures("here")
def test_a_finished_run_trains_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Data, model and options are the run's; what ends it may be another."""
    constant = ["--schedule", "constant", "--validate-every", "5"]
    assert main([*COMMAND, *constant, "--out", "never"]) == 0
    assert main([*COMMAND, *constant, "--steps", "10", "--out", "run"]) == 0
    assert "to resume: xformer finetune --resume run --steps 20\n" in capsys.readouterr().out
    shutil.move("base", "moved")
    shutil.move("data.jsonl", "moved.jsonl")
    moved = ["--model", "moved", "--data", "moved.jsonl", "--checkpoint-every", "2"]
    assert main(["finetune", "--resume", "run", "--steps", "20", *moved]) == 0
    assert "resuming after step 10" in capsys.readouterr().out
    assert runs.rows(Path("run")) == runs.rows(Path("never"))
    assert weights("run") == weights("never")
    log = Path("run/log.jsonl").read_bytes()
    assert main(["finetune", "--resume", "run", *moved]) == 0
    assert "saved to run after 20 steps" in capsys.readouterr().out
    assert Path("run/log.jsonl").read_bytes() == log


@pytest.mark.usefixtures("here")
def test_patience(capsys: pytest.CaptureFixture[str]) -> None:
    still = ["--lr", "0", "--patience", "1", "--validate-every", "2", "--out", "run"]
    assert main([*COMMAND, *still]) == 0
    said = capsys.readouterr()
    assert "validation has not improved, after step 4" in said.err
    assert "to resume: xformer finetune --resume run --patience 2\n" in said.out
    assert main(["finetune", "--resume", "run", "--patience", "2"]) == 0
    assert len(runs.rows(Path("run"))) == 6


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume", "absent"], "absent does not exist"),
        (["--resume", "run", "--lora", "4"], "--lora: the run in run has 2, got 4"),
        (["--resume", "run", "--task", "masked"], "--task: the run in run has causal, got masked"),
        (["--resume", "run", "--optimiser", "sgd"], "--optimiser: the run in run has adamw, got s"),
        (["--resume", "run", "--warmup", "1"], "--warmup: the run in run has 4, got 1"),
        (["--resume", "run", "--freeze", "a", "b"], "--freeze: the run in run has None, got a b"),
        (["--resume", "run", "--model", "wide"], "another run: model.source.n_embd is 24 there"),
        (["--resume", "run", "--model", "similar"], "another run: model.parameters is"),
        (["--resume", "run", "--data", "other.jsonl"], "another run: data.training is"),
        (["--resume", "run", "--out", "new"], "--out names a new folder: it excludes --resume"),
        (["--resume", "run", "--steps", "5"], "--steps: must be at least the 20 of the run in run"),
        (["--resume", "run", "--resume-step", "2"], "has no checkpoint of step 2; it has those of"),
        (["--model", "base", "--data", "data.jsonl", "--resume-step", "3"], "-step needs --resume"),
        (["--data", "data.jsonl"], "--model must be given, or --resume"),
        (["--model", "base"], "--data must be given, or --resume"),
        (["--model", "base", "--data", "data.jsonl", "--accumulate", "0"], "--accumulate must be"),
        (["--model", "base", "--data", "data.jsonl", "--warmup", "-1"], "--warmup must be an int"),
        (["--model", "base", "--data", "data.jsonl", "--keep-checkpoints", "0"], "--keep-checkpoi"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped(3, monkeypatch, "--lora", "2")
    model = pretrained.load("base")[0]
    shutil.copytree("base", "similar")
    pretrained.save(model, model.init(1), "similar")
    capsys.readouterr()
    before = {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()}
    assert main(["finetune", *options]) == 1
    err = capsys.readouterr().err
    assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1
    assert {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()} == before


@pytest.mark.usefixtures("here")
def test_what_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(3, monkeypatch)
    shutil.move("base", "moved")
    assert main(["finetune", "--resume", "run"]) == 1
    wanted = "the run in run began from base, which is not there: give --model"
    assert wanted in capsys.readouterr().err
    for command, folder in (("train", "run"), ("finetune", "trained")):
        if command == "finetune":
            Path("text.txt").write_text("the quick brown fox " * 2000)
            tiny = ["--preset", "tiny", "--steps", "1", "--data", "text.txt", "--out", folder]
            assert main(["train", *tiny]) == 0
        capsys.readouterr()
        assert main([command, "--resume", folder]) == 1
        other = {"train": "finetune", "finetune": "train"}[command]
        wanted = f"{folder} is a run of xformer {other}: xformer {other} --resume {folder}\n"
        assert capsys.readouterr().err.endswith(wanted)


@pytest.mark.usefixtures("here")
def test_what_a_killed_process_left_half_written_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(3, monkeypatch, "--lora", "2")
    names = (".run.json.0123abcd.part", "adapter/.adapter_model.safetensors.0123abcd.part")
    half = [Path("run", name) for name in names]
    for path in half:
        path.write_bytes(b"half")
    assert main(["finetune", "--resume", "run"]) == 0
    assert not any(path.exists() for path in half)


@pytest.mark.usefixtures("here")
def test_the_command_that_an_occupied_folder_names_resumes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command names the command whose run it is."""
    Path("text.txt").write_text("the quick brown fox " * 2000)
    tiny = ["train", "--preset", "tiny", "--steps", "1", "--data", "text.txt"]
    assert main([*tiny, "--out", "a trained run"]) == 0
    stopped(3, monkeypatch)
    for command in (tiny, COMMAND):
        for folder, kind in (("a trained run", "train"), ("run", "finetune")):
            capsys.readouterr()
            assert main([*command, "--out", folder]) == 1
            (said,) = re.findall(r"resume the run in it: xformer (.*)", capsys.readouterr().err)
            assert said.startswith(f"{kind} ") and main(shlex.split(said)) == 0
            assert "saved to" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_a_run_that_failed_before_its_first_checkpoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*_: Any) -> None:
        raise MemoryError("no room for 9 EB")

    for again in (
        ["--resume", "run"],
        [*COMMAND[1:], "--out", "run"],
    ):
        with monkeypatch.context() as patch:
            patch.setattr(training.Run, "begin", begin)
            assert main([*COMMAND, "--batch", "50", "--out", "run"]) == 1
        assert not checkpoints("run")
        assert main(["finetune", *again, "--lora", "2", "--steps", "2", "--batch", "2"]) == 0
        assert json.loads(Path("run/run.json").read_text())["notes"]["batch"] == 2
        assert Path("run/adapter").is_dir() and checkpoints("run")
        shutil.rmtree("run")


@pytest.mark.usefixtures("here")
def test_two_do_not_train_in_one_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(3, monkeypatch)
    capsys.readouterr()
    with lock.locked(Path("run"), "trains"):
        assert main(["finetune", "--resume", "run"]) == 1
    assert "run is in use: another process trains there" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_a_disk_that_fills_leaves_the_last_checkpoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    assert main([*COMMAND, "--out", "never"]) == 0
    stopped(5, monkeypatch)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert main(["finetune", "--resume", "run"]) == 1
    assert "no space left on device" in capsys.readouterr().err
    assert main(["finetune", "--resume", "run"]) == 0
    assert runs.rows(Path("run")) == runs.rows(Path("never"))
    assert weights("run") == weights("never")


@pytest.mark.usefixtures("here")
def test_training_that_diverges_names_model_and_checkpoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*args: Any, **kwargs: Any) -> Iterator[training.Step]:
        for step in real(*args, **kwargs):
            if step.step > last:
                raise Diverged("the loss is nan")
            yield step

    real = finetune.train
    monkeypatch.setattr(finetune, "train", train)
    for last, model in (
        (5, "run-5 has the model of the last checkpoint, which was not validated"),
        (7, "run-7 has the model of step 6, the best validated one"),
    ):
        folder = f"run-{last}"
        assert main([*COMMAND, "--out", folder]) == 1
        checkpoint = f"{folder}/checkpoints/step-0000000{min(last, 6)}.safetensors"
        wanted = f"the loss is nan; {model}; the last good checkpoint is {checkpoint}\n"
        assert capsys.readouterr().err.endswith(wanted)


def test_help_texts_are_those_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    """But for defaults."""
    import argparse

    parsers = []
    for command in (TrainOptions, FinetuneOptions):
        parsers.append(argparse.ArgumentParser())
        add_options(parsers[-1], command)
    train, tune = ({a.option_strings[0]: a for a in p._actions} for p in parsers)
    shared = [
        *("--warmup", "--accumulate", "--clip", "--weight-decay", "--checkpoint-every", "--resume"),
        *("--keep-checkpoints", "--resume-step", "--validate-every", "--patience", "--optimiser"),
    ]
    for name in shared:
        texts = [str(options[name].help).partition("(default")[0] for options in (train, tune)]
        assert texts[0].partition("default: ")[0] == texts[1].partition("default: ")[0], name
        assert train[name].type == tune[name].type and train[name].choices == tune[name].choices


@pytest.mark.usefixtures("here")
def test_the_options_reach_the_configuration() -> None:
    assert main([*COMMAND, "--steps", "2", "--patience", "7", "--out", "run"]) == 0
    about = json.loads(Path("run/run.json").read_text())["about"]["training"]
    wanted = {
        **{"accumulate": 2, "batch_size": 3, "warmup": 4, "clip": 0.5, "weight_decay": 0.1},
        **{"eval_every": 6, "patience": 7, "seed": 1, "lr": 0.01, "optimiser": "adamw"},
    }
    assert {name: about[name] for name in wanted} == wanted


@pytest.mark.usefixtures("here")
def test_its_curves_are_drawn() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert main([*COMMAND, "--lora", "2", "--out", "run"]) == 0
    assert main(["plot", "run", "--out", "run.png"]) == 0
    assert Path("run.png").stat().st_size > 10_000
