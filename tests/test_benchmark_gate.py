"""`python -m benchmarks.gate`: its shapes agree with their judges, and its contestants differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_benchmarks import BERT_SIZES, LLAMA_SIZES, InProcess, checked

from benchmarks import contestants, gate, gate_shapes, harness, products, step
from benchmarks.contestants import GATE, PEER, PROGRAM
from benchmarks.feed import Feed
from benchmarks.gate_shapes import BY_NAME
from benchmarks.products import Attention, Linear
from benchmarks.shapes import RELU, Shape
from xformer import GPT, backends, pretrained, tree
from xformer.base.tree import Frozen
from xformer.inspection.summary import summary

SIZES: dict[str, Any] = {"batch": 3, "length": 9, "rounds": 1, "repeats": 1}
T5_SIZES = {"d_model": 16, "d_kv": 5, "d_ff": 20, "num_heads": 3, "num_layers": 2}
T5_SIZES |= {"num_decoder_layers": 1, "vocab_size": 13}
FAMILIES = {
    "bert-classifier": (gate_shapes.BERT, BERT_SIZES | {"id2label": dict.fromkeys("0123", "")}),
    "t5": (gate_shapes.T5, T5_SIZES),
    "mixtral": (gate_shapes.MIXTRAL, LLAMA_SIZES),
    "gemma2": (gate_shapes.GEMMA2, LLAMA_SIZES | {"head_dim": 6, "sliding_window": 4}),
}


def small(name: str) -> Shape:
    """A shape of the gate with a model that runs at once."""
    shape = replace(BY_NAME[name], **SIZES)
    if name in FAMILIES:
        config, sizes = FAMILIES[name]
        model = pretrained.model(config | sizes)
        return replace(shape, model=model, target_length=shape.target_length and 5)
    model = GPT(11, 1, 8, 2, max_len=12, dropout=shape.model.blocks[0].dropout)
    shape = replace(shape, model=model, lengths=(9, 4, 7) if shape.lengths else ())
    return replace(shape, lora_rank=2 if shape.lora_rank else None)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "start", InProcess)
    monkeypatch.setattr(harness, "SETTLE", 0.0)


@pytest.mark.parametrize("contestant", ["numpy kernel", PROGRAM, PEER])
@pytest.mark.parametrize("name", [shape.name for shape in gate_shapes.GATE_SHAPES])
@pytest.mark.usefixtures("in_process")
def test_contestants_agree(name: str, contestant: str, tmp_path: Path) -> None:
    if why := contestants.why_not(contestant):
        pytest.skip(why)
    if BY_NAME[name].peer == gate_shapes.TRANSFORMERS and contestant == PEER:
        pytest.importorskip("transformers")
    shape = small(name)
    error = checked(shape, [contestant], tmp_path)[contestant]
    if shape.dropout and contestant == PEER:
        assert error is None  # torch draws other masks
    else:
        assert 0 < error <= max(shape.tolerance, 1e-5)


@pytest.mark.usefixtures("in_process")
def test_a_run_prints_tables_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("numba", reason="extra numba is not installed")
    monkeypatch.setitem(gate.BY_NAME, "char-gpt-lengths", small("char-gpt-lengths"))
    options = ["--shape", "char-gpt-lengths", "--rounds", "1", "--out", str(tmp_path)]
    assert gate.main(options) == 0
    (out,) = tmp_path.glob("gate-char-gpt-lengths-*.json")
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["name"] for row in found["rows"]] == list(GATE)
    assert all(0 < row["error"] <= 1e-5 for row in found["rows"])
    row = found["rows"][0]
    assert row["tokens_per_s"] == pytest.approx(3 * (9 + 4 + 7) / (row["step"]["min_ms"] / 1e3))
    shown = capsys.readouterr().out
    assert "batch 3 of 9, 4, 7 tokens" in shown
    assert gate.summary([found]) in shown and "numba program x" in gate.summary([found])


def test_the_last_table_has_texts_too() -> None:
    rows: list[dict[str, Any]] = [
        {"name": name, "token": {"min_ms": 4.0, "ratio": ratio}}
        for name, ratio in (("transformers", 1.0), ("xformer numpy", 0.5), ("xformer numba", 0.25))
    ]
    found = {"shape": "decoding-char-gpt", "peer": "transformers", "rows": rows}
    last = " ".join(gate.summary([found]).splitlines()[-1].split())
    assert last == "| decoding-char-gpt | 4 | 0.500 | - | 0.250 |"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "huge"], "argument --shape: must be one of tiny, "),
        (["--rounds", "0"], "--rounds: must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gate.main(arguments)
    assert message in capsys.readouterr().err


def test_a_contestant_that_cannot_take_part_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(contestants, "why_not", lambda name: f"{name}: why")
    with pytest.raises(SystemExit):
        gate.main([])
    assert f"{PEER}: why" in capsys.readouterr().err


def test_calls_get_the_batches_in_turn_and_keys_of_their_own() -> None:
    shape, host = small("char-gpt-lengths"), backends.get("numpy")
    feed = Feed(replace(shape, dropout=True), host)
    (tokens, targets), first = feed.next()
    assert tokens.shape == targets.shape == (3, 9)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    assert [feed.next()[0][0].shape[1] for _ in range(3)] == [4, 7, 9]
    assert first["dropout_key"] != feed.next()[1]["dropout_key"]
    assert shape.n_tokens == 3 * (9 + 4 + 7)


def test_a_classifier_gets_padded_texts_and_their_mask() -> None:
    shape = small("bert-classifier")
    (inputs,) = shape.batches(backends.get("numpy"))
    tokens, labels = inputs.arrays
    assert tokens.shape == (3, 9) and labels.shape == (3,)
    np.testing.assert_array_equal(inputs.masks["mask"], tokens != 0)
    assert not inputs.masks["mask"].all()


def test_adapters_alone_are_trained_and_disturbed() -> None:
    shape = small("char-gpt-lora")
    params = shape.parameters(shape.weights())
    leaves, trained = tree.flatten(params), tree.flatten(tree.trained(params))
    assert set(trained) == {name for name in leaves if name.endswith((".a", ".b"))} - {
        name for name, leaf in leaves.items() if isinstance(leaf, Frozen)
    }
    assert len(trained) == 2 * 6  # q, k, v, o, up, down
    assert all(np.std(leaf) > 0 for leaf in trained.values())


@pytest.mark.parametrize("name", ["mixtral", "gemma2", "char-gpt-3"])
def test_products_are_those_of_the_summary(name: str) -> None:
    shape = small(name)
    found = list(products.parts(shape))
    linear = sum(p.flops for part in found if isinstance(part, Linear) for p in part.products(True))
    flops = summary(shape.model, batch=shape.batch, length=shape.length).flops
    assert linear == pytest.approx(3 * shape.batch * shape.length * flops.weights)


def test_products_of_adapters_sources_and_cycles() -> None:
    lora = small("char-gpt-lora")
    rows, width = 3 * 9, 8
    found = [part for part in products.parts(lora) if isinstance(part, Linear)]
    assert found[:5] == [
        Linear(rows, width, 3 * width, frozen=True),
        Linear(rows, width, 3 * 2),
        *[Linear(rows, 2, width)] * 3,
    ]
    assert found[-1] == Linear(rows, width, 11, frozen=True)  # the embedding, which is frozen
    assert len(list(found[0].products(True))) == 2

    t5 = small("t5")
    heads = [part for part in products.parts(t5) if isinstance(part, Attention)]
    sizes = [(3 * 3 * 9, 9)] * 2 + [(3 * 3 * 5, 3), (3 * 3 * 5, 9)]
    assert [(part.queries, part.keys) for part in heads] == sizes

    cycle = small("char-gpt-lengths")
    apart = (replace(cycle, lengths=(), length=n) for n in cycle.lengths)
    assert products.products(cycle) == [p for one in apart for p in products.products(one)]


def test_what_rounds_to_the_other_side_of_0_is_allowed_for_relu_alone() -> None:
    tolerances = {shape.name: shape.tolerance for shape in gate_shapes.GATE_SHAPES}
    assert tolerances.pop("t5") == RELU
    assert set(tolerances.values()) == {1e-5}
