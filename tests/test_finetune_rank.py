"""Fine-tuning of a cross-encoder; sentence-transformers judges its loss, gradients and scores."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finetuning import BERT, CLASSIFIER, RANKER, write_folder, write_lines
from libraries import only
from test_finetune import batch, made, records

from xformer import backends, finetune, gradcheck, pretrained, tree
from xformer.backends import Backend
from xformer.cli import main
from xformer.finetune.ranking import binary_cross_entropy
from xformer.pretrained import PretrainedError
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import rank, rank_settings

NUMPY = backends.get("numpy")
PAIRS = [
    {"query": "abc", "document": "defgh", "score": 1.0},
    {"query": "d", "document": "e", "score": 0.25},
    {"query": "fgh", "document": "ij", "score": 0},
]
TEXTS = ["bcd", "efg", "a", "hij abc", "abcdefgh" * 3]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def folder(name: str, config: dict[str, Any] = RANKER) -> Path:
    Path(name).mkdir()
    return write_folder(Path(name), config, "bert")


# ---- The loss ----


@pytest.mark.parametrize("far", [1.0, 1e3])
def test_binary_cross_entropy_is_that_of_torch(far: float) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(0)
    z, t = rng.normal(size=7) * far, rng.uniform(size=7)
    there = torch.tensor(z, requires_grad=True)
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(there, torch.tensor(t))
    wanted.backward()
    loss, cache = binary_cross_entropy(z, t)
    np.testing.assert_allclose(loss, float(wanted.detach()), rtol=1e-14)
    np.testing.assert_allclose(cache.backward(np.ones(())), there.grad.numpy(), rtol=1e-13)


def test_binary_cross_entropy_by_differences() -> None:
    z, t = np.random.default_rng(1).normal(size=(2, 5))
    assert gradcheck(lambda z: binary_cross_entropy(z, t**2 / (1 + t**2)), z).ok


@only("numpy", "torch", "array-api-strict")
def test_the_loss_of_a_batch(library: Backend, tmp_path: Path) -> None:
    """Of the logits of the model, with token types, on each library."""
    task, params = made("rank", tmp_path)
    made_batch = batch(task, *PAIRS)
    tokens, scores = made_batch.arrays
    assert scores.tolist() == [1.0, 0.25, 0.0] and made_batch.n_targets == 3
    z = task.model.forward(params, tokens, **made_batch.masks)[0][:, 0]
    wanted = np.mean(np.log1p(np.exp(z)) - z * scores)
    got, cache = task.loss(tree.map(library.asarray, params), made_batch, library)
    np.testing.assert_allclose(library.to_numpy(got), wanted, rtol=1e-13)
    grads = tree.flatten(cache.backward())
    plain = tree.flatten(task.loss(params, made_batch, "numpy")[1].backward())
    for name, grad in plain.items():
        np.testing.assert_allclose(library.to_numpy(grads[name]), grad, rtol=1e-9, atol=1e-12)


def test_loss_and_gradients_are_those_of_sentence_transformers() -> None:
    judge = pytest.importorskip("sentence_transformers", reason="the judge is not installed")
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    path = folder("base")
    of_types(path)
    model, params = pretrained.load(path)
    task = finetune.task("rank", model, tokenizer(path))
    loss, cache = task.loss(params, batch(task, *PAIRS), NUMPY)
    theirs = judge.CrossEncoder(str(path), device="cpu")
    theirs.model.eval()
    import torch

    columns = [[pair[name] for pair in PAIRS] for name in ("query", "document")]
    wanted = BinaryCrossEntropyLoss(theirs)(columns, torch.tensor([p["score"] for p in PAIRS]))
    wanted.backward()
    np.testing.assert_allclose(loss, float(wanted.detach()), rtol=1e-5)
    grads = pretrained.loading.tensors_of(model, cache.backward())
    for name, leaf in theirs.model.named_parameters():
        np.testing.assert_allclose(grads[name], leaf.grad.numpy(), rtol=1e-3, atol=1e-6)


def of_types(path: Path) -> None:
    """Let the judge's tokenizer return token types."""
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))


# ---- The result ----


@pytest.mark.parametrize("options", [[], ["--lora", "2"]])
@pytest.mark.parametrize("new", [False, True], ids=["cross-encoder", "encoder"])
def test_the_result_ranks_as_in_sentence_transformers(
    new: bool, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder("base", BERT if new else RANKER)
    of_types(path)
    data = write_lines(Path("data.jsonl"), records("rank", 40))
    command = ["finetune", "--model", "base", "--data", str(data), "--out", "new", "--lr", "0.02"]
    assert main([*command, "--steps", "30", "--batch", "8", *options]) == 0
    said = capsys.readouterr().out
    assert "task: rank" in said and "to use it: xformer rank --model new -- " in said
    (losses,) = re.findall(r"validation loss ([\d.]+) nats, ([\d.]+) before training", said)
    assert float(losses[0]) < float(losses[1])
    model, params = pretrained.load("new")
    settings = rank_settings("new")
    found = rank(model, params, tokenizer("new"), "abc", TEXTS, **settings._asdict())
    assert main(["rank", "abc", *TEXTS, "--model", "new", "--json"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["index"], one["score"]) for one in printed] == [one[:2] for one in found]
    judge = pytest.importorskip("sentence_transformers", reason="the judge is not installed")
    path = str(Path("new").absolute())  # of a relative path it asks the Hub first
    theirs = judge.CrossEncoder(path, device="cpu").rank("abc", TEXTS)
    assert [one.index for one in found] == [one["corpus_id"] for one in theirs]
    scores = [one["score"] for one in theirs]
    np.testing.assert_allclose([one.score for one in found], scores, rtol=1e-5)


def test_settings_of_embeddings_are_not_those_of_a_ranker() -> None:
    """A cross-encoder made from a model of sentence-transformers is none of its embeddings."""
    path = folder("base", BERT | {"architectures": ["BertModel"]})
    kinds = ("sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling")
    modules = [
        {"idx": i, "name": str(i), "path": p, "type": kind}
        for i, (p, kind) in enumerate(zip(("", "1_Pooling"), kinds, strict=True))
    ]
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(PretrainedError):
        rank_settings(path)
    data = write_lines(Path("data.jsonl"), records("rank", 20))
    command = ["finetune", "--model", "base", "--data", str(data), "--steps", "2", "--out", "new"]
    assert main(command) == 0
    assert not Path("new/modules.json").exists() and main(["rank", "a", "b", "--model", "new"]) == 0


def test_settings_of_a_ranker_are_kept() -> None:
    """Its prompt is before each query in training too."""
    path = folder("base")
    whole = {"model_type": "CrossEncoder", "prompts": {"q": "aa "}, "default_prompt_name": "q"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(whole))
    data = write_lines(Path("data.jsonl"), records("rank", 20))
    command = ["finetune", "--model", "base", "--data", str(data), "--steps", "2", "--out"]
    assert main([*command, "new"]) == 0
    assert rank_settings("new").prompt == "aa "
    (path / "config_sentence_transformers.json").unlink()
    prompted = [row | {"query": f"aa {row['query']}"} for row in records("rank", 20)]
    write_lines(Path("data.jsonl"), prompted)
    assert main([*command, "other"]) == 0
    one, other = (Path(name, "log.jsonl").read_text().splitlines() for name in ("new", "other"))
    assert [json.loads(x)["loss"] for x in one] == [json.loads(x)["loss"] for x in other]


# ---- What is refused ----


def test_a_missing_field_beside_a_label() -> None:
    Path("a.csv").write_text("query,text,label\na,b,1\n")
    with pytest.raises(ValueError, match=r"lacks 'document', it has 'query', 'text', 'label'$"):
        finetune.read("a.csv", finetune.TASKS["rank"].fields)


@pytest.mark.parametrize("score", [-0.1, 1.5, "good", None, True, float("nan"), [1]])
def test_scores_that_are_none(score: Any) -> None:
    path = Path("a.jsonl")
    path.write_text(json.dumps({"query": "a", "document": "b", "score": score}))
    with pytest.raises(ValueError, match=r"line 1: score must be a number from 0 to 1, got "):
        finetune.read(path, finetune.TASKS["rank"].fields)


def test_other_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder("base", CLASSIFIER)
    data = write_lines(Path("data.jsonl"), records("rank", 20))
    assert main(["finetune", "--model", "base", "--data", str(data), "--out", "new"]) == 1
    wanted = "for this task the model must be a cross-encoder, a classifier of 1 class, got"
    assert wanted in capsys.readouterr().err and not Path("new").exists()
