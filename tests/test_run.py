"""A run's folder: what is in it, what is refused, and what is left after anything goes wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import runs
from runs import NUMPY, begun, opened, rows, trained

import xformer as xf
from xformer import training
from xformer.training import CheckpointError, Diverged, run
from xformer.training.run import checkpoints


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_what_is_in_it(tmp_path: Path) -> None:
    state = trained(tmp_path / "run")
    assert names(tmp_path / "run") == [
        *("checkpoints", "config.json", "lock", "log.jsonl", "model.safetensors", "run.json")
    ]
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 31))
    lines = (tmp_path / "run/log.jsonl").read_text().splitlines()
    assert all(
        list(json.loads(line))
        == [*("step", "loss", "norm", "lr", "tokens", "seconds", "memory", "validation")]
        for line in lines
    )
    assert set(checkpoints(tmp_path / "run")) == {28, 30, state.best_step}
    model, params = training.load(tmp_path / "run", NUMPY)
    assert model == runs.MODEL
    best = training.read_state(checkpoints(tmp_path / "run")[state.best_step])
    for name, leaf in xf.tree.flatten(params).items():
        assert np.array_equal(leaf, best.arrays[f"ema.{name}"]), name


def test_the_best_and_the_last_are_kept(tmp_path: Path) -> None:
    with opened(tmp_path, every=2, keep=3) as found:
        state = begun()
        for n in range(1, 13):
            best = {"best_step": 4, "best": 1.0} if n >= 4 else {}
            found.save(state._replace(step=n, **best))
    assert list(checkpoints(tmp_path)) == [4, 10, 11, 12]


def test_the_model_is_the_best_one(tmp_path: Path) -> None:
    def bias(state: training.State, step: int, best_step: int) -> training.State:
        return state._replace(
            ema=xf.tree.map(lambda p: np.full_like(p, step), state.ema),
            **{"step": step, "best_step": best_step},
        )

    with opened(tmp_path) as found:
        for step, best_step, kept in ((1, 0, 1), (2, 2, 2), (3, 2, 2), (4, 4, 4)):
            found.save(bias(begun(), step, best_step))
            assert training.load(tmp_path, NUMPY)[1].embed.table[0, 0] == kept


def test_a_run_of_a_model_of_ones_own(tmp_path: Path) -> None:
    """Nothing but the loss need be known of it."""
    trained(tmp_path / "run", model=None, n=3)
    assert names(tmp_path / "run") == ["checkpoints", "lock", "log.jsonl", "run.json"]


# Going on


def test_a_log_ends_with_its_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, n=4)  # checkpoints of 3 and 4
    with (tmp_path / "log.jsonl").open("ab") as log:
        log.write(b'{"step": 5, "loss": 1}\n{"step": 6, "lo')
    with opened(tmp_path) as found:
        found.begin(begun())
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    trained(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    trained(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_named_and_an_older_one(tmp_path: Path) -> None:
    trained(tmp_path / "never")
    trained(tmp_path / "run", n=13)
    newest, older = (checkpoints(tmp_path / "run")[step] for step in (13, 12))
    damage(newest)
    content = newest.read_bytes()
    log = (tmp_path / "run/log.jsonl").read_bytes()
    with pytest.raises(
        CheckpointError,
        match=r"step-00000013.* is damaged: .*; that of step 12 is whole, and --at 12 goes on fr",
    ):
        trained(tmp_path / "run")
    assert newest.read_bytes() == content and older.is_file()
    assert (tmp_path / "run/log.jsonl").read_bytes() == log

    trained(tmp_path / "run", at=12)
    aside = newest.with_suffix(".aside")
    assert aside.read_bytes() == content
    aside.unlink()
    runs.require_alike(tmp_path / "run", tmp_path / "never")


def test_all_are_damaged(tmp_path: Path) -> None:
    trained(tmp_path, n=7)
    for path in checkpoints(tmp_path).values():
        damage(path)
    with pytest.raises(CheckpointError, match="there is no older one that is whole"):
        trained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no checkpoint of step 5; there are those of"):
        trained(tmp_path, at=5)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """As when files are copied between folders; nothing is lost."""
    trained(tmp_path / "run", n=7)
    other = xf.GPT(vocab_size=16, n_layers=1, d_model=12, n_heads=2, max_len=8)
    start = training.start(other.init(0), runs.CONFIG)
    newest = checkpoints(tmp_path / "run")[7]
    for about, message in (
        (runs.ABOUT, r"params.embed.table is float32 \(16, 12\) there, float32 \(16, 8\) here"),
        ({"model": {"layers": 2}, "data": "tokens"}, "model.layers is 2 there, 1 here"),
        ({"model": {"layers": 1}, "data": "others"}, 'data is "others" there, "tokens" here'),
    ):
        training.write_state(newest, start, NUMPY, about)
        before = newest.read_bytes()
        with pytest.raises(ValueError, match=message):
            trained(tmp_path / "run")
        assert newest.read_bytes() == before and len(rows(tmp_path / "run")) == 7


def test_another_training_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, n=2)
    with (
        pytest.raises(ValueError, match=r"run\.json is of another run: data is .tokens. there"),
        training.Run(tmp_path, NUMPY, runs.ABOUT | {"data": "others"}),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"run\.json is damaged"),
        ("[" * 100_000, r"run\.json is damaged"),
        ("[]", r"run\.json is damaged"),
        ('{"format": "other"}', r"run\.json: format must be xformer-run-1, got 'other'"),
    ],
)
def test_a_damaged_description(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=message), opened(tmp_path):
        pass


# The folder


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"is no run and not empty: it has thesis\.tex"):
        trained(tmp_path)
    assert names(tmp_path) == ["thesis.tex"]


def test_what_a_killed_process_left_half_written_goes(tmp_path: Path) -> None:
    trained(tmp_path, n=2)
    for path in (".model.safetensors.00.part", "checkpoints/.step-00000003.1.part", ".tmpL628h0"):
        (tmp_path / path).write_text("half")
    with opened(tmp_path):
        assert not list(tmp_path.rglob(".*"))


def test_two_do_not_train_in_one_folder(tmp_path: Path) -> None:
    code = "import runs, sys, pathlib; runs.trained(pathlib.Path(sys.argv[1]))"
    with opened(tmp_path):
        with pytest.raises(BlockingIOError, match="is in use: another process trains there"):
            trained(tmp_path)
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1 and "another process trains there" in done.stderr
    trained(tmp_path, n=1)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        trained(tmp_path / "file" / "run")


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    if os.name != "posix" or os.geteuid() == 0:
        pytest.skip("whom the system lets write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        trained(tmp_path)


@pytest.mark.parametrize("options", [{"every": 0}, {"keep": 0}])
def test_impossible_numbers_are_refused(options: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Run: .* must be an int of at least 1, got 0"):
        opened(tmp_path, **options)
    assert names(tmp_path) == []


# The disk


def test_a_disk_too_small_is_noticed_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=1000)
    monkeypatch.setattr(run.shutil, "disk_usage", lambda path: free)
    with pytest.raises(OSError, match=r"the checkpoints need \S+ MB, and 0\.0 MB are free"):
        trained(tmp_path)
    with opened(tmp_path) as found:
        free.free = found.space_needed(begun())
    trained(tmp_path)


def test_the_space_that_is_asked_for_is_enough(tmp_path: Path) -> None:
    most = 0
    with opened(tmp_path) as found:
        state = found.begin(begun())
        needed = found.space_needed(state)
        for _ in found.record(runs.steps(state)):
            used = sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors"))
            most = max(most, used)
    one = max(p.stat().st_size for p in checkpoints(tmp_path).values())
    assert most + one < 1.5 * needed + 50_000  # of headers, which are large beside such a model


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def half(arrays: Any, path: Path, **_: Any) -> None:
    path.write_bytes(b"half")
    full()


@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [
        (training.state, "save_file", half),
        (training.checkpoint, "save_file", half),
        (xf.files, "_sync", full),
        (os, "replace", full),
        (run, "_line", full),
    ],
    ids=["state", "model", "sync", "rename", "log"],
)
def test_a_disk_that_fills_leaves_the_last_good_checkpoint(
    place: Any, name: str, instead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "never")
    trained(tmp_path / "run", n=3)
    before = checkpoints(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(place, name, instead)
        with pytest.raises(OSError, match=r"No space .*; the last good checkpoint is .*00003\.saf"):
            trained(tmp_path / "run")
    assert checkpoints(tmp_path / "run") == before
    assert not list(tmp_path.rglob("*.part"))
    trained(tmp_path / "run")
    runs.require_alike(tmp_path / "run", tmp_path / "never")


# Losses that go wrong


def test_a_loss_that_is_not_finite_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    def loss(params: Any, batch: Any, place: Any, key: Any = None) -> Any:
        value, cache = training.loss_of(runs.MODEL)(params, batch, place, key)
        return (value * np.nan if key is not None and key.step > 10 else value), cache

    with opened(tmp_path) as found:
        steps = training.train(loss, found.begin(begun()), runs.source(), runs.CONFIG, NUMPY)
        with pytest.raises(
            Diverged, match=r"the loss of step 6 is nan.*; the last good checkpoint is .*-00000003"
        ):
            list(found.record(steps))
    assert len(rows(tmp_path)) == 5


def test_what_is_not_finite_is_null_in_the_log(tmp_path: Path) -> None:
    step = next(runs.steps(begun()))
    line = json.loads(run._line(step._replace(validation=float("nan"), norm=float("inf"))))
    assert line["validation"] is None and line["norm"] is None and line["step"] == 1


def test_a_copied_folder_goes_on(tmp_path: Path) -> None:
    """Nothing in it is bound to its place."""
    trained(tmp_path / "never")
    trained(tmp_path / "run", n=11)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    trained(tmp_path / "moved")
    runs.require_alike(tmp_path / "moved", tmp_path / "never")
