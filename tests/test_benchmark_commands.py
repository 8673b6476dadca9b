"""The commands of `benchmarks/` as a user meets them: another folder, wrong input, no terminal."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command, contestants, machine, report, stored
from benchmarks import ops as measured
from xformer.cli import progress

COMMANDS = {  # those that measure, with the options they need
    "__main__": [],
    "decoding": [],
    "embeddings": ["--model", "m", "--ours", "o", "--theirs", "t"],
    "finetuning": ["--data", "d"],
    "gate": [],
    "generation": ["--data", "d"],
    "gpu": [],
    "ops": [],
    "starts": [],
    "together": [],
}
PAGES = ("embeddings", "finetuning", "generation")
COUNTS = {"finetuning": "--steps"}


def main_of(name: str) -> Callable[[list[str]], int]:
    main: Callable[[list[str]], int] = importlib.import_module(f"benchmarks.{name}").main
    return main


@pytest.mark.parametrize("name", [n for n in COMMANDS if n != "gpu"])
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_number_of_rounds(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = COUNTS.get(name, "--rounds")
    with pytest.raises(SystemExit) as end:
        main_of(name)([*COMMANDS[name], f"{option}={value}"])
    wanted = f"argument {option}: must be a whole number of at least 1, got {value}\n"
    assert end.value.code == 2 and wanted in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_out_is_not_a_folder_of_a_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main_of(name)([*COMMANDS[name], "--out", str(tmp_path / "file/below/run.json")])
    wanted = f"argument --out: must be a folder, and {tmp_path / 'file'} is a file\n"
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_out_is_checked_before_anything_is_measured(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is read-only; root may write there, so the system's answer is a stand-in."""
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    with pytest.raises(SystemExit):
        main_of(name)([*COMMANDS[name], "--out", str(tmp_path / "new/run.json")])
    wanted = f"must be a folder that may be written to, and {tmp_path} may not\n"
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_checked_before_anything_is_measured(name: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no lines\n")
    with pytest.raises(ValueError, match=r"page\.md must hold the lines <!-- run -->"):
        main_of(name)([*COMMANDS[name], "--page", str(page)])


@pytest.mark.parametrize("name", ["decoding", "gate", "starts"])
def test_without_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = importlib.util.find_spec
    absent = ("transformers",)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *more: None if n in absent else usual(n, *more)
    )
    with pytest.raises(ImportError, match=r"transformers (is|are) not installed: pip install "):
        main_of(name)(COMMANDS[name])


def test_what_pip_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"^mpi4py is not .*: pip install 'xformer-array\[mpi\]'"):
        main_of("together")([])
    with pytest.raises(ImportError, match=r"^a and b are not installed: pip install a b$"):
        command.require("a", "b")


@pytest.mark.parametrize(
    ("error", "said", "status"),
    [
        (FileNotFoundError(2, "No such file or directory", "a/b"), "no file or folder a/b", 1),
        (ImportError("torch is not installed"), "error: torch is not installed", 1),
        (KeyboardInterrupt(), "benchmarks: interrupted", 130),
    ],
)
def test_errors_are_lines(
    error: BaseException, said: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert command.run(fail) == status
    err = capsys.readouterr().err
    assert said in err and err.startswith("benchmarks: ") and err.count("\n") == 1


def test_a_process_prints_one_line() -> None:
    arguments = ["--data", "no-such-folder"]
    program = [sys.executable, "-m", "benchmarks.finetuning", *arguments]
    root = Path(stored.__file__).parents[1]
    done = subprocess.run(program, capture_output=True, text=True, cwd=root)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("benchmarks: error: there is no ")


def test_results_are_stored_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result: dict[str, Any] = machine.describe([])
    monkeypatch.chdir(tmp_path)
    path = stored.path_of(result, "ops")
    stored.write(result, path)
    assert json.loads((tmp_path / path.name).read_text())["machine"] == result["machine"]
    monkeypatch.chdir(stored.RESULTS.parent)
    folder = stored.RESULTS / stored.slug(result["machine"])
    assert stored.path_of(result, "ops").parent == folder


def test_a_column_without_numbers_is_a_table() -> None:
    """In Markdown the line below the header needs a hyphen in each column."""
    _, rule, _ = report.align([["tiny", "x"], ["numpy kernel", "-"]]).splitlines()
    assert rule == "| ------------ | -: |"


def test_lines_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(contestants, "why_not", lambda name: None)
    monkeypatch.setattr(machine, "share_threads", machine.threads)
    monkeypatch.setattr(measured, "NAMES", ("numpy kernel",))
    monkeypatch.setattr(measured, "measure", lambda *_: {"numpy kernel": {"error": 0.0}})
    monkeypatch.setattr(measured, "table", lambda _: [["op"]])
    folder = tmp_path / "new/folder"
    assert main_of("ops")(["--op", "gelu", "--out", str(folder)]) == 0
    captured = capsys.readouterr()
    assert "ops: 1 of 1 ops, 0 s left" in captured.err
    (out,) = folder.iterdir()
    assert f"Written: {out}" in captured.out

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "file")

    monkeypatch.setattr(stored, "write", full)
    with pytest.raises(OSError, match="No space"):
        main_of("ops")(["--op", "gelu", "--out", str(folder)])
    assert "Milliseconds" in capsys.readouterr().out  # what was measured is printed first


def test_runs_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with command.ticking("tiny", 4) as tick:
        tick()
        tick()
    assert capsys.readouterr().err == "tiny: 1 of 4 runs, 3 s left\ntiny: 2 of 4 runs, 2 s left\n"
