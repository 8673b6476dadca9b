"""docs/generation.md: its code prints what it shows; its table is that of a committed run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from truths import published

from benchmarks import generation as benchmark
from benchmarks import machine, stored
from xformer.generation import generate
from xformer.pretrained import load

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "generation.md").read_text(encoding="utf-8")
FILES = (benchmark.MODEL, benchmark.WORDS, benchmark.STORY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers")
    for name in FILES:
        shutil.copy(published(name), tmp_path)
    return tmp_path


def test_the_table_is_of_a_committed_run() -> None:
    run = r"<!-- run -->\n(.*)\n\[All figures\]\((.*)\)\.\n<!-- end -->"
    ((shown, path),) = re.findall(run, PAGE, re.DOTALL)
    assert shown == benchmark.text(stored.read(DOCS / path))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """A run of a few tokens, and its options."""
    monkeypatch.setattr(benchmark, "LENGTH", 12)
    monkeypatch.setattr(benchmark, "LIBRARIES", ("numpy",))
    monkeypatch.setattr(machine, "share_threads", lambda: {"cpus": 1})
    (ids,) = generate(*load(folder / benchmark.MODEL), [[benchmark.BOS]], max_new_tokens=12)
    text = benchmark.tokenizer(folder / benchmark.WORDS).decode(ids)
    (folder / benchmark.STORY).write_text(text)
    return ["--data", str(folder), "--rounds", "1", "--out", str(folder / "a.json")]


def test_the_benchmark_runs(
    short: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = folder / "a.md"
    page.write_text(f"before\n{benchmark.BEGIN}{benchmark.END}after\n")
    assert benchmark.main([*short, "--page", str(page)]) == 0
    found = json.loads((folder / "a.json").read_text())
    assert found["rows"].keys() == benchmark.SHOWN.keys()
    for row in found["rows"].values():
        assert row["numpy"]["per_s"] > 1
    printed, text = capsys.readouterr().out, benchmark.text(found)
    assert text in printed and text in page.read_text()
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")


def test_another_text_is_not_reported(
    short: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / benchmark.STORY).write_text("Once upon a time, there was no story.")
    assert benchmark.main(short) == 1
    assert "the text is not the published one" in capsys.readouterr().err
    assert not (folder / "a.json").exists()
