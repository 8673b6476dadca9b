"""docs/transformer-xl.md: its code prints what it shows, its options exist, its table is whole."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from xformer.cli import main

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "transformer-xl.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["train", "generate"])
def test_the_options_are_those_of_the_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    line = re.search(f"^xformer {command} .*$", PAGE, re.MULTILINE)
    assert line is not None
    assert set(re.findall(r"--[a-z][a-z-]+", line.group())) <= known


def test_the_table_is_that_of_the_script() -> None:
    """The same memories, in the same order; the losses are of the script's run."""
    script = runpy.run_path(str(DOCS / "make_transformer_xl.py"))
    header = " | ".join(f"M = {m}" for m in script["EVALUATED"])
    assert f"| trained with | {header} |" in PAGE
    lines = [re.search(rf"^\| M = {m} \|(.*)\|$", PAGE, re.MULTILINE) for m in script["TRAINED"]]
    losses = []
    for line in lines:
        assert line is not None
        losses.append([float(x.strip(" *")) for x in line.group(1).split("|")])
    assert [len(row) for row in losses] == [len(script["EVALUATED"])] * 2
    sizes = script["SIZES"]
    assert (
        f"({sizes['n_layers']} layers of width {sizes['d_model']}, T = {script['SEGMENT']}, "
        f"{script['ROWS']} streams, {script['STEPS']:,} steps)"
    ) in PAGE
    assert f"same {script['ROWS'] * script['BATCHES'] * script['SEGMENT']:,} bytes" in PAGE
    without, with_memory = losses
    assert min(with_memory) < min(without)  # what the page says
