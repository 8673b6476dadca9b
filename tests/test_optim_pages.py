"""The pages of optimisers, schedules and checkpointing: their code prints what they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from xformer import optim
from xformer.optim import schedules

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = {
    name: (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for name in ("optimisers", "schedules", "checkpointing")
}


def test_every_optimiser_and_every_convention_is_told() -> None:
    told = PAGES["optimisers"]
    assert all(f"`{name}`" in told for name in optim.OPTIMISERS)
    told = PAGES["schedules"]
    assert all(f"`{name}`" in told for name in (*schedules.RISES, *schedules.FALLS))


@pytest.mark.parametrize("name", PAGES)
def test_the_index_names_the_page(name: str) -> None:
    assert f"]({name}.md)" in (DOCS / "README.md").read_text(encoding="utf-8")
