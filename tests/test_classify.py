"""Classes of texts: the probabilities of transformers, the names of classes, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentences import BERT, LLAMA, TEXTS, cut_left, write, write_model, write_tokenizer

from xformer import pretrained, tree
from xformer.backends import Backend
from xformer.cli import main
from xformer.models import LanguageModel
from xformer.pretrained import PretrainedError
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import classify, labels

NAMES = {"0": "good", "1": "bad", "2": "so so"}
CLASSIFIER = BERT | {"architectures": ["BertForSequenceClassification"], "id2label": NAMES}
DECODER = LLAMA | {"architectures": ["LlamaForSequenceClassification"], "id2label": NAMES}
SIZES = {
    "Bert": {"hidden_size": 12, "intermediate_size": 20, "max_position_embeddings": 24},
    "Llama": {"hidden_size": 12, "intermediate_size": 20, "max_position_embeddings": 24},
    "GPT2": {"n_embd": 12, "n_positions": 24},
}


def opened(folder: Path, config: dict[str, Any] = CLASSIFIER) -> tuple[Any, Any, Any]:
    own = tokenizer(write_model(folder, config))
    return (*pretrained.load(folder, dtype="float64"), own)


@pytest.mark.parametrize("family", ["Bert", "GPT2", "Llama"])
def test_as_transformers(family: str, tmp_path: Path) -> None:
    """GPT-2 and Llama classify by the last token of each text, padding or not."""
    huggingface = pytest.importorskip("huggingface")  # skips without torch or transformers
    torch, transformers = huggingface.torch, huggingface.transformers
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=24, num_labels=3, pad_token_id=0, **layers, **SIZES[family]
    )
    hf = huggingface.build(getattr(transformers, f"{family}ForSequenceClassification"), config)
    hf.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, special=family == "Bert")
    own = tokenizer(tmp_path)
    with huggingface.double_precision(), torch.no_grad():
        rows = [hf(torch.tensor([own.encode(text)])).logits[0] for text in TEXTS]
        want = torch.softmax(torch.stack(rows), -1).numpy()
    got = classify(*pretrained.load(tmp_path, dtype="float64"), own, TEXTS)
    assert np.allclose(got, want, rtol=0, atol=huggingface.FLOAT64)


def test_on_every_library(library: Backend, tmp_path: Path) -> None:
    model, params, own = opened(tmp_path, DECODER)
    texts = TEXTS[:2]
    logits = [model.forward(params, np.asarray([own.encode(text)]))[0][0] for text in texts]
    want = np.stack([np.exp(row) / np.exp(row).sum() for row in logits])
    got = classify(model, tree.map(library.asarray, params), own, texts)
    assert np.allclose(got, want, rtol=0, atol=1e-12)


def test_the_size_of_batches_changes_nothing(tmp_path: Path) -> None:
    model, params, own = opened(tmp_path, DECODER)
    done: list[int] = []
    want = classify(model, params, own, TEXTS)
    got = classify(model, params, own, TEXTS, batch_size=2, progress=done.append)
    assert np.allclose(got, want, rtol=0, atol=1e-12) and done == [2, 2, 1]


@pytest.mark.parametrize("kind", ["multi_label_classification", None])
def test_classes_that_do_not_exclude_each_other(kind: str | None, tmp_path: Path) -> None:
    names = NAMES if kind else {"0": "good"}
    config = CLASSIFIER | {"problem_type": kind, "id2label": names}
    model, params, own = opened(tmp_path, config)
    logits = [model.forward(params, np.asarray([own.encode(text)]))[0][0] for text in TEXTS]
    got = classify(model, params, own, TEXTS)
    assert np.allclose(got, 1 / (1 + np.exp(-np.stack(logits))), rtol=0, atol=1e-12)


def test_names_of_classes() -> None:
    def named(**config: Any) -> list[str]:
        without = {key: value for key, value in CLASSIFIER.items() if key != "id2label"}
        return labels(pretrained.model(without | config))

    assert named(id2label=NAMES) == ["good", "bad", "so so"]
    assert named(id2label={0: "good", 1: "bad"}) == ["good", "bad"]
    assert named(id2label={"1": "good", "0": "good"}) == ["good", "good"]
    assert named(num_labels=3) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert named() == ["LABEL_0", "LABEL_1"]
    with pytest.raises(ValueError, match=r"labels: id2label must hold strings, got \['x'\]"):
        named(id2label={"0": ["x"]})
    for keys, wanted in (("0x", "1, got '0', 'x'"), ("12", "1, got '1', '2'"), ("7", "0, got '7'")):
        with pytest.raises(PretrainedError, match=f"the keys of id2label must be 0 to {wanted}"):
            named(id2label=dict.fromkeys(keys, "good"))


def test_what_is_no_classifier(tmp_path: Path) -> None:
    model, params, own = opened(tmp_path, CLASSIFIER | {"problem_type": "regression"})
    with pytest.raises(ValueError, match=r"problem_type must be single_label.* got 'regression'"):
        classify(model, params, own, TEXTS)
    encoder = pretrained.model(BERT)
    bare = LanguageModel(encoder.embed, encoder.blocks, causal=False, head=None)
    for other, got in ((encoder, "an encoder with a pooler"), (bare, "an encoder without a head")):
        with pytest.raises(
            ValueError, match=f"must be a classifier, got {got}.*finetune --task classify"
        ):
            classify(other, params, own, TEXTS)
        with pytest.raises(
            ValueError, match=f"must be a classifier, got {got}.*finetune --task classify"
        ):
            labels(other)


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    model, params, own = opened(tmp_path)
    with pytest.warns(UserWarning, match="^classify: cut to 24 tokens: text 2$"):
        got = classify(model, params, own, ["a cat", "the " * 40])
    assert np.allclose(got[1], classify(model, params, own, ["the " * 22]), rtol=0, atol=1e-12)


# Pairs of texts

PAIRS = [(TEXTS[0], "why"), ("a dog", TEXTS[2]), ("", "it was"), (TEXTS[2], TEXTS[2])]


@pytest.mark.parametrize("max_len", [24, 9])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert"])
def test_pairs_as_transformers(family: str, max_len: int, tmp_path: Path) -> None:
    """BERT has token types. Where pairs are cut, the longer text is."""
    huggingface = pytest.importorskip("huggingface")  # skips without torch or transformers
    torch, transformers = huggingface.torch, huggingface.transformers
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=24, num_labels=3, pad_token_id=0, max_position_embeddings=30,
        **{"dim": 12, "n_heads": 2, "n_layers": 2} if family == "DistilBert" else sizes,
    )  # fmt: skip
    hf = huggingface.build(getattr(transformers, f"{family}ForSequenceClassification"), config)
    hf.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if family == "Bert" else [])]
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names}
    write(tmp_path, tokenizer_config=plain)
    own, theirs = tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    with huggingface.double_precision(), torch.no_grad():
        rows = []
        for pair in PAIRS:
            options = {"truncation": True, "max_length": max_len, "return_tensors": "pt"}
            rows.append(hf(**theirs([pair], **options)).logits[0])
        want = torch.softmax(torch.stack(rows), -1).numpy()
    model, params = pretrained.load(tmp_path, dtype="float64")
    with pytest.warns(UserWarning, match=f"classify: cut to {max_len} tokens: text") as caught:
        got = classify(model, params, own, PAIRS, max_len=max_len, batch_size=3)
    assert np.allclose(got, want, rtol=0, atol=huggingface.FLOAT64) and len(caught) == 1


def test_pairs_beside_single_texts(tmp_path: Path) -> None:
    model, params, own = opened(tmp_path)
    mixed = classify(model, params, own, ["a dog", ("a dog", "why"), ["why", "a dog"]])
    parts = [
        classify(model, params, own, ["a dog"]),
        classify(model, params, own, [("a dog", "why"), ("why", "a dog")]),
    ]
    assert np.allclose(mixed, np.concatenate(parts), rtol=0, atol=1e-12)
    found = own.encoding("a dog", "why")
    logits, _ = model.forward(params, np.asarray([found.ids]), types=np.asarray([found.types]))
    want = np.exp(logits) / np.exp(logits).sum()
    assert np.allclose(mixed[1], want, rtol=0, atol=1e-12)
    without = model.forward(params, np.asarray([found.ids]))[0]
    assert np.abs(without - logits).max() > 1e-3  # the types count


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([("a", "b", "c")], "classify: text 1 must be a string or 2 strings, got 3"),
        (["a", ("a",)], "classify: text 2 must be a string or 2 strings, got 1"),
        ([("a", 3)], "classify: text 1 must be a string or 2 strings, got int"),
        ([{"text": "a"}], "classify: text 1 must be a string or 2 strings, got dict"),
        ([("a", "\ud800")], "classify: text 1"),
    ],
)
def test_what_is_no_pair(tmp_path: Path, texts: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        classify(*opened(tmp_path), texts)


# The command


def test_the_command_reads_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, params, own = opened(tmp_path)
    (probs,) = classify(model, params, own, [("a dog", "why")])
    command = ["classify", "--model", str(tmp_path), "--dtype", "float64", "--pairs"]
    assert main([*command, "a dog\twhy", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == ["a dog", "why"]
    assert np.allclose([c["probability"] for c in found["probabilities"]], probs, rtol=1e-6)
    assert main([*command, "a dog\twhy", "--top", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "a dog | why"
    for text in ("a dog", "a\tb\tc"):
        assert main([*command, "a\tb", text]) == 1
        err = capsys.readouterr().err
        assert "--pairs: text 2 must be two texts with a tab between them" in err


def test_the_end_of_a_long_text_is_read_as_by_transformers(tmp_path: Path) -> None:
    huggingface = pytest.importorskip("huggingface")  # skips without torch or transformers
    cut_left(write_model(tmp_path, CLASSIFIER, "float32"), "config")
    judge = huggingface.transformers.pipeline("text-classification", str(tmp_path), device="cpu")
    found = judge(TEXTS, top_k=None, truncation=True, max_length=6)
    want = [
        [next(c["score"] for c in row if c["label"] == n) for n in NAMES.values()] for row in found
    ]
    with pytest.warns(UserWarning, match="^classify: cut to 6 tokens: text 1 and 2 more of 5$"):
        got = classify(*pretrained.load(tmp_path), tokenizer(tmp_path), TEXTS, max_len=6)
    assert np.allclose(got, want, rtol=0, atol=1e-6)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, params, own = opened(tmp_path)
    (probs,) = classify(model, params, own, TEXTS[:1])
    command = ["classify", "--model", str(tmp_path), "--dtype", "float64", TEXTS[0]]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    order = np.argsort(-probs)
    want = [f"  {list(NAMES.values())[i]:5}  {probs[i]:.4f}" for i in order]
    assert lines == [TEXTS[0], *want]

    assert main([*command, "--top", "1"]) == 0
    name = list(NAMES.values())[order[0]]
    assert capsys.readouterr().out.splitlines() == [TEXTS[0], f"  {name}  {probs[order[0]]:.4f}"]

    assert main([*command, "a dog", "--json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["text"] == TEXTS[0] and second["text"] == "a dog"
    assert first["label"] == name
    assert [c["label"] for c in first["probabilities"]] == list(NAMES.values())
    assert np.allclose([c["probability"] for c in first["probabilities"]], probs, rtol=1e-6)


def test_classes_of_one_name_are_all_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers' pipeline does, which prints a list of labels and scores."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    names = {"0": "same", "1": "other", "2": "same"}
    opened(tmp_path, CLASSIFIER | {"id2label": names})
    assert main(["classify", "--model", str(tmp_path), "--json", TEXTS[0]]) == 0
    found = json.loads(capsys.readouterr().out)["probabilities"]
    judge = transformers.pipeline("text-classification", str(tmp_path), device="cpu", top_k=None)
    (wanted,) = judge([TEXTS[0]])
    got = sorted(found, key=lambda entry: -entry["probability"])
    assert [entry["label"] for entry in got] == [entry["label"] for entry in wanted]
    scores = [entry["score"] for entry in wanted]
    assert np.allclose([entry["probability"] for entry in got], scores, rtol=1e-5)
    assert main(["classify", "--model", str(tmp_path), TEXTS[0]]) == 0
    assert capsys.readouterr().out.count("  same ") == 2


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, BERT)
    for command, message in [
        (
            ["x"],
            "classify: the model must be a classifier, got an encoder with a pooler (BertModel)",
        ),
        (["x", "--top", "0"], "--top must be at least 1, got 0"),
        ([], "there are no texts"),
    ]:
        assert main(["classify", "--model", str(tmp_path), *command]) == 1
        err = capsys.readouterr().err
        assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1
