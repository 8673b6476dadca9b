"""`python -m benchmarks.embeddings`: what it reports is sane, what is wrong is not reported, and
docs/sentence-embeddings.md shows a run that is committed."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from sentences import BERT, write_model

from benchmarks import embeddings, embeddings_page, stored
from benchmarks.step import Disagreement

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "sentence-embeddings.md"
POSIX = pytest.mark.skipif(os.name != "posix", reason="the stand-in is a shell script")


def stand_in(venv: Path, code: str) -> Path:
    """An environment whose python runs this library's contestant in the place of theirs."""
    python = venv / "bin" / "python"
    packages = venv / "lib" / "python3.1" / "site-packages"
    for folder in (python.parent, packages / "some", packages / "pip"):
        folder.mkdir(parents=True)
    (packages / "some" / "module.py").write_bytes(b"x" * 1000)
    (packages / "pip" / "module.py").write_bytes(b"x" * 10000)
    python.write_text(f'#!/bin/sh\n{code}\nexec "{sys.executable}" "$1" xformer "$3"\n')
    python.chmod(0o755)
    return venv


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(embeddings, "STARTS", 1)
    monkeypatch.setattr(embeddings, "WORKS", {"one by one": (2, None), "batches of 3": (5, 3)})
    model = write_model(tmp_path, BERT, "float32")
    venvs = [str(stand_in(tmp_path / name, "")) for name in ("ours", "theirs")]
    options = ["--rounds", "1", "--out", str(tmp_path / "run.json")]
    return ["--model", str(model), "--ours", venvs[0], "--theirs", venvs[1], *options]


@POSIX
def test_a_run(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, out = tmp_path / "page.md", tmp_path / "run.json"
    page.write_text("before\n<!-- run -->\nold\n<!-- end -->\nafter\n")
    assert embeddings.main([*command, "--page", str(page)]) == 0
    found = json.loads(out.read_text())
    printed = capsys.readouterr().out
    assert embeddings_page.text(found) in printed
    ours, theirs = found["rows"]
    assert (ours["name"], theirs["name"]) == ("xformer", "sentence-transformers")
    for row in found["rows"]:
        assert row["install_bytes"] == 1000
        assert 0 < row["start"]["min_ms"] <= row["start"]["median_ms"]
        for work, n in (("one by one", 2), ("batches of 3", 5)):
            assert row[work]["per_s"] == pytest.approx(n / (row[work]["min_ms"] / 1e3))
            assert f"| sentences a second, {work} |" in printed
        assert "numpy" in row["versions"]
    assert found["difference"] == 0
    shown = embeddings_page.shown(page, found, out)
    want = f"before\n<!-- run -->\n{shown}<!-- end -->\nafter\n"
    assert page.read_text() == want and "[All figures](run.json)" in shown
    embeddings_page.update(page, found, out)
    assert page.read_text() == want


def test_different_embeddings_are_not_reported(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def differ(*_: Any) -> Any:
        embeddings.check({"a": [[1.0, 0.0]], "b": [[1.0, 2e-5]]})

    with pytest.raises(Disagreement, match=r"a and b differ by 2\.0e-05, allowed 1e-05"):
        differ()
    with pytest.raises(Disagreement, match="differ by nan"):
        embeddings.check({"a": [[float("nan")]], "b": [[1.0]]})
    monkeypatch.setattr(embeddings, "measure", differ)
    assert embeddings.main(command) == 1
    assert "nothing is reported.\na and b differ" in capsys.readouterr().err
    assert not (tmp_path / "run.json").exists()


@POSIX
def test_one_that_does_not_start_is_named(command: list[str], tmp_path: Path) -> None:
    venv = stand_in(tmp_path / "broken", "exit 1")
    with pytest.raises(RuntimeError, match=r"sentence-transformers did not start: .*broken"):
        embeddings.main([*command, "--theirs", str(venv)])


def test_sentences_are_the_same_each_time() -> None:
    texts = embeddings.sentences(256)
    assert texts == embeddings.sentences(256) and len(set(texts)) > 200
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) >= 3 and max(lengths) <= 33


def test_the_page_shows_a_committed_run() -> None:
    page = PAGE.read_text(encoding="utf-8")
    (link,) = re.findall(r"\[All figures\]\((\S+)\)", page)
    result = (PAGE.parent / link).resolve()
    found = stored.read(result)
    begin, end = embeddings_page.BEGIN, embeddings_page.END
    assert f"{begin}{embeddings_page.shown(PAGE, found, result)}{end}" in page
    assert found["difference"] <= found["tolerance"]
