"""docs/lesson.md: its program is short, its gradient is right, it learns, and it is xf.GPT."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).resolve().parent.parent / "docs/lesson.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TRAINING = next(i for i, block in enumerate(BLOCKS) if "params = train(" in block)


def run(blocks: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    namespace: dict[str, Any] = {"__name__": "lesson"}
    for block in blocks:
        exec(block, namespace)
    return namespace, capsys.readouterr().out


def test_the_model_is_short() -> None:
    """Up to and with training: 150 lines of code."""
    lines = "".join(BLOCKS[: TRAINING + 1]).splitlines()
    assert len([line for line in lines if line.strip()]) <= 150


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("dx = dx + dy", "dx = dx"), ("dh_q + dh_k + dh_v", "dh_q + dh_k"), ("dtable.T + ", "")],
)
def test_the_mistakes_that_it_suggests_are_found(
    right: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "".join(BLOCKS[:TRAINING])
    for shown, other in ((right, wrong), ("n_blocks=1))", "n_blocks=1), alone=False)")):
        assert code.count(shown) == 1
        code = code.replace(shown, other)
    _, printed = run([code], capsys)
    assert "GRADIENTS DISAGREE" in printed
