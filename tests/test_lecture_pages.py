"""docs/lectures: the code prints what is shown, and every exercise is in its lecture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import solutions

from xformer import backends
from xformer.exercises import EXERCISES, get, grade

FOLDER = Path(__file__).resolve().parent.parent / "docs/lectures"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
PAGES = {n: (FOLDER / f"{n}.md").read_text(encoding="utf-8") for n in range(1, 7)}


@pytest.mark.parametrize("number", PAGES)
def test_the_exercises_of_a_lecture_are_on_its_page(number: int) -> None:
    """In the order of `xformer exercise`; and the index names them."""
    of_lecture = [name for name, exercise in EXERCISES.items() if exercise.lecture == number]
    assert re.findall(r"^\| `xformer exercise (\w+)` \|", PAGES[number], re.M) == of_lecture
    (row,) = re.findall(rf"^\| \[{number}\]\({number}\.md\) .*$", INDEX, re.M)
    named = re.findall(r"`(\w+)`", row)
    assert named == [name for name in of_lecture if not get(name).planted]


def test_pages_are_short() -> None:
    for page in PAGES.values():
        assert 60 <= len(page.splitlines()) <= 130


def test_the_index_shows_what_a_check_prints() -> None:
    """Softmax without the sum in its backward, on the first library."""
    (shown,) = re.findall(r"forgot the sum:\n\n```text\n(.*?)```", INDEX, re.DOTALL)

    def softmax_backward(dy: Any, saved: Any) -> Any:
        return saved * dy

    names = {**vars(solutions), "softmax_backward": softmax_backward}
    printed = str(grade(get("softmax"), names, [backends.get("numpy")]))
    explained = shown.partition("\n\n")[2].replace("numpy, torch, jax, array-api-strict", "numpy")
    assert printed.partition("\n\n")[2] == explained.rstrip("\n")
