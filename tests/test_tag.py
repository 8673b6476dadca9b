"""Labels of tokens: the parts of transformers' TokenClassificationPipeline, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentences import BERT, LLAMA, TEXTS, write_model
from test_tokenizer import ROBERTA, byte_level, word_piece

from xformer import pretrained, tree
from xformer.backends import Backend
from xformer.cli import main
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import Tag, labels, tag
from xformer.sentences.tag import AGGREGATIONS

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC", "S-MISC-X")
NAMES = {str(i): name for i, name in enumerate(LABELS)}
TAGGER = BERT | {"architectures": ["BertForTokenClassification"], "id2label": NAMES}
SAMPLES = [
    "hello, hello! Hello hello",
    "don't well-known 3.14 $5",
    "Héllo hÉLLO  naïve",
    "東京 hello東京 unknown [SEP] hello",
    "hello " * 30,
    "",
]


def tagger(folder: Path, family: str = "Bert", dtype: str = "float64") -> Any:
    """A random model, and a tokenizer of pieces (BERT) or of bytes (RoBERTa)."""
    if family == "Bert":
        named = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "pad", "cls", "sep")}
        word_piece(folder, tokenizer_class="BertTokenizer", do_lower_case=False, **named)
    else:
        named = {"unk_token": "<unk>", "pad_token": "<pad>", "tokenizer_class": "RobertaTokenizer"}
        byte_level(folder, *ROBERTA, **named, cls_token="<s>", sep_token="</s>")
    own = tokenizer(folder)
    architecture = [f"{family}ForTokenClassification"]
    config = TAGGER | {"model_type": family.lower(), "architectures": architecture}
    sizes = {
        "vocab_size": own.vocab_size,
        "max_position_embeddings": 100,
        "pad_token_id": own.pad_id,
    }
    model = pretrained.model(config | sizes)
    rng = np.random.default_rng(4)
    params = tree.map(  # weights large beside biases: all labels occur
        lambda a: (a + rng.normal(0, (0.1, 1.0)[a.ndim - 1], a.shape)).astype(dtype),
        model.init(dtype="float64"),
    )
    pretrained.save(model, params, folder)
    return model, params, own


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tagger(tmp_path_factory.mktemp("bert"))


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_as_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    args = tagger(tmp_path, family, "float32")
    judge = transformers.pipeline("token-classification", str(tmp_path), device="cpu")
    for aggregation in AGGREGATIONS:
        for ignore in (["O"], [], ["PER", "I-PER", "MISC"]):
            found = tag(*args, SAMPLES, aggregation=aggregation, ignore=ignore)
            for text, tags in zip(SAMPLES, found, strict=True):
                want = judge(text, aggregation_strategy=aggregation, ignore_labels=ignore)
                label = "entity" if aggregation == "none" else "entity_group"
                assert [(t.label, t.start, t.end) for t in tags] == [
                    (one[label], one["start"], one["end"]) for one in want
                ], (aggregation, text)
                scores = [one["score"] for one in want]
                assert np.allclose([t.score for t in tags], scores, rtol=0, atol=1e-5)
                assert all(t.text == text[t.start : t.end] for t in tags)
        every = [
            t for tags in tag(*args, SAMPLES, aggregation=aggregation, ignore=()) for t in tags
        ]
        assert len(every) > 20 and {"LOC", "PER"} <= {t.label.split("-")[-1] for t in every}


@pytest.mark.parametrize("stride", [0, 3])
@pytest.mark.parametrize("aggregation", ["simple", "average"])
def test_windows_as_transformers(aggregation: str, stride: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    args = tagger(tmp_path, dtype="float32")
    judge = transformers.pipeline("token-classification", str(tmp_path), device="cpu")
    judge.tokenizer.model_max_length = 8
    texts = [*SAMPLES[:4], " ".join(SAMPLES[:3])]
    found = tag(*args, texts, aggregation=aggregation, stride=stride, max_len=8, batch_size=2)
    for text, tags in zip(texts, found, strict=True):
        want = judge(text, aggregation_strategy=aggregation, stride=stride)
        assert [(t.label, t.start, t.end) for t in tags] == [
            (one["entity_group"], one["start"], one["end"]) for one in want
        ], text
        scores = [one["score"] for one in want]
        assert np.allclose([t.score for t in tags], scores, rtol=0, atol=1e-5)


def test_on_every_library(opened: Any, library: Backend) -> None:
    model, params, own = opened
    want = tag(model, params, own, SAMPLES[:4])
    got = tag(model, tree.map(library.asarray, params), own, SAMPLES[:4], batch_size=2)
    for ours, theirs in zip(got, want, strict=True):
        assert [t._replace(score=0) for t in ours] == [t._replace(score=0) for t in theirs]
        scores = [t.score for t in theirs]
        assert np.allclose([t.score for t in ours], scores, rtol=0, atol=1e-12)


def test_a_tag_is_a_label_of_characters(opened: Any) -> None:
    model, params, own = opened
    text = SAMPLES[0]
    logits = model.forward(params, np.asarray([own.encode(text)]))[0][0]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    spans = [(0, 5), (5, 6), (7, 12), (12, 13), (14, 19), (20, 25)]
    want = [
        Tag(LABELS[row.argmax()], row.max(), start, end, text[start:end])
        for row, (start, end) in zip(probs[1:-1], spans, strict=True)
    ]
    (got,) = tag(*opened, [text], aggregation="none", ignore=())
    assert [t._replace(score=0) for t in got] == [t._replace(score=0) for t in want]
    assert np.allclose([t.score for t in got], [t.score for t in want], rtol=0, atol=1e-12)


def test_long_texts_are_cut(opened: Any) -> None:
    done: list[int] = []
    with pytest.warns(UserWarning, match="^tag: cut to 6 tokens: text 1 and 4 more of 6$") as said:
        got = tag(*opened, SAMPLES, max_len=6, ignore=(), progress=done.append)
    assert said[0].filename == __file__ and sum(done) == len(SAMPLES)
    assert [tags[-1].end for tags in got[:-1]] == [13, 10, 5, 9, 23] and got[-1] == []
    done.clear()
    got = tag(*opened, SAMPLES, max_len=6, ignore=(), stride=1, progress=done.append)
    assert [tags[-1].end for tags in got[:-1]] == [25, 23, 18, 30, 179]
    assert sum(done) == len(SAMPLES)
    assert tag(*opened, []) == []


def test_bad_input(opened: Any, tmp_path: Path) -> None:
    for texts, options, message in [
        ("hello", {}, "tag: texts must be a list of texts, got one text"),
        ([("a", "b")], {}, "tag: text 1 must be a string, got tuple"),
        (["\ud800"], {}, "tag: text 1"),
        (SAMPLES, {"aggregation": "sum"}, "tag: aggregation must be one of"),
        (SAMPLES, {"ignore": "O"}, "tag: ignore must be a list of labels, got 'O'"),
        (SAMPLES, {"max_len": 2}, "max_len must exceed the 2 special tokens, got 2"),
        (SAMPLES, {"stride": -1}, "tag: stride must be an int of at least 0, got -1"),
        (
            SAMPLES,
            {"stride": 4, "max_len": 6},
            "stride must be below the 4 tokens of a window, got 4",
        ),
        (SAMPLES, {"stride": 1, "aggregation": "none"}, "tag: a stride needs an aggregation"),
        (SAMPLES, {"batch_size": 0}, "tag: batch_size must be"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            tag(*opened, texts, **options)
    for config, got in [(BERT, "an encoder with a pooler"), (LLAMA, "a causal language model")]:
        with pytest.raises(ValueError, match=f"tag: the model must be a token clas.*, got {got}"):
            tag(pretrained.model(config), *opened[1:], TEXTS)
    with pytest.raises(ValueError, match="the tokenizer must be the model's, whose ids are below"):
        small = pretrained.model(TAGGER | {"vocab_size": 5})
        tag(small, small.init(), opened[2], ["hello"])
    write_model(tmp_path, TAGGER, special=False)
    plain = (*pretrained.load(tmp_path), tokenizer(tmp_path))
    with pytest.raises(ValueError, match="tag: text 2 has no tokens, got ''"):
        tag(*plain, ["a cat", ""])


def test_labels_of_a_token_classifier(opened: Any) -> None:
    assert labels(opened[0]) == list(LABELS)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = tagger(tmp_path)
    text = SAMPLES[0]
    ((first, *more),) = tag(*args, [text])
    command = ["tag", "--model", str(tmp_path), "--dtype", "float64"]
    assert main([*command, text]) == 0
    title, row, *others = capsys.readouterr().out.splitlines()
    assert title == text and len(others) == len(more) > 0
    assert row.split(maxsplit=2) == [first.label, f"{first.score:.4f}", first.text]
    assert main([*command, "--json", "--aggregation", "first", text, "h"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = tag(*args, [text, "h"], aggregation="first")
    assert rows == [
        {"text": text, "tags": [t._asdict() for t in tags]}
        for text, tags in zip([text, "h"], wanted, strict=True)
    ]
    assert main([*command, "--max-len", "6", text]) == 0
    assert capsys.readouterr().err == "xformer: warning: tag: cut to 6 tokens: text 1\n"
    assert main([*command, "--max-len", "6", "--stride", "1", text]) == 0
    assert capsys.readouterr().err == ""
    assert main([*command, "--stride", "1", "--aggregation", "none", text]) == 1
    assert "tag: a stride needs an aggregation" in capsys.readouterr().err


def test_a_wrong_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, BERT)
    assert main(["tag", "--model", str(tmp_path), "x"]) == 1
    err = capsys.readouterr().err
    want = "tag: the model must be a token classifier, got an encoder with a pooler (BertModel)"
    assert err == f"xformer: error: {want}\n"
