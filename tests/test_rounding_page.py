"""docs/rounding.md: its code runs, prints what it says, and shows what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "rounding.md").read_text(encoding="utf-8")
*SHORT, TRAINING = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHOWN = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
SMALL = {
    'FORMATS, STEPS = ("bfloat16", "float8_e5m2", "float8_e4m3", "mxfp4"), 200': (
        'FORMATS, STEPS = ("float8_e4m3", "mxfp4"), 40'
    ),
    '    "every result, loss x 256": {"rounds": "results", "scale": 256.0},\n': "",
}


def test_the_short_programs_print_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for program, shown in zip(SHORT, SHOWN, strict=False):
        exec(program, names)
        assert capsys.readouterr().out == shown


def test_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    """Two formats, 40 steps: what the page says of them holds."""
    names: dict[str, Any] = {}
    exec(SHORT[0], names)
    code = TRAINING
    for shown, small in SMALL.items():
        assert code.count(shown) == 1
        code = code.replace(shown, small)
    exec(code, names)
    last = {at: np.mean(losses[-10:]) for at, losses in names["curves"].items()}
    plain = np.mean(names["plain"][-10:])
    # Gradients below 2^-10 are 0 in E4M3, unless the loss is scaled.
    assert last["float8_e4m3", "operands of matmuls"] > plain + 0.4
    assert last["float8_e4m3", "operands, loss x 256"] < plain + 0.1
    # A block of four bits has a scale of its own.
    assert last["mxfp4", "operands of matmuls"] < plain + 0.1
    # Small updates of four-bit weights are lost, unless they are rounded at random.
    assert last["mxfp4", "weights, to nearest"] > plain + 0.4
    assert last["mxfp4", "weights, stochastically"] < last["mxfp4", "weights, to nearest"] - 0.2
    assert "float32: 5.07" in capsys.readouterr().out


def test_links_and_formats() -> None:
    from xformer.arrays.formats import FORMATS

    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(FORMATS)
    for link in re.findall(r"\]\(([^):]+)\)", PAGE):
        assert (DOCS / link).is_file(), link
