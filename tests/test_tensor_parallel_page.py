"""docs/tensor-parallel.md: its programs print what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tensor-parallel.md"


def test_its_programs_print_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, since they use each other's names."""
    text = PAGE.read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(programs) == text.count("```python") == 3
    names: dict[str, object] = {}
    for program, shown in programs:
        exec(program, names)
        assert capsys.readouterr().out == shown
