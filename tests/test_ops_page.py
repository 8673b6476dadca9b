"""docs/ops.md is what docs/make_ops_page.py writes, and its links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from xformer import ops
from xformer.dispatch import Overridable

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "ops.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "make_ops_page.py"))["page"]()
    assert made == PAGE, "run `python -m docs.make_ops_page`"


def test_every_op_has_a_row_a_section_and_links_that_lead_somewhere() -> None:
    names = [name for name in dir(ops) if isinstance(getattr(ops, name), Overridable)]
    assert re.findall(r"^\| \[(\w+)\]\(#\1\) \|", PAGE, re.MULTILINE) == names * 2  # two tables
    assert re.findall(r"^### (\w+)$", PAGE, re.MULTILINE) == names
    links = re.findall(r"\]\(([^)#]+)", PAGE)
    assert all((DOCS / link).exists() for link in links)


def test_the_fastest_of_ours_is_bold() -> None:
    times = PAGE.partition("<!-- times -->")[2].partition("<!-- end -->")[0]
    rows = re.findall(r"^\| \[\w+\].* \|$", times, re.MULTILINE)
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        ours = [float(cell.strip("*")) for cell in cells[2:5]]
        assert min(ours) in [float(cell.strip("*")) for cell in cells if "**" in cell], row
        torch, ratio = cells[1], cells[5]
        assert bool(torch) == bool(ratio), row
        if torch:
            assert float(ratio) == pytest.approx(float(torch) / min(ours), rel=0.02, abs=0.01), row


def test_the_ops_with_single_calls_on_numba() -> None:
    numba = pytest.importorskip("xformer.backends.numba", reason="extra numba is not installed")
    (text,) = re.findall(r"in single calls of (.*?)\(\[details", PAGE, re.DOTALL)
    called = {kernel.op.__name__ for kernel in numba.KERNELS}
    assert set(re.findall(r"`(\w+)`", text)) == called - {"adam_update", "blocks"}
