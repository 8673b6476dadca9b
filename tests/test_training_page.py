"""docs/training.md: its code prints what it shows, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from xformer.cli import main
from xformer.ops import activation

PAGE = (Path(__file__).resolve().parent.parent / "docs/training.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(activation, "_own", {})  # where the page registers one
    assert len(EXAMPLES) == PAGE.count("```python")
    namespace: dict[str, Any] = {}
    for code, shown in EXAMPLES:
        exec(code, namespace)
        assert capsys.readouterr().out == shown


def test_the_options_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    page = PAGE.replace("--folder DIR --kills 500", "").replace('--prompt "Once"', "")
    named = set(re.findall(r"--[a-z][a-z-]+", page)) - {"--model"}  # of xformer generate
    assert named <= known
