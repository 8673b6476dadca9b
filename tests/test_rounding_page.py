"""docs/rounding.md: its formats and links."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "rounding.md").read_text(encoding="utf-8")


def test_links_and_formats() -> None:
    from xformer.arrays.formats import FORMATS

    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(FORMATS)
    for link in re.findall(r"\]\(([^):]+)\)", PAGE):
        assert (DOCS / link).is_file(), link
