"""docs/without-norm.md: what it says of five models holds for small ones; its table is right."""

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
SMALL = {"LAYERS, STEPS = 24, 100": "LAYERS, STEPS = 10, 20", "d_model=32": "d_model=16"}


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """The names of the first program, with fewer, thinner layers and fewer steps."""
    code = TRAINING
    for shown, small in SMALL.items():
        assert code.count(shown) == 1
        code = code.replace(shown, small)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace


def test_all_but_the_plain_model_learn(namespace: dict[str, Any]) -> None:
    losses = {kind: np.array(each) for kind, each in namespace["losses"].items()}
    plain, rezero = losses.pop("no norms, plain"), losses.pop("ReZero")
    assert plain[0] > 1000 and plain[-5:].mean() > 50
    assert rezero[0] < 6 and rezero[-5:].mean() < rezero[0] - 0.3
    for kind, each in losses.items():
        assert each[0] < 6 and each[-5:].mean() < 4.5, kind
        assert each[-5:].mean() < rezero[-5:].mean() - 0.2, kind


def test_outputs_and_gradients_at_the_start(namespace: dict[str, Any]) -> None:
    flows = namespace["flows"]
    for kind in ("ReZero", "Fixup"):
        assert (flows[kind].activations == flows[kind].activations[0]).all()
    assert flows["no norms, plain"].activations[-1] > 100 * flows["Fixup"].activations[-1]
    assert flows["no norms, plain"].gradients[0] > 1e3 * flows["pre-LN"].gradients[0]
    np.testing.assert_allclose(flows["Fixup"].gradients, flows["Fixup"].gradients.mean(), rtol=0.2)


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
