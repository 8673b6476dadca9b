"""`python -m benchmarks.ops`: every op is measured, and nothing is reported of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import machine
from benchmarks import ops as measured
from xformer import ops
from xformer.dispatch import Overridable

OP = "router_z_loss"


@pytest.fixture(autouse=True)
def threads_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command gives BLAS all CPUs, which would change later tests of this process."""
    monkeypatch.setattr(machine, "share_threads", machine.threads)


def test_every_op_has_a_case() -> None:
    wanted = {op for name in dir(ops) if isinstance(op := getattr(ops, name), Overridable)}
    assert {case.op for case in measured.cases()} == wanted


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured.main(["--op", OP, "--rounds", "2", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("ops-some-*.json")
    rows = {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    assert {measured.REFERENCE, measured.KERNEL} <= set(rows)
    for work in (measured.FORWARD, measured.BOTH):
        times = rows[measured.KERNEL][f"{OP}: {work}"]
        assert 0 < times["min_ms"] <= times["median_ms"]
    assert 0 < rows[measured.KERNEL]["errors"][OP] <= measured.TOLERANCE
    assert f"| {OP}: {measured.BOTH} " in capsys.readouterr().out


def test_torchs_function_is_compared(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    (case,) = (case for case in measured.cases() if case.name == "l2_normalize")
    found = measured.measure(case, [measured.PEER, measured.KERNEL], 1)
    assert found[measured.PEER][measured.BOTH]["ratio"] == 1
    wrong = case._replace(peer=lambda x: x / (1e-3 + x.norm(dim=-1, keepdim=True)))
    with pytest.raises(measured.Disagreement, match="l2_normalize: torch eager is wrong"):
        measured.measure(wrong, [measured.PEER], 1)


def test_nothing_is_reported_of_a_wrong_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = measured._both

    def twice(case: measured.OpCall, dys: measured.Arrays) -> list[Any]:
        y, *grads = both(case, dys)
        return [y, *(2 * grad if grad.dtype == np.float32 else grad for grad in grads)]

    monkeypatch.setattr(measured, "_both", twice)
    assert measured.main(["--op", OP, "--rounds", "1", "--out", str(tmp_path)]) == 1
    assert f"{OP}: numpy reference is wrong" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "message"),
    [(["--op", "nope"], "--op must be one of"), (["--rounds", "0"], "at least")],
)
def test_bad_options(option: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measured.main(option)
    assert message in capsys.readouterr().err
