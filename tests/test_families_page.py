"""docs/families.md: every family is on it; every test, op, layer and case that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from xformer import layers, models, ops
from xformer.pretrained.families import FAMILIES
from xformer.proofs.catalogue import cases

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "families.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", PAGE, re.MULTILINE))
NAMED = sorted(set(re.findall(r"\[(test_\w+)\]\[([\w-]+)\]", PAGE)))


def table(first: str) -> list[list[str]]:
    """The rows of the table whose first row begins like this, each as its cells."""
    lines = PAGE[PAGE.index(f"\n| {first} |") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def functions_of(path: Path) -> set[str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_family_has_a_row() -> None:
    rows = [quoted(row[0])[-1] for row in table("family | loads")]
    assert sorted(rows) == sorted(FAMILIES)


def test_every_cell_names_a_test() -> None:
    for name, *cells in table("family | loads"):
        assert len(cells) == 4
        assert all(re.fullmatch(r"(\[test_\w+\]\[[\w-]+\] ?)+", cell) for cell in cells), name


@pytest.mark.parametrize(("test", "label"), NAMED)
def test_named_tests_exist(test: str, label: str) -> None:
    assert test in functions_of((DOCS / FILES[label]).resolve())


def test_labels_are_used_and_lead_somewhere() -> None:
    assert set(FILES) == set(re.findall(r"\]\[([\w-]+)\]", PAGE))
    assert all((DOCS / path).exists() for path in FILES.values())


def test_architectures_are_those_of_the_families() -> None:
    page = {quoted(name)[0]: quoted(cell) for name, cell in table("family | architectures")}
    assert page == {name: list(f.heads) for name, f in FAMILIES.items() if f.heads}


def test_features_have_their_places_and_cases() -> None:
    names = [case.name for case in cases()]
    for feature, places, begins, _ in table("feature | where"):
        for place in quoted(places):
            room, _, name = place.partition(".")
            assert name in {"ops": ops, "layers": layers, "models": models}[room].__all__, feature
        for begin in quoted(begins):
            assert any(name.startswith(begin) for name in names), f"{feature}: {begin}"
        assert quoted(places) and quoted(begins)
