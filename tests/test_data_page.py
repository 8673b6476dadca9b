"""docs/data.md: its code prints what it shows, and its vocabularies are those of the command."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from truths import published

from xformer.training.lines import JSON

PAGE = (Path(__file__).resolve().parent.parent / "docs/data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    shutil.copy(published("tinyshakespeare.txt"), tmp_path)
    (tmp_path / "multi30k").symlink_to(published("multi30k"))
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES) == PAGE.count("```python") == 3
    namespace: dict[str, Any] = {}
    for code, shown in EXAMPLES:
        exec(code, namespace)
        assert capsys.readouterr().out == shown


def test_what_is_read_is_in_the_table() -> None:
    assert all(f"`{suffix}`" in PAGE for suffix in JSON)
    names = re.findall(r"^\| `(\w+)(?::SIZE)?` \| ", PAGE, re.MULTILINE)
    assert names == ["bytes", "characters", "bpe"]
