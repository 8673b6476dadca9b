"""docs/onnx.md: its code prints what it says; its tables are those of the families and tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import test_export

from xformer import export
from xformer.cli import main
from xformer.pretrained.families import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/onnx.md").read_text(encoding="utf-8")
TESTS = ("test_export.py", "test_export_step.py", "test_arrays_onnx.py")


def table(first: str) -> list[list[str]]:
    """The rows of the table whose first row begins like this, each as its cells."""
    lines = PAGE[PAGE.index(f"\n| {first} |") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_families(tmp_path: Path) -> None:
    """The inputs and outputs of all architectures of a family together."""
    wanted = []
    for family in sorted(FAMILIES):
        inputs: set[str] = set()
        outputs: set[str] = set()
        for architecture in (head for name, head in test_export.HEADS if name == family):
            model = test_export.architecture_of(family, architecture)
            sizes = test_export.FIXED.get(family, {})
            written = export.onnx(model, model.init(), tmp_path / "model.onnx", **sizes)
            inputs |= written.inputs.keys()
            outputs |= written.outputs.keys()
        wanted.append([f"`{family}`", ", ".join(sorted(inputs)), ", ".join(sorted(outputs))])
    assert table("family | inputs") == wanted


def test_the_options_name_tests() -> None:
    known = {
        node.name
        for name in TESTS
        for node in ast.parse((ROOT / "tests" / name).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    for option, _, cell in table("option | exported"):
        named = re.findall(r"`(test_\w+)`", cell)
        assert named and set(named) <= known, option


def test_the_commands_and_their_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    lines = re.findall(r"`?xformer (export [^`\n]*)", PAGE)
    assert len(lines) == 3
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    helped = capsys.readouterr().out
    assert all(option in helped for line in lines for option in re.findall(r"--[a-z-]+", line))


def test_the_opset_and_the_limit_are_those_of_the_code() -> None:
    assert f"opset is {export.writing.OPSET}," in PAGE
    assert "From 1 GiB on" in PAGE and export.writing.EXTERNAL == 1 << 30
