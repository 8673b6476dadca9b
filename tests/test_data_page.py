"""docs/data.md: its code prints what it shows, and its vocabularies are those of the command."""

from __future__ import annotations

import re
from pathlib import Path

from xformer.training.lines import JSON

PAGE = (Path(__file__).resolve().parent.parent / "docs/data.md").read_text(encoding="utf-8")


def test_what_is_read_is_in_the_table() -> None:
    assert all(f"`{suffix}`" in PAGE for suffix in JSON)
    names = re.findall(r"^\| `(\w+)(?::SIZE)?` \| ", PAGE, re.MULTILINE)
    assert names == ["bytes", "characters", "bpe"]
