"""docs/documents/*.md: each is one program, whose blocks print what the page shows after them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs/documents").glob("*.md"))
CELL = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
PRINTED = re.compile(r"printed,? .*")
NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem < "004"], ids=lambda page: page.stem)
def test_printed_figures_are_the_documents(page: Path) -> None:
    """Also those that are wrong, to which nothing of ours is equal."""
    arrays = json.loads((ROOT / f"tests/documents/{page.stem}.json").read_text())["arrays"]
    known = {
        round(abs(float(n)), 8) for a in arrays.values() for row in a["rows"] for n in row.split()
    }
    outputs = "\n".join(shown for _, shown in CELL.findall(page.read_text(encoding="utf-8")))
    lines = [line.partition("here")[0] for line in PRINTED.findall(outputs)]
    shown = [abs(float(n)) for line in lines for n in NUMBER.findall(line)]
    assert len(shown) > 5 and set(shown) <= known


def test_there_is_a_page_for_each_document() -> None:
    assert [page.stem for page in PAGES] == ["000", "001", "002", "003", "004"]
