"""`python -m benchmarks.together`: one process beside several, with the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import launched
import pytest

from benchmarks import harness, machine, together
from benchmarks.harness import Disagreement


def test_processes_beside_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched.needs_mpi()
    monkeypatch.setattr(harness, "SETTLE", 0)
    monkeypatch.setattr(machine, "n_cpus", lambda: 2)
    monkeypatch.setitem(together.STEPS, "tiny", 1)
    options = ["--shape", "tiny", "--rounds", "1", "--floats", "1000", "--out", str(tmp_path)]
    assert together.main(options) == 0
    (out,) = tmp_path.glob("together-tiny-*.json")
    found = json.loads(out.read_text())
    names = [row["name"] for row in found["rows"]]
    assert names[:2] == ["1 process of 2 threads", "2 processes of 1 thread"]
    assert names[2:] == ["exact sum, 0 MB", "engine sum, 0 MB"]
    assert all(row.get("step", row.get("sum"))["min_ms"] > 0 for row in found["rows"])
    assert together.table(found) in capsys.readouterr().out


def test_other_losses_are_not_reported() -> None:
    together.check({"one": 2.0, "two": 2.0 + 1e-4}, "one")
    for wrong in (2.001, float("nan")):
        with pytest.raises(Disagreement, match="the loss of two differs from that of one by"):
            together.check({"one": 2.0, "two": wrong}, "one")
