"""docs/ops.md is what docs/make_ops_page.py writes, and its links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from xformer import ops
from xformer.dispatch import Overridable

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "ops.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "make_ops_page.py"))["page"]()
    assert made == PAGE, "run `python -m docs.make_ops_page`"


def test_every_op_has_a_row_and_every_link_leads_somewhere() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows == 2 * [name for name in dir(ops) if isinstance(getattr(ops, name), Overridable)]
    links = re.findall(r"\]\(([^)#]+)", PAGE)
    assert all((DOCS / link).exists() for link in links)
