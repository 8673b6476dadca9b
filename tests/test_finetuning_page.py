"""docs/finetuning.md: its code prints what it shows; its table is that of a committed run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from truths import published

from benchmarks import finetuning as benchmark
from benchmarks import machine, stored
from xformer.finetune import TASKS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGE = (DOCS / "finetuning.md").read_text(encoding="utf-8")
FILES = (benchmark.MODEL, benchmark.WORDS, benchmark.TEXT)


# PEFT still asks transformers for something by its old name.


def test_every_task_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w[\w-]*)` \| (.+?) \|", PAGE, re.MULTILINE)
    fields = {name: tuple(re.findall(r"`(\w+)`", cell)) for name, cell in rows}
    assert fields == {name: kind.fields for name, kind in TASKS.items()}


def test_the_table_is_of_a_committed_run() -> None:
    run = r"<!-- run -->\n(.*)\n\[All figures\]\((.*)\)\.\n<!-- end -->"
    (found,) = re.findall(run, PAGE, re.DOTALL)
    shown, path = found
    assert shown == benchmark.text(stored.read(DOCS / path))


def test_the_benchmark_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    for name in FILES[:2]:
        shutil.copy(published(name), tmp_path)
    lines = published(FILES[2]).read_text().splitlines()[:200]
    (tmp_path / FILES[2]).write_text("\n".join(lines))
    monkeypatch.setattr(machine, "share_threads", lambda: {"cpus": 1})
    out, page = tmp_path / "a.json", tmp_path / "a.md"
    page.write_text(f"before\n{benchmark.BEGIN}{benchmark.END}after\n")
    options = ["--data", str(tmp_path), "--steps", "1", "--out", str(out), "--page", str(page)]
    assert benchmark.main(options) == 0
    found = json.loads(out.read_text())
    assert [row["trained"] for row in found["rows"]] == [260032, 8960, 46240, 79008]
    printed = capsys.readouterr().out
    assert benchmark.text(found) in printed and benchmark.text(found) in page.read_text()
