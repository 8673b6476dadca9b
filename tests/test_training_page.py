"""docs/training.md: its code prints what it shows, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from xformer.cli import main

PAGE = (Path(__file__).resolve().parent.parent / "docs/training.md").read_text(encoding="utf-8")


def test_the_options_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    page = PAGE.replace("--folder DIR --kills 500", "").replace('--prompt "Once"', "")
    named = set(re.findall(r"--[a-z][a-z-]+", page)) - {"--model"}  # of xformer generate
    assert named <= known
