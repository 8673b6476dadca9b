"""Where results of benchmarks are stored, and the rows of older ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stored

MACHINE = {"cpu": "Some(R) Processor @ 2.50GHz", "system": "Linux", "cpus": 2}


def result(day: int, least: float, machine: dict[str, Any] = MACHINE) -> dict[str, Any]:
    return {
        "date": f"2026-11-{day:02} 10:00 UTC",
        "commit": f"{day:040x}",
        "dirty": False,
        "machine": machine,
        "threads": {"cpus": 2, "blas_kernels": ["Zen"]},
        "rows": [
            {"name": "torch eager", "step": {"min_ms": 2.0, "median_ms": 3.0, "ratio": 1.0}},
            {
                "name": "numpy kernel",
                "peak_bytes": 7,
                "threads": {"cpus": 2, "blas_kernels": ["Zen", "Haswell"]},
                "step": {"min_ms": least, "median_ms": 4.0, "ratio": least / 2},
                "forward": {"min_ms": 0.5},
            },
        ],
    }


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stored, "RESULTS", tmp_path / "results")
    monkeypatch.chdir(tmp_path)  # of the checkout
    return tmp_path / "results"


def keep(found: dict[str, Any], question: str = "step-tiny") -> Path:
    path = stored.path_of(found, question)
    stored.write(found, path)
    return path


def test_a_machine_is_written_once(results: Path, tmp_path: Path) -> None:
    found = result(3, 1.0)
    path = keep(found)
    assert path == results / "some-processor-2-50ghz-2-cpus" / "step-tiny-2026-11-03-000000000.json"
    assert json.loads((path.parent / "machine.json").read_text()) == MACHINE
    assert "machine" not in json.loads(path.read_text()) and stored.read(path) == found
    keep(result(4, 1.0))
    with_gpu = keep(result(3, 1.0, MACHINE | {"gpu": "A GPU 80GB"}))
    assert with_gpu.parent.name == "a-gpu-80gb-2-cpus"
    different = r"machine\.json describes .*'Linux'.*, and the result is of"
    with pytest.raises(ValueError, match=different):
        keep(result(5, 1.0, MACHINE | {"system": "Another"}))
    elsewhere = stored.path_of(found, "step-tiny", tmp_path)
    stored.write(found, elsewhere)
    assert elsewhere.parent == tmp_path and json.loads(elsewhere.read_text()) == found
    assert stored.read(elsewhere) == found


def test_older_results_become_rows(results: Path) -> None:
    older, newest, other = keep(result(3, 1.0)), keep(result(4, 1.5)), keep(result(2, 9.0), "gate")
    assert stored.archive(results) == ([older], [])
    assert not older.exists()
    assert newest.exists() and other.exists() and stored.archive(results) == ([], [])
    with (results / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 and {row["question"] for row in rows} == {"step-tiny"}
    (own,) = (row for row in rows if (row["contestant"], row["work"]) == ("numpy kernel", "step"))
    assert own == {
        "machine": "some-processor-2-50ghz-2-cpus",
        "question": "step-tiny",
        "date": "2026-11-03 10:00 UTC",
        "commit": f"{3:040x}",
        "dirty": "False",
        "contestant": "numpy kernel",
        "work": "step",
        "min_ms": "1.0",
        "median_ms": "4.0",
        "ratio": "0.5",
        "peak_bytes": "7",
        "blas": "Zen Haswell",
    }
    last = keep(result(5, 0.5))
    assert stored.archive(results) == ([newest], []) and last.exists()
    assert len((results / "history.csv").read_text().splitlines()) == 1 + 6


@pytest.mark.parametrize("rows", [[], {"numpy": {"min_ms": 1.0}}, [{"name": "numpy"}]])
def test_what_has_no_rows_stays(
    rows: Any, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times, without = keep(result(2, 1.0)), keep(result(3, 1.0) | {"rows": rows}, "generation")
    keep(result(4, 1.0))
    keep(result(4, 1.0), "generation")
    monkeypatch.setattr(stored.archive, "__defaults__", (results,))
    assert stored.main([]) == 1
    said = capsys.readouterr()
    assert f"{times.name}: now in history.csv" in said.out and not times.exists()
    assert f"{without} stays beside a newer result" in said.err and without.exists()


def test_the_committed_results() -> None:
    """Each folder has its machine; of each question there is one result."""
    for folder in (path for path in stored.RESULTS.iterdir() if path.is_dir()):
        machine = json.loads((folder / stored.MACHINE).read_text(encoding="utf-8"))
        assert stored.slug(machine) == folder.name
        names = [path.name for path in folder.glob("*.json") if path.name != stored.MACHINE]
        questions = [match["question"] for name in names if (match := stored.NAME.fullmatch(name))]
        assert len(questions) == len(names) == len(set(questions)) > 0
