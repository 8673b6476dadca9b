"""Ranking by a cross-encoder: the scores of sentence-transformers, the folder, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentences import BERT, LLAMA, TEXTS, write, write_model
from test_embed_modules import chain

from xformer import pretrained, tree
from xformer.backends import Backend
from xformer.cli import main
from xformer.cli.texts import shown
from xformer.pretrained import PretrainedError
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import RankSettings, rank, rank_settings

CROSS = BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
QUERY = "why was it not good"
IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"
NEW = {"activation_fn": IDENTITY, "version": "4.0.1"}
OLD = {"sbert_ce_default_activation_function": IDENTITY}


def opened(folder: Path, config: dict[str, Any] = CROSS, dtype: str = "float64") -> Any:
    own = tokenizer(write_model(folder, config, dtype))
    return (*pretrained.load(folder, dtype=dtype), own)


def logits(opened: Any, query: str = QUERY, **options: Any) -> np.ndarray:
    """Pair by pair."""
    model, params, own = opened
    found = [own.encoding(query, text, **options) for text in TEXTS]
    rows = [
        model.forward(params, np.asarray([e.ids]), types=np.asarray([e.types]))[0] for e in found
    ]
    return np.concatenate(rows)[:, 0]


@pytest.mark.filterwarnings("ignore:rank. cut to 24 tokens")  # as they cut it
@pytest.mark.parametrize(
    "config",
    [{}, {"sentence_transformers": NEW}, OLD, OLD | {"sentence_transformers": {"version": "4"}}],
    ids=["sigmoid", "new", "old", "both"],
)
def test_as_sentence_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    judge = pytest.importorskip("sentence_transformers", reason="the judge is not installed")
    model, params, own = opened(tmp_path, CROSS | config, "float32")
    words = {kind: f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep")}
    named = {f"{kind}_token": token for kind, token in words.items()}
    types = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    write(tmp_path, tokenizer_config={"tokenizer_class": "TokenizersBackend"} | named | types)
    theirs = judge.CrossEncoder(str(tmp_path), device="cpu")
    for documents in (TEXTS, [*TEXTS, "the " * 40], TEXTS[:1]):
        wanted = theirs.rank(QUERY, documents, return_documents=True)
        found = rank(model, params, own, QUERY, documents, **rank_settings(tmp_path)._asdict())
        assert [one.index for one in found] == [one["corpus_id"] for one in wanted]
        assert [one.text for one in found] == [one["text"] for one in wanted]
        scores = [one["score"] for one in wanted]
        assert np.allclose([one.score for one in found], scores, rtol=1e-5, atol=1e-5)
    assert found[0].score != pytest.approx(0.5)


def test_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    """Its activation, limit and prompt, as version 6 writes them."""
    judge = pytest.importorskip("sentence_transformers", reason="the judge is not installed")
    opened(tmp_path / "model", dtype="float32")
    prompts: Any = {"prompts": {"query": "so "}, "default_prompt_name": "query"}
    torch = pytest.importorskip("torch", reason="torch is not installed")
    theirs = judge.CrossEncoder(
        str(tmp_path / "model"), device="cpu", activation_fn=torch.nn.Identity(), **prompts
    )
    theirs.max_seq_length = 12
    theirs.save_pretrained(str(tmp_path / "saved"))
    settings = rank_settings(tmp_path / "saved")
    assert settings == RankSettings("identity", 12, "so ")
    loaded = pretrained.load(tmp_path / "saved")
    with pytest.warns(UserWarning, match="rank: cut to 12 tokens: text"):
        found = rank(*loaded, tokenizer(tmp_path / "saved"), QUERY, TEXTS, **settings._asdict())
    wanted = theirs.rank(QUERY, TEXTS)
    assert [one.index for one in found] == [one["corpus_id"] for one in wanted]
    scores = [one["score"] for one in wanted]
    assert np.allclose([one.score for one in found], scores, rtol=1e-5, atol=1e-5)


def test_on_every_library(library: Backend, tmp_path: Path) -> None:
    model, params, own = opened(tmp_path)
    found = rank(model, tree.map(library.asarray, params), own, QUERY, TEXTS, activation="identity")
    want = logits((model, params, own))
    assert [one.index for one in found] == list(np.argsort(-want, kind="stable"))
    assert np.allclose([one.score for one in found], np.sort(want)[::-1], rtol=0, atol=1e-12)


def test_options(tmp_path: Path) -> None:
    args = opened(tmp_path)
    found = rank(*args, QUERY, TEXTS, top_k=2, batch_size=1)
    want = 1 / (1 + np.exp(-logits(args)))
    best = np.argsort(-want)[:2]
    assert [one.index for one in found] == list(best)
    assert [one.text for one in found] == [TEXTS[i] for i in best]
    assert np.allclose([one.score for one in found], want[best], rtol=0, atol=1e-12)
    prompted = rank(*args, "good", TEXTS, prompt="why was it not ")
    assert prompted == rank(*args, QUERY, TEXTS) and len(prompted) == len(TEXTS)
    same = rank(*args, QUERY, ["a dog", "why"] * 20)  # other sorts than a stable one mix these
    assert same == sorted(same, key=lambda one: (-one.score, one.index))
    assert len({one.score for one in same}) < 40
    assert rank(*args, QUERY, []) == []
    with pytest.warns(UserWarning, match="rank: cut to 10 tokens: text 1 and 2 more of 5"):
        cut = rank(*args, QUERY, TEXTS, max_len=10, activation="identity")
    wanted = np.sort(logits(args, max_len=10))[::-1]
    assert np.allclose([one.score for one in cut], wanted, rtol=0, atol=1e-12)


def test_settings(tmp_path: Path) -> None:
    assert rank_settings(tmp_path) == RankSettings()
    write(tmp_path, tokenizer_config={"model_max_length": 77})
    assert rank_settings(tmp_path) == RankSettings(max_len=77)
    whole = {"model_type": "CrossEncoder", "activation_fn": SIGMOID, "prompts": {"q": "x"}}
    limits = {"max_seq_length": 9, "transformer_task": "sequence-classification"}
    write(tmp_path, config_sentence_transformers=whole, sentence_bert_config=limits)
    assert rank_settings(tmp_path) == RankSettings("sigmoid", 9)
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    write(tmp_path, modules=[{"idx": 0, "name": "0", "path": "", "type": kind}])
    assert rank_settings(tmp_path) == RankSettings("sigmoid", 9)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"activation_fn": "torch.nn.modules.activation.Tanh"}, "activation_fn must be one of"),
    ({"activation_fn": 3}, "activation_fn must be"),
    ({"model_type": "SentenceTransformer"}, "model_type must be 'CrossEncoder'"),
    ({"default_prompt_name": "q"}, "default_prompt_name must be one of prompts"),
    ({"new": 1}, "not supported: 'new'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_settings_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, config_sentence_transformers={"model_type": "CrossEncoder"} | changes)
    with pytest.raises(PretrainedError, match=message):
        rank_settings(tmp_path)


def test_modules_that_are_refused(tmp_path: Path) -> None:
    for modules, message in [
        (chain("Transformer", "Pooling"), "type must be .*, Transformer, got 'sent.*Pooling'"),
        (chain("Transformer") * 2, "path must be a folder's name"),
        ([chain("Transformer")[0] | {"path": "0_Transformer"}], "path must be empty"),
        ([chain("Transformer")[0] | {"type": "own.Transformer"}], "got 'own.Transformer'"),
    ]:
        write(tmp_path, modules=modules)
        with pytest.raises(PretrainedError, match=message):
            rank_settings(tmp_path)
    write(tmp_path, modules=[], sentence_bert_config={"transformer_task": "feature-extraction"})
    with pytest.raises(PretrainedError, match="must be Transformer, got "):
        rank_settings(tmp_path)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(PretrainedError, match="transformer_task must be 'sequence-classif"):
        rank_settings(tmp_path)


def test_bad_input(tmp_path: Path) -> None:
    args = opened(tmp_path)
    for query, documents, options, message in [
        (3, TEXTS, {}, "rank: query must be a string, got int"),
        ("\ud800", TEXTS, {}, "rank: query"),
        (QUERY, "a dog", {}, "rank: texts must be a list of texts, got one text"),
        (QUERY, [("a", "b")], {}, "rank: text 1 must be a string, got tuple"),
        (QUERY, TEXTS, {"top_k": 0}, "rank: top_k must be"),
        (QUERY, TEXTS, {"activation": "tanh"}, "rank: activation must be one of"),
        (QUERY, TEXTS, {"max_len": 3}, "max_len must exceed the 3 special tokens, got 3"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            rank(*args, query, documents, **options)
    for config, got in [
        (CROSS | {"id2label": {"0": "a", "1": "b"}}, "a classifier of 2 classes"),
        (BERT, "an encoder with a pooler"),
        (LLAMA, "a causal language model"),
    ]:
        with pytest.raises(ValueError, match=f"rank: the model must be a cross-en.*, got {got}"):
            rank(pretrained.model(config), *args[1:], QUERY, TEXTS)
    odd = pretrained.model(CROSS | {"sbert_ce_default_activation_function": "torch.nn.Tanh"})
    with pytest.raises(PretrainedError, match="sbert_ce_default_activation_function must be one"):
        rank(odd, *args[1:], QUERY, TEXTS)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = opened(tmp_path)
    found = rank(*args, QUERY, TEXTS)
    command = ["rank", "--model", str(tmp_path), "--dtype", "float64", QUERY]
    assert main([*command, *TEXTS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{one.score:8.4f}  {one.index + 1}  {shown(one.text)}" for one in found]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS))
    assert main([*command, "--file", str(file), "--json", "--top", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [one._asdict() for one in found[:2]]
    options = ["--activation", "identity", "--max-len", "20"]
    assert main([*command[:-1], *options, QUERY, TEXTS[0]]) == 0
    (want,) = rank(*args, QUERY, TEXTS[:1], activation="identity")
    assert capsys.readouterr().out.startswith(f"{want.score:8.4f}  1  ")


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, BERT)
    for command, message in [
        ([QUERY, "x"], "rank: the model must be a cross-encoder, a classifier of 1 class, got an"),
        ([QUERY, "x", "--top", "0"], "--top must be at least 1, got 0"),
        ([QUERY], "there are no texts"),
    ]:
        assert main(["rank", "--model", str(tmp_path), *command]) == 1
        err = capsys.readouterr().err
        assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1
