"""The bars of long work, on a terminal of a given width. (Lines and delays: test_data.py.)"""

from __future__ import annotations

import os
import re
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from xformer.cli import main, progress, train

Text = Callable[[], str]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> Iterator[Text]:
    """sys.stderr is a terminal of this size. Yields a function: what was printed, after closing."""
    pty = pytest.importorskip("pty", reason="the system has no pty")
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    printed: list[bytes] = []

    def read() -> None:  # while it is printed: a terminal that nobody reads blocks
        while True:
            try:
                printed.append(os.read(ours, 1 << 16))
            except OSError:  # closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with open(theirs, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            yield lambda: b"".join(printed).decode()
    finally:
        reader.join()
        os.close(ours)


def widths(text: str) -> list[int]:
    """The columns of each line that was shown, also of those that were shown over."""
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[\w+", "", text))
    return [sum(1 + (unicodedata.east_asian_width(c) in "FW") for c in line) for line in lines]


PARTS = ["loss 2.537", "1:02:03 left", "validation 2.782", "1,234,567 tokens/s", "perplexity 16.14"]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [(200, 5), (120, 5), (100, 4), (80, 3), (60, 2), (40, 1), (32, 1), (20, 0)],
)
def test_a_bar_fits_its_terminal(columns: int, shown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, 24, columns) as text:
        bar = progress.Bar(100_000, 70_000, "70000/100000")
        bar.show(100_000, "100000/100000", PARTS)
        bar.close()
    assert max(widths(text())) == columns - 1
    last = text().rstrip().rpartition("\r")[2]
    assert last.startswith("100000/100000 |") and "█" * (2 if columns > 20 else 1) in last
    assert last.partition("| ")[2] == ", ".join(PARTS[:shown])


def test_a_bar_follows_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, 24, 80) as text, closing(progress.Bar(10, 0, "0/10")) as bar:
        bar.show(1, "1/10", PARTS)
        monkeypatch.setattr(progress, "_columns", lambda: 39)
        bar.show(10, "10/10", PARTS)
    assert widths(text().rstrip())[-1] == 39


@pytest.mark.parametrize("size", [(0, 80), (24, 0), (0, 0)])
def test_a_terminal_that_does_not_report_its_size_has_80_columns(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch, *size) as text, closing(progress.Bar(2, 0, "0/2")) as bar:
        bar.show(2, "2/2", PARTS)
    assert "2/2 |███" in text() and max(widths(text())) == 79


@pytest.mark.parametrize("columns", [80, 40])
def test_other_work_fits_too(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0)
    with terminal(monkeypatch, 24, columns) as text:
        with progress.progress() as report:
            report("reading", 0, 8_100)
            report("reading", 8_100, 8_100)
        assert list(progress.each([1, 2], "validating", "batches")) == [1, 2]
        assert list(progress.each([], "validating", "batches")) == []
        with progress.progress() as report:
            report("checking validation tokens", 10_000_000, 40_000_000)
    assert "reading: 0% |" in text() and "0.00/8.10kB" in text()
    assert "validating: 0% |" in text() and "0/2 batches" in text()
    assert ("10.0M/40.0MB" in text()) == (columns == 80)
    assert max(widths(text())) < columns


@pytest.mark.parametrize("columns", [80, 40])
def test_training_on_a_terminal(
    columns: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_sample", lambda *_, **__: print("a fox"))
    Path("fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    command = ["train", "--preset", "tiny", "--layers", "1", "--steps", "6", "--data", "fox.txt"]
    command += ["--validate-every", "2", "--sample-every", "3"]
    with terminal(monkeypatch, 24, columns) as text:
        assert main(command) == 0
    assert max(widths(text())) < columns
    last = text().rstrip().rpartition("\r")[2]
    assert last.startswith("6/6 |") and "00:00 left" in last
    assert ("validation " in last) == (columns == 80)
    out = capsys.readouterr().out
    assert "step 6/6" not in out  # the bar says it
    assert "      8.1 kB to train on, 900 B to validate on\n" in out


@pytest.mark.parametrize("columns", [80, 40])
def test_fine_tuning_on_a_terminal(
    columns: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from finetuning import LLAMA, write_folder

    monkeypatch.chdir(tmp_path)
    write_folder(Path("model"), LLAMA, "llama")
    Path("fox.txt").write_text("the quick brown fox\n" * 40)
    command = ["finetune", "--model", "model", "--data", "fox.txt", "--steps", "6"]
    with terminal(monkeypatch, 24, columns) as text:
        assert main([*command, "--validate-every", "2", "--batch", "4"]) == 0
    assert max(widths(text())) < columns
    last = text().rstrip().rpartition("\r")[2]
    assert last.startswith("6/6 |") and "loss " in last and "00:00 left" in last
    assert ("validation " in last) == (columns == 80)
    assert "step 6/6" not in capsys.readouterr().out  # the bar says it
