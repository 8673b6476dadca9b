"""A run's folder: what is in it, what is refused, and what is left after anything goes wrong."""

from __future__ import annotations

import dataclasses
import errno
import io
import itertools
import json
import math
import os
import shutil
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import runs
import safetensors.numpy
from hostile import files_of_at_most
from runs import NUMPY, begun, opened, rows, trained

import xformer as xf
from xformer import training
from xformer.base import files, lock
from xformer.distributed.world import World, threads
from xformer.training import CheckpointError, Diverged, log, run
from xformer.training.run import checkpoints, path_of


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


def test_it_says_what_made_it(tmp_path: Path) -> None:
    """For people: with another version it goes on."""
    trained(tmp_path, n=1, notes={"lr": 1})
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["about"] == runs.ABOUT and content["notes"] == {"lr": 1}
    assert content["made"]["xformer"] == xf.__version__ and content["made"]["date"].endswith("UTC")
    assert content["made"]["backend"] == NUMPY.describe() and content["made"]["machine"]
    content["made"] = {"xformer": "0.0.1"}
    (tmp_path / "run.json").write_text(json.dumps(content))
    with opened(tmp_path):
        assert json.loads((tmp_path / "run.json").read_text()) == content


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_its_files_have_the_rights_of_other_files(umask: int, tmp_path: Path) -> None:
    if os.name != "posix":
        pytest.skip("the system has no rights of this kind")
    before = os.umask(umask)
    try:
        with opened(tmp_path) as found:
            found.save(begun()._replace(step=1))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}
    assert "step-00000001.safetensors" in modes and "model.safetensors" in modes
    assert {stat.S_IMODE(mode) for mode in modes.values()} == {0o666 & ~umask}


def test_a_run_of_a_model_of_ones_own(tmp_path: Path) -> None:
    """Nothing but the loss need be known of it."""
    trained(tmp_path / "run", model=None, n=3)
    assert names(tmp_path / "run") == ["checkpoints", "lock", "log.jsonl", "run.json"]


def test_a_run_of_frozen_parameters(tmp_path: Path) -> None:
    params = xf.tree.freeze(runs.MODEL.init(0), "embed.*")
    with opened(tmp_path) as found:
        state = found.begin(training.start(params, runs.CONFIG))
        for step in found.record(runs.steps(state), lambda: True):
            state = step.state
    _, kept = training.load(tmp_path, NUMPY)
    assert np.array_equal(kept.embed.table, params.embed.table.value)
    assert np.array_equal(kept.stack.norm.w, state.averaged.stack.norm.w)


def halved(state: training.State) -> training.State:
    return state._replace(optimiser=xf.tree.map(lambda a: np.asarray(a, np.float16), state.ema))


def test_a_state_that_cannot_be_stored_is_refused_before_the_first_step(tmp_path: Path) -> None:
    wanted = "begin: optimiser.embed.table cannot be stored: .* got float16"
    with opened(tmp_path) as found, pytest.raises(TypeError, match=wanted):
        found.begin(halved(begun()))
    assert checkpoints(tmp_path) == {}


def test_a_state_that_becomes_so_writes_nothing(tmp_path: Path) -> None:
    trained(tmp_path, n=3)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with opened(tmp_path) as found:
        state = found.begin(begun())
        with pytest.raises(TypeError, match=r"save: optimiser\.embed\.table cannot be"):
            found.save(halved(state)._replace(step=4))
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def of_dtype(params: Any, dtype: str) -> Any:
    return xf.tree.map(lambda a: a.astype(dtype), params)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda p: of_dtype(p, "float16"), TypeError, "save: embed.table cannot be .* got float16"),
        (lambda p: of_dtype(p, "int64"), TypeError, "save: .* of one dtype, .*, got int64"),
        (
            lambda p: p._replace(embed=of_dtype(p.embed, "float64")),
            TypeError,
            "save: parameters must be of one dtype, .*, got float32, float64",
        ),
        (
            lambda p: dataclasses.replace(runs.MODEL, blocks=runs.MODEL.blocks * 2).init(0),
            CheckpointError,
            "16 parameters are missing, unexpected or misshapen",
        ),
    ],
)
def test_what_load_would_not_read_is_not_saved(
    change: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        training.save(tmp_path / "a", runs.MODEL, change(runs.MODEL.init(0)), NUMPY)
    assert list(tmp_path.iterdir()) == []


def test_parameters_of_another_byte_order_are_saved(tmp_path: Path) -> None:
    params = runs.MODEL.init(0)
    training.save(tmp_path, runs.MODEL, of_dtype(params, ">f4"), NUMPY)
    _, back = training.load(tmp_path, NUMPY)
    for name, leaf in xf.tree.flatten(back).items():
        assert leaf.dtype == np.float32 and np.array_equal(leaf, xf.tree.flatten(params)[name])


# Going on


def test_a_log_ends_with_its_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, n=4)  # checkpoints of 3 and 4
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "loss": 1}\n{"step": 6, "lo')
    with opened(tmp_path) as found:
        found.begin(begun())
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


STEPS = [b'{"step": %d}\n' % n for n in range(1, 7)]


@pytest.mark.parametrize(
    ("lines", "kept", "why"),
    [
        ([*STEPS[:4], b""], STEPS[:4], None),
        (STEPS, STEPS[:4], None),
        ([*STEPS[:5], b'{"step": 6, "lo'], STEPS[:4], None),
        ([*STEPS[:3], b'{"step": 4}'], STEPS[:4], None),  # all of it, but for its end
        ([*STEPS[:3], b'{"st'], STEPS[:3], None),
        ([*STEPS, b'{"step": 7}\n'], STEPS[:4], "ends with step 7, .* after step 4"),
        ([STEPS[0], b"{st\xffp\n", *STEPS[2:]], [STEPS[0], *STEPS[2:4]], "is damaged in line 2"),
        ([*STEPS[:2], b"[]\n"], STEPS[:2], "is damaged in line 3"),
        ([*STEPS[:2], *STEPS[:4]], STEPS[:4], "is damaged in line 3"),  # twice the same
        ([*STEPS[:2], b"[" * 100_000 + b"\n", *STEPS[3:]], [*STEPS[:2], STEPS[3]], "in line 3"),
    ],
)
def test_what_a_log_loses(
    lines: list[bytes], kept: list[bytes], why: str | None, tmp_path: Path
) -> None:
    """Up to step 4, where a killed process may have been 2 steps further."""
    path, old = tmp_path / "log.jsonl", tmp_path / "log.jsonl.aside"
    path.write_bytes(b"".join(lines))
    expected = nullcontext() if why is None else pytest.warns(UserWarning, match=f"jsonl .*{why}")
    with expected:
        log.shorten(path, 4, 2)
    assert path.read_bytes() == b"".join(kept)
    assert names(tmp_path) == [path.name, *([] if why is None else [old.name])]
    assert why is None or old.read_bytes() == b"".join(lines)


def test_a_run_without_its_checkpoints_loses_nothing(tmp_path: Path) -> None:
    """However few steps it had. Twice: what is aside already stays."""
    olds = []
    for end in ("aside", "aside-2"):
        trained(tmp_path, n=2)
        kept = [tmp_path / "log.jsonl", tmp_path / "model.safetensors"]
        olds += [(path.with_name(f"{path.name}.{end}"), path.read_bytes()) for path in kept]
        for path in checkpoints(tmp_path).values():
            path.unlink()
        expected = pytest.warns(UserWarning, match=r"ends with step 2, .*resumes after step 0")
        with expected, opened(tmp_path) as found:
            assert found.begin(begun()).step == 0
        assert rows(tmp_path) == []
    assert all(path.read_bytes() == content for path, content in olds)


class Slow(io.FileIO):
    """A file on a system that takes three bytes at a time."""

    def write(self, data: Any) -> int:
        return super().write(data[:3])


def test_all_of_a_line_is_written_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Slow(path, "ab") as file:
        log.append(file, STEPS[0])
        with files_of_at_most(len(STEPS[0]) + 7), pytest.raises(OSError, match="large"):
            log.append(file, STEPS[1])
        assert path.read_bytes() == STEPS[0]
        log.append(file, STEPS[2])
    assert path.read_bytes() == STEPS[0] + STEPS[2]


def stepped(found: training.Run, steps: dict[int, int]) -> None:
    """Save states of steps, whose best ones are given; their parameters tell which they are."""
    for step, best in steps.items():
        average = xf.tree.map(lambda p, step=step: np.full_like(p, step), begun().ema)
        state = begun()._replace(ema=average, step=step, best_step=best, best=1 / (best + 1))
        found.save(state)


@pytest.mark.parametrize(
    ("best", "kept"),
    [
        ({1: 1, 2: 1, 3: 1}, 1),  # the same one, which is there
        ({1: 0, 2: 2, 3: 3}, 2),
        ({1: 0, 2: 0, 3: 3}, 2),  # none was measured
        ({1: 1, 2: 1, 3: 3}, 2),  # that of step 1 was removed with step 3
    ],
)
def test_going_back_brings_back_the_model(best: dict[int, int], kept: int, tmp_path: Path) -> None:
    with opened(tmp_path) as found:
        stepped(found, best)
        state = found.begin(begun(), at=2)
        assert training.load(tmp_path, NUMPY)[1].embed.table[0, 0] == kept
        wanted = {"step": 2, "best_step": 0 if best == {1: 1, 2: 1, 3: 3} else best[2]}
        assert {name: getattr(state, name) for name in wanted} == wanted
        assert math.isinf(state.best) == (best == {1: 1, 2: 1, 3: 3})
    with opened(tmp_path) as found:  # and it stays so
        assert repr(found.begin(begun())) == repr(state)
        assert training.load(tmp_path, NUMPY)[1].embed.table[0, 0] == kept


def test_what_was_set_aside_stays(tmp_path: Path) -> None:
    with opened(tmp_path) as found:
        for end in ("aside", "aside-2"):
            stepped(found, {1: 1, 2: 2})
            contents = [path_of(tmp_path, 2), tmp_path / "model.safetensors"]
            before = [path.read_bytes() for path in contents]
            found.begin(begun(), at=1)
            olds = [path.with_name(f"{path.name}.{end}") for path in contents]
            assert [path.read_bytes() for path in olds] == before
    assert len(list(tmp_path.rglob("*.aside*"))) == 4


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
    lines = (tmp_path / "run/log.jsonl").read_bytes()
    with pytest.raises(
        CheckpointError,
        match=r"step-00000013.* is damaged: .*; that of step 12 is intact: .* --resume-step 12",
    ):
        trained(tmp_path / "run")
    assert newest.read_bytes() == content and older.is_file()
    assert (tmp_path / "run/log.jsonl").read_bytes() == lines

    with pytest.warns(
        UserWarning, match=r"ends with step 13, .* resumes after step 12; the old log"
    ):
        trained(tmp_path / "run", at=12)
    assert newest.with_name(f"{newest.name}.aside").read_bytes() == content
    assert (tmp_path / "run/log.jsonl.aside").read_bytes() == lines
    runs.require_alike(tmp_path / "run", tmp_path / "never")


def test_all_are_damaged(tmp_path: Path) -> None:
    trained(tmp_path, n=7)
    for path in checkpoints(tmp_path).values():
        damage(path)
    with pytest.raises(CheckpointError, match="no older one is intact"):
        trained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no checkpoint of step 5; it has those of"):
        trained(tmp_path, at=5)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """As when files are copied between folders; nothing is lost."""
    trained(tmp_path / "run", n=7)
    other = xf.GPT(vocab_size=16, n_layers=1, d_model=12, n_heads=2, max_len=8)
    start = training.start(other.init(0), runs.CONFIG)._replace(step=7)
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


def test_a_folder_without_a_checkpoint_is_used_again(tmp_path: Path) -> None:
    """As after an error before the first one; a model without a checkpoint is not written over."""
    with pytest.raises(ZeroDivisionError), opened(tmp_path):
        raise ZeroDivisionError
    other = runs.ABOUT | {"data": "others"}
    with training.Run(tmp_path, NUMPY, other, notes={"a": 1}):
        assert run.read_run(tmp_path)["about"] == other
        assert run.read_run(tmp_path)["notes"] == {"a": 1}
    trained(tmp_path, n=2)
    assert run.read_run(tmp_path)["about"] == runs.ABOUT
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="is of another run"):
        training.Run(tmp_path, NUMPY, other).__enter__()


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
    for path in (
        ".model.safetensors.0123abcd.part",
        "checkpoints/.step-00000003.safetensors.89abcdef.part",
        ".tmpL628h0",
    ):
        (tmp_path / path).write_text("half")
    own = [".movie.part", ".tmp-notes", "checkpoints/.tmpL628h0"]
    (tmp_path / own[2]).mkdir()  # a folder, which safetensors never makes
    for path in own[:2]:
        (tmp_path / path).write_text("of the user")
    with opened(tmp_path):
        assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob(".*")} == {*own}


STRANGERS = [
    *("step-005.safetensors", "step-00000001.safetensors.bak", "step-00000002 (1).safetensors"),
    *(
        "Copy of step-00000002.safetensors",
        "step-best.safetensors",
        "notes.txt",
        "step-٣.safetensors",
    ),
]


def test_only_names_of_checkpoints_count(tmp_path: Path) -> None:
    """A stranger is named once, at the start, and is neither read nor deleted."""
    trained(tmp_path / "never")
    trained(tmp_path / "run", n=2)
    folder = tmp_path / "run" / "checkpoints"
    for name in STRANGERS:
        (folder / name).write_bytes(name.encode())
    (folder / "step-00000001.safetensors").mkdir()  # as a folder
    with pytest.warns(
        UserWarning, match=r"no checkpoints of this run, .* kept: Copy of s"
    ) as found:
        trained(tmp_path / "run")
    assert [w.message for w in found if "ignored" in str(w.message)] == [found[0].message]
    for name in STRANGERS:
        assert (folder / name).read_bytes() == name.encode()
        (folder / name).unlink()
    assert (folder / "step-00000001.safetensors").is_dir()
    assert not set(checkpoints(tmp_path / "run").values()) & {folder / name for name in STRANGERS}
    runs.require_alike(tmp_path / "run", tmp_path / "never")


def test_a_copy_under_the_name_of_another_step(tmp_path: Path) -> None:
    trained(tmp_path, n=7)
    folder = tmp_path / "checkpoints"
    (folder / "step-00000005.safetensors").write_bytes(path_of(tmp_path, 6).read_bytes())
    with pytest.raises(CheckpointError, match=r"step-00000005.* is a copy .*: it has step 6"):
        trained(tmp_path, at=5)
    (folder / "step-00000009.safetensors").write_bytes(path_of(tmp_path, 7).read_bytes())
    with pytest.raises(CheckpointError, match=r"step-00000009.* step 7; that of step 7 is i"):
        trained(tmp_path)


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


def test_a_folder_that_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on network drives without locks: nobody else is there."""

    def none(handle: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "_lock", none)
    with pytest.raises(OSError, match=r"cannot be locked: No locks available: ") as caught:
        trained(tmp_path)
    assert caught.value.errno == errno.ENOLCK and caught.value.filename == str(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        trained(tmp_path / "file" / "run")


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system says it, which lets a superuser write everywhere."""

    def denied(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PermissionError, match=f"Permission denied: '{tmp_path}"):
        trained(tmp_path)
    assert names(tmp_path) == []


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
    with pytest.raises(OSError, match=r"the checkpoints need \S+ [kM]B, and 1\.0 kB are free"):
        trained(tmp_path)
    with opened(tmp_path) as found:
        free.free = found.space_needed(begun())
    trained(tmp_path)


def test_the_space_that_is_asked_for_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that lies there, just before a half-written file takes its place."""
    large = xf.GPT(**runs.SIZES | {"d_model": 64})  # a header is small beside it
    state = training.start(large.init(0), runs.CONFIG)
    used = []
    rename = os.replace

    def replace(part: Path, target: Path) -> None:
        used.append(sum(path.stat().st_size for path in tmp_path.rglob("*.*")))
        rename(part, target)

    monkeypatch.setattr(os, "replace", replace)
    with opened(tmp_path, model=large) as found:
        needed = found.space_needed(state)
        for step in range(1, 7):
            found.save(state._replace(step=step, best_step=min(step, 2)))
    assert 0.7 * needed < max(used) < needed + 6 * 5000  # of headers


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def half(arrays: Any, path: Path, **_: Any) -> None:
    path.write_bytes(b"half")
    full()


@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [
        (safetensors.numpy, "save_file", half),
        (run, "write_state", full),
        (files, "_sync", full),
        (os, "replace", full),
        (run, "append", full),
    ],
    ids=["arrays", "state", "sync", "rename", "log"],
)
def test_a_disk_that_fills_leaves_the_last_good_checkpoint(
    place: Any, name: str, instead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "never")
    trained(tmp_path / "run", n=3)
    before = checkpoints(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(place, name, instead)
        message = r"No space .*\nthe last good checkpoint is .*00003\.saf"
        with pytest.raises(OSError, match=message) as caught:
            trained(tmp_path / "run")
    assert caught.value.errno == errno.ENOSPC
    assert checkpoints(tmp_path / "run") == before
    assert not list(tmp_path.rglob("*.part"))
    trained(tmp_path / "run")
    runs.require_alike(tmp_path / "run", tmp_path / "never")


class Remote(OSError):
    """An error with a constructor of its own, as of a data source."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(errno.ECONNRESET, f"{host}:{port} is gone", "batches")


def test_an_error_of_the_data_stays_what_it_is(tmp_path: Path) -> None:
    def steps() -> Any:
        yield next(runs.steps(begun()))
        raise Remote("far", 80)

    with opened(tmp_path) as found:
        with pytest.raises(Remote, match=r"far:80 is gone: 'batches'\nthere is no ch") as caught:
            list(found.record(steps()))
        assert caught.value.errno == errno.ECONNRESET and caught.value.filename == "batches"
    assert not checkpoints(tmp_path)


# Leaving the loop


def test_a_break_loses_no_step(tmp_path: Path) -> None:
    with opened(tmp_path, every=100) as found:
        steps = found.record(runs.steps(found.begin(begun())))
        for step in steps:  # which has a name, and so goes on to be there
            if step.step == 3:
                break
    assert list(checkpoints(tmp_path)) == [3] and len(rows(tmp_path)) == 3


def test_an_error_in_the_loop_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), opened(tmp_path, every=100) as found:
        for _ in found.record(runs.steps(found.begin(begun()))):
            raise ZeroDivisionError
    assert not checkpoints(tmp_path) and len(rows(tmp_path)) == 1


# Losses that go wrong


def test_a_loss_that_is_not_finite_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    def loss(params: Any, batch: Any, place: Any, key: Any = None) -> Any:
        value, cache = training.loss_of(runs.MODEL)(params, batch, place, key)
        return (value * np.nan if key is not None and key.step > 10 else value), cache

    with opened(tmp_path) as found:
        steps = training.train(loss, found.begin(begun()), runs.source(), runs.CONFIG, NUMPY)
        with pytest.raises(
            Diverged, match=r"the loss of step 6 is nan.*\nthe last good checkpoint is .*-00000003"
        ):
            list(found.record(steps))
    assert len(rows(tmp_path)) == 5


def test_what_is_not_finite_is_null_in_the_log() -> None:
    step = next(runs.steps(begun()))
    line = json.loads(log.line_of(step._replace(validation=float("nan"), norm=float("inf"))))
    assert line["validation"] is None and line["norm"] is None and line["step"] == 1


def test_a_copied_folder_goes_on(tmp_path: Path) -> None:
    """Nothing in it is bound to its place."""
    trained(tmp_path / "never")
    trained(tmp_path / "run", n=11)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    trained(tmp_path / "moved")
    runs.require_alike(tmp_path / "moved", tmp_path / "never")


# Frozen parameters, and models that are written in another way


def thawed(state: training.State) -> dict[str, Any]:
    return runs.leaves(state._replace(params=xf.tree.thaw(state.params)))


def test_checkpoints_have_only_what_is_trained(tmp_path: Path) -> None:
    """A run of frozen parameters goes on bit for bit, from files without them."""

    def train(folder: Path, n: int, seed: int = 0) -> training.State:
        params = xf.tree.freeze(runs.MODEL.init(seed), "embed.*", "*.ffn.*")
        with opened(folder) as found:
            state = found.begin(training.start(params, runs.CONFIG))
            for step in found.record(itertools.islice(runs.steps(state), n - state.step)):
                state = step.state
        return state

    whole = train(tmp_path / "never", 9)
    train(tmp_path / "run", 4)
    found = train(tmp_path / "run", 9)
    runs.require_alike(tmp_path / "run", tmp_path / "never")
    assert thawed(found) == thawed(whole)
    newest = training.read_state(checkpoints(tmp_path / "run")[9])
    frozen = {f"params.{name}" for name in xf.tree.frozen(found.params)}
    assert "params.embed.table" in frozen and not frozen & newest.arrays.keys()
    assert "params.stack.norm.w" in newest.arrays
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    with pytest.raises(ValueError, match=r'frozen_parameters is "\w{64}" there, "\w{64}" here'):
        train(tmp_path / "run", 12, seed=1)
    assert {path: path.read_bytes() for path in before} == before


def test_no_process_saves_a_resumed_state_again(tmp_path: Path) -> None:
    """One that does would wait for the others for ever."""

    def work(world: World) -> None:
        for _ in range(2):
            with opened(tmp_path, world=world) as found:
                found.save(found.begin(begun()))

    threads.run(2, work)
    assert list(checkpoints(tmp_path)) == [0]


def test_a_model_that_is_written_in_another_way(tmp_path: Path) -> None:
    """When a checkpoint is saved whose model is the best, and when the run is resumed."""
    written: list[Any] = []
    state = trained(tmp_path, model=None, write_model=written.append, n=11)
    best = training.read_state(checkpoints(tmp_path)[state.best_step])
    assert names(tmp_path) == ["checkpoints", "lock", "log.jsonl", "run.json"]
    assert state.best_step < 11 and len(written) > 1
    written.clear()
    trained(tmp_path, model=None, write_model=written.append, n=0)
    (params,) = written
    assert runs.leaves(params) == {
        name: best.arrays[f"ema.{name}"].tobytes() for name in xf.tree.flatten(params)
    }
