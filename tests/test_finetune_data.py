"""Data of fine-tuning: tables, and arrays of JSON."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from test_finetune import MODELS, records

from xformer import finetune

NASTY = ["a,b", 'he said "hi"', "two\nlines", " spaces ", "é", "=1+2", "a\tb"]


def table(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(path: Path, task: str) -> list[dict[str, Any]]:
    return [record.fields for record in finetune.read(path, finetune.TASKS[task].fields)]


@pytest.mark.parametrize("task", [name for name in MODELS if name != "tag"])
def test_the_same_from_every_file(task: str, tmp_path: Path) -> None:
    rows = records(task, 9)
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    wanted = read(lines, task)
    array = tmp_path / "a.json"
    for text in (json.dumps(rows), json.dumps(rows, indent=2), "\n\n" + json.dumps(rows)):
        array.write_text(text)
        assert read(array, task) == wanted
    array.write_text(lines.read_text())
    assert read(array, task) == wanted
    for name, delimiter in (("a.csv", ","), ("A.TSV", "\t")):
        path = table(tmp_path / name, [row | {"other": 1} for row in rows], delimiter)
        assert read(path, task) == wanted
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + path.read_bytes()))
        assert read(packed, task) == wanted
        assert finetune.data.first_fields(packed) == (*rows[0], "other")
    assert finetune.data.first_fields(array) == tuple(rows[0])


def test_tags_from_an_array(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(records("tag", 3), indent=1))
    assert read(tmp_path / "a.json", "tag") == records("tag", 3)


def test_texts_in_a_table_stay_what_they_are(tmp_path: Path) -> None:
    rows = [{"text": text, "label": str(i)} for i, text in enumerate(NASTY)]
    found = finetune.read(table(tmp_path / "a.csv", rows), ("text", "label"))
    assert [record.fields["text"] for record in found] == NASTY
    assert [record.fields["label"] for record in found] == list(range(len(NASTY)))
    assert found[3].where == f"{tmp_path / 'a.csv'}: line 6"  # after a text of two lines


def test_labels_of_a_table_are_names_unless_all_are_numbers(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": label} for label in ("1", "2", "x")]
    found = read(table(tmp_path / "a.csv", rows), "classify")
    assert [row["label"] for row in found] == ["1", "2", "x"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.csv: there is nothing in it to train on"),
        ("text,label\n", "a.csv: there is nothing in it to train on"),
        ("text,label\na,1\nb\n", "a.csv: line 3: must have 2 fields, got 1"),
        ("text,label\na,1,2\n", "a.csv: line 2: must have 2 fields, got 3"),
        ("text,text\na,1\n", "a.csv: line 1: two columns have the same name: text, text"),
        ("a,1\n", "a.csv: there is nothing in it to train on"),
        ("words,label\na,1\n", "a.csv: line 2: lacks 'text', it has 'words', 'label'"),
        ('text,label\n"a,1\n', "a.csv: line 2: unexpected end of data"),
        (f"text,label\n{'a' * 200_000},1\n", r"line 2: field larger .*; a \.jsonl file may have"),
        ("text,label\n,1\n", "a.csv: line 2: text must be a text that is not empty, got ''"),
    ],
)
def test_tables_that_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.csv", "classify")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "a.json: there is nothing in it to train on"),
        ('[{"text": "a"}, 3]', "a.json: item 2: must be a JSON object, got int"),
        ('[{"text": "a"}, {"text": ""}]', "a.json: item 2: text must be a text that is not empty"),
        ('[{"text": "a"}', r"a\.json: is no valid JSON: "),
        ("[" * 100_000, r"a\.json: is no valid JSON: "),
        ('[{"text": "a"}]\n[{"text": "b"}]', r"a\.json: is no valid JSON: Extra data"),
    ],
)
def test_arrays_that_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.json", "causal")
