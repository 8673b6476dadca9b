"""Accuracy and F1 of classifiers and taggers while they are fine-tuned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finetuning import CLASSIFIER, TAGGER, write_folder, write_lines
from libraries import only
from test_finetune import NUMPY, examples, made, records

from xformer import finetune, tree
from xformer.backends import Backend
from xformer.cli import main
from xformer.finetune import TrainConfig
from xformer.finetune.measures import _entities, _entity_f1

NAMES = ["O", "B-X", "I-X", "B-Y", "I-Y"]


@pytest.mark.parametrize(
    ("tags", "wanted"),
    [
        ("O B-X I-X O B-Y", [("X", 1, 3), ("Y", 4, 5)]),
        ("B-X B-X I-X", [("X", 0, 1), ("X", 1, 3)]),
        ("B-X I-Y I-Y", [("X", 0, 1), ("Y", 1, 3)]),
        ("O I-X I-X", [("X", 1, 3)]),
        ("O O", []),
        ("", []),
    ],
)
def test_entities_are_those_of_conll(tags: str, wanted: list[Any]) -> None:
    assert list(_entities(tags.split())) == wanted


def test_the_f1_of_entities() -> None:
    """Two of three wanted are found, and one of three that are found is none."""
    texts = [([1, 2, 0, 3], [1, 2, 0, 1]), ([0, 3, 4], [0, 3, 4])]
    rows = [(np.asarray(wanted), np.asarray(got)) for wanted, got in texts]
    assert _entity_f1(rows, NAMES) == pytest.approx(2 * 2 / (3 + 3))
    assert _entity_f1([(np.zeros(2, int),) * 2], NAMES) == 1.0


@only("numpy", "torch", "array-api-strict")
@pytest.mark.parametrize("name", ["classify", "classify-pairs", "tag"])
def test_measures_are_those_of_the_predictions(name: str, library: Backend, tmp_path: Path) -> None:
    task, params = made(name, tmp_path)
    found = examples(task, *records(name, 11))
    got = finetune.measure(task, tree.map(library.asarray, params), found, library, batch_size=4)
    wanted, predicted = [], []
    for example in found:
        batch = task.batch([example], np.random.default_rng(0))
        logits = task.model.forward(params, batch.arrays[0], **batch.masks)[0]
        keep = batch.arrays[1] >= 0
        wanted += batch.arrays[1][keep].tolist()
        predicted += np.argmax(logits, -1)[keep].tolist()
    assert got["accuracy"] == np.mean(np.equal(wanted, predicted))
    if name != "tag":
        judge = pytest.importorskip("sklearn.metrics", reason="the judge is not installed")
        assert got["f1"] == pytest.approx(judge.f1_score(wanted, predicted, average="macro"))


def test_other_tasks_have_none(tmp_path: Path) -> None:
    task, params = made("causal", tmp_path)
    assert finetune.measure(task, params, examples(task, {"text": "abc"}), NUMPY) == {}


def test_they_come_with_each_validation(tmp_path: Path) -> None:
    task, params = made("classify", tmp_path)
    found, held_out = (examples(task, *records("classify", 20, seed)) for seed in (0, 1))
    config = TrainConfig(4, 8, lr=1e-2, warmup=1, eval_every=2)
    measures = []
    for step in finetune.train(task, params, found, config, NUMPY, held_out, donate=True):
        wanted = finetune.measure(task, step.params, held_out, NUMPY)
        assert step.measures == (wanted if step.step % 2 == 0 else None)
        measures.append(step.measures)
    assert len(measures) == 4


@pytest.mark.parametrize(("task", "config"), [("classify", CLASSIFIER), ("tag", TAGGER)])
def test_the_command_logs_and_prints_them(
    task: str,
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    write_folder(Path("base"), config, "bert")
    write_lines(Path("data.jsonl"), records(task, 60))
    command = ["finetune", "--model", "base", "--data", "data.jsonl", "--out", "new"]
    assert main([*command, "--steps", "8", "--validate-every", "4", "--lr", "0.02"]) == 0
    rows = [json.loads(line) for line in Path("new/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "accuracy" in row and "f1" in row] == [4, 8]
    best = min((row for row in rows if "accuracy" in row), key=lambda row: row["validation"])
    said = capsys.readouterr().out
    assert f"accuracy {best['accuracy']:.3f}, F1 {best['f1']:.3f}" in said
    assert f"step 8/8  loss {rows[7]['loss']:.3f}  validation {rows[7]['validation']:.3f}" in said
    assert f"  accuracy {rows[7]['accuracy']:.3f}  F1 {rows[7]['f1']:.3f}  " in said
    assert main(["finetune", "--resume", "new"]) == 0
    assert f"accuracy {best['accuracy']:.3f}, F1 {best['f1']:.3f}" in capsys.readouterr().out
