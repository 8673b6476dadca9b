"""`xformer export`: files of runs and of Hugging Face folders, and mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from causal_models import V, lively, seq2seq
from exported import Session, onnx

import xformer as xf
from xformer import backends, pretrained, training
from xformer.cli import main

BERT = {
    **{"model_type": "bert", "architectures": ["BertModel"], "vocab_size": V, "hidden_size": 12},
    **{"intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 3},
    "max_position_embeddings": 24,
}
NUMPY = backends.get()
MODULE = "sentence_transformers.models"
TOKENS = np.random.default_rng(0).integers(0, V, (2, 7))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gpt = xf.GPT(vocab_size=V, n_layers=1, d_model=12, n_heads=3, max_len=16)
    training.save("gpt", gpt, gpt.init(seed=0), NUMPY)
    bert = pretrained.model(BERT)
    pretrained.save(bert, lively(bert, 0), "bert")
    pooling = {"word_embedding_dimension": 12, "pooling_mode_cls_token": True}
    Path("bert/1_Pooling").mkdir()
    Path("bert/1_Pooling/config.json").write_text(json.dumps(pooling))
    names = ("Transformer", "Pooling")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"{MODULE}.{name}"}
        for i, name in enumerate(names)
    ]
    Path("bert/modules.json").write_text(json.dumps(modules))


def ran(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["export", *command.split()]) == 0
    return capsys.readouterr().out


def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    out = ran("--model gpt --out gpt.onnx", capsys)
    size = Path("gpt.onnx").stat().st_size
    assert out.splitlines() == [
        f"gpt.onnx  {size / 1000:.1f} kB",
        "inputs  tokens  int64 (batch, length)",
        f"outputs logits  float32 (batch, length, {V})",
    ]
    model, params = training.load("gpt", NUMPY)
    wanted, _ = model.forward(params, TOKENS)
    assert np.abs(Session(Path("gpt.onnx"))(tokens=TOKENS)["logits"] - wanted).max() < 1e-5


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--dtype float64 --mask --types --sizes batch=2 length=7"
    assert "types   int64 (2, 7)" in ran(f"--model bert --out bert.onnx {options}", capsys)
    model, params = pretrained.load("bert", dtype="float64")
    mask, types = TOKENS > 5, TOKENS % 2
    got = Session(Path("bert.onnx"))(tokens=TOKENS, mask=mask, types=types)["hidden"]
    wanted, _ = model.forward(params, TOKENS, mask=mask, types=types)
    assert np.abs(got - wanted).max() < 1e-12
    assert "mask" not in ran("--model bert --out bert.onnx --no-mask --max-len 9", capsys)


@pytest.mark.parametrize(
    ("options", "pooling", "normalize"),
    [("", "first", False), ("--pooling mean --normalize", "mean", True)],
)
def test_embeddings_by_the_settings_of_the_model(
    options: str, pooling: str, normalize: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ran(f"--model bert --out bert.onnx --embeddings {options}", capsys)
    assert "outputs embeddings  float32 (batch, 12)" in out
    model, params = pretrained.load("bert")
    mask = np.ones(TOKENS.shape, np.bool_)
    got = Session(Path("bert.onnx"))(tokens=TOKENS, mask=mask)["embeddings"]
    wanted, _ = model.pooled(params, TOKENS, mask=mask, pooling=pooling, normalize=normalize)
    assert np.abs(got - wanted).max() < 1e-5


def test_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--model gpt --out step.onnx --step --optimiser sgd --clip 0 --weight-decay 0.1"
    out = ran(f"{command} --dropout-seed 3", capsys)
    assert out.startswith("step.first.safetensors  ") and "\nstep.onnx  " in out
    for row in ("number    int64 ()", "params.*  ", "new.state.*"):
        assert row in out
    names = {x.name for x in onnx.load("step.onnx").graph.input}
    assert {"state.velocity.embed.table", "params.embed.table", "number", "lr"} <= names


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--model gpt --out gpt", "the file's name must end with .onnx, got 'gpt'"),
        ("--model bart --out a.onnx", "there is no folder or file bart; did you mean bert?"),
        ("--model gpt --out no/a.onnx", "onnx: there is no folder no"),
        ("--model gpt --out a.onnx --sizes length", "--sizes must be NAME=N, .* got 'length'"),
        ("--model gpt --out a.onnx --sizes length=-1", "--sizes must be NAME=N"),
        ("--model gpt --out a.onnx --sizes lenght=3", "did you mean length?"),
        ("--model gpt --out a.onnx --clip 3", "--clip needs --step"),
        ("--model gpt --out a.onnx --dropout-seed 3", "--dropout-seed needs --step"),
        ("--model gpt --out a.onnx --pooling mean", "--pooling needs --embeddings"),
        ("--model gpt --out a.onnx --no-normalize", "--normalize needs --embeddings"),
        ("--model gpt --out a.onnx --step --embeddings", "--step excludes --embeddings"),
        ("--model bert --out a.onnx --step --types", "--step excludes --types"),
        ("--model gpt --out a.onnx --max-len 17", "--max-len must be at most 16, got 17"),
        ("--model pair --out a.onnx --embeddings", "pooling is for a LanguageModel"),
    ],
)
def test_mistakes(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "pair" in command:
        model, params = seq2seq("Transformer")
        training.save("pair", model, params, NUMPY)
    assert main(["export", *command.split()]) == 1
    err = capsys.readouterr().err
    assert err.startswith("xformer: error: ") and err.count("\n") == 1
    assert re.search(message, err)
    assert not list(Path().glob("*.onnx"))
