"""tools/rooms.py: the page shows the rooms as they import each other; a circle is an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import rooms  # noqa: E402


def test_the_page_is_of_today() -> None:
    page = rooms.PAGE.read_text(encoding="utf-8")
    assert len(set(re.findall(r"\.py#L\d+", page))) > 10
    assert rooms.written(page) == page, "run: python tools/rooms.py"


def test_the_order_is_that_of_the_design() -> None:
    order = [name for level in rooms.levels(rooms.rooms()) for name in level]
    core = ["base", "dispatch", "ops", "layers", "models"]
    assert [name for name in order if name in core] == core and len(order) <= 27
    assert order.index("models") < order.index("pretrained") < order.index("cli") == len(order) - 1


def test_a_circle_is_refused(tmp_path: Path) -> None:
    """By an import within a function too, but not by one for type checkers."""
    files = {
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from xformer import c\n",
        "b": "from xformer.a import f\n",
        "c": "def g():\n    from xformer import b\n",
    }
    for name, text in files.items():
        (tmp_path / "xformer" / name).mkdir(parents=True)
        (tmp_path / "xformer" / name / "__init__.py").write_text(f'"""{name}"""\n{text}')
    assert rooms.levels(rooms.rooms(tmp_path)) == [["a"], ["b"], ["c"]]
    (tmp_path / "xformer" / "a" / "more.py").write_text("import xformer.c\n")
    with pytest.raises(RuntimeError, match="rooms import each other: "):
        rooms.levels(rooms.rooms(tmp_path))
