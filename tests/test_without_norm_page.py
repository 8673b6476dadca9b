"""docs/without-norm.md: its tables are right, its options exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xformer.cli import main

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "without-norm.md").read_text(encoding="utf-8")
TRAINING, UPDATES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def shown() -> list[list[float]]:
    """The numbers of the table of five models, in the order of the program."""
    rows = re.findall(r"^\| [-\w, ]+ \|([-+e.\d |]+)\|$", PAGE, re.MULTILINE)
    return [[float(cell) for cell in row.split("|")] for row in rows]


def test_the_table_of_models_is_right() -> None:
    """Its figures of the initial models. The text, and so the gradients, differ by Python."""
    start, end = TRAINING.index("losses = {"), TRAINING.index("for kind in KINDS:\n")
    without_training = TRAINING[:start] + "flows = {kind: flow_of(kind) for kind in KINDS}\n"
    assert "flows = {" in TRAINING[start:end]
    namespace: dict[str, Any] = {}
    exec(without_training, namespace)
    flows = namespace["flows"].values()
    found = [[float(flow.activations[-1]), float(flow.gradients[0])] for flow in flows]
    is_the_text = sys.version_info[:2] == (3, 11)
    np.testing.assert_allclose(
        [row[2:] for row in shown()], found, rtol=0.02 if is_the_text else 0.3
    )


@pytest.mark.slow
def test_the_program_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the text is of Python 3.11")
    exec(TRAINING, {})
    lines = capsys.readouterr().out.splitlines()
    printed = [[float(cell) for cell in line[16:].split()] for line in lines]
    np.testing.assert_allclose(shown(), printed, rtol=0.02)


def test_the_table_of_updates_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    start = TRAINING[: TRAINING.index("LAYERS, STEPS")]
    exec(start + UPDATES, {})
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out == shown


def test_the_commands_and_options_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"^xformer (.*)$", PAGE, re.MULTILINE)
    words = command.replace("flow.svg", str(tmp_path / "flow.svg")).split()
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert main([*words, "--layers", "2", "--d-model", "8", "--heads", "2"]) == 0
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    helped = capsys.readouterr().out
    for option in set(re.findall(r"`(--[a-z-]+)", PAGE)):
        assert option in helped
    for link in re.findall(r"\]\(([^):]+)\)", PAGE):
        assert (DOCS / link).is_file(), link
