"""Fine-tuning: what a task makes of records, what is trained, and that it helps."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finetuning import (
    BERT,
    BOS,
    CLASSIFIER,
    CLS,
    EOS,
    GPT2,
    LLAMA,
    MASK,
    PAD,
    RANKER,
    SEP,
    T5,
    TAGGER,
    V,
    ids,
    write_lines,
    write_tokenizer,
)
from judges import AUTOGRAD
from libraries import only, slow_but
from test_tokenizer_config import config, write

from xformer import backends, finetune, pretrained, tree
from xformer.backends import Backend
from xformer.base.tree import Frozen, value
from xformer.finetune import TrainConfig, lora
from xformer.pretrained.tokenizer import tokenizer
from xformer.training.batch import IGNORED

NUMPY = backends.get("numpy")
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "causal": (LLAMA, "llama"),
    "prefix": (LLAMA, "llama"),
    "masked": (BERT, "bert"),
    "classify": (CLASSIFIER, "bert"),
    "seq2seq": (T5, "t5"),
    "contrastive": (BERT, "bert"),
    "classify-pairs": (CLASSIFIER, "bert"),
    "tag": (TAGGER, "bert"),
    "rank": (RANKER, "bert"),
}


def made(name: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    """A task and parameters."""
    config, style = MODELS[name]
    style = options.pop("style", style)
    write_tokenizer(folder, style)
    model = pretrained.model(config | options.pop("config", {}))
    task = finetune.task(name, model, tokenizer(folder), **options)
    return task, model.init(0, dtype="float64")


def examples(task: Any, *records: dict[str, Any]) -> list[Any]:
    return finetune.examples(task, [finetune.Record("here", fields) for fields in records])


def batch(task: Any, *records: dict[str, Any]) -> Any:
    return task.batch(examples(task, *records), np.random.default_rng(0))


def wide(rows: list[list[int]], fill: int = PAD) -> list[list[int]]:
    """Rows of 8."""
    return [row + [fill] * (8 - len(row)) for row in rows]


# ---- Tasks ----


def test_causal(tmp_path: Path) -> None:
    """Texts in windows, of which the next begins with the last target of the one before."""
    task, _ = made("causal", tmp_path, max_len=4)
    text = [BOS, *ids("abcdefg"), EOS]
    found = examples(task, {"text": "abcdefg"})
    assert [e.tokens.tolist() for e in found] == [text[:4], text[4:8]]
    assert [e.targets.tolist() for e in found] == [text[1:5], text[5:]]
    tokens, targets = batch(task, {"text": "ab"}, {"text": "abc"}).arrays
    assert tokens.tolist() == wide([[BOS, *ids("ab")], [BOS, *ids("abc")]])
    assert targets.tolist() == wide([[*ids("ab"), EOS], [*ids("abc"), EOS]], IGNORED)
    assert batch(task, {"text": "ab"}, {"text": "abc"}).n_targets == 7


def test_a_text_of_one_token_is_left_out(tmp_path: Path) -> None:
    task, _ = made("causal", tmp_path, style="bare")
    assert len(examples(task, {"text": "a"}, {"text": "ab"})) == 1
    with pytest.raises(ValueError, match="no text is long enough to learn from"):
        examples(task, {"text": "a"})


TWO = [{"prompt": "1+2=", "completion": "3"}, {"prompt": "a", "completion": "bcdef"}]


def test_prefix(tmp_path: Path) -> None:
    """No loss for the prompt; a completion is cut, a prompt is not."""
    task, _ = made("prefix", tmp_path, max_len=6)
    got = batch(task, *TWO)
    assert [e.is_cut for e in examples(task, *TWO)] == [False, True]
    tokens, targets = got.arrays
    assert tokens.tolist() == wide([[BOS, *ids("1+2=3")], [BOS, *ids("abcde")]])
    no = IGNORED
    assert targets.tolist() == wide([[no, no, no, no, *ids("3"), EOS], [no, *ids("bcdef")]], no)
    assert (got.n_targets, got.n_tokens) == (7, 12)
    with pytest.raises(ValueError, match="here: the prompt's 8 tokens leave no room for a compl"):
        examples(task, {"prompt": "abcdefg", "completion": "h"})


def test_a_prompt_ends_where_its_tokens_do(tmp_path: Path) -> None:
    """With special tokens behind each text, which a prompt does not have in front of more."""
    task, _ = made("prefix", tmp_path, style="t5", max_len=8)
    (found,) = examples(task, {"prompt": "ab", "completion": "cd"})
    assert found.tokens.tolist() == ids("abcd")
    assert found.targets.tolist() == [IGNORED, *ids("cd"), EOS]


def test_masked(tmp_path: Path) -> None:
    """BERT's shares, of letters alone; what is not hidden has no target."""
    task, _ = made("masked", tmp_path, max_len=32)
    text = "abcdefghijklmnopqrstuvwxyz" * 2
    (found,) = examples(task, {"text": text})
    assert found.tokens.tolist() == [CLS, *ids(text)[:30], SEP]
    rng, seen = np.random.default_rng(0), []
    for _ in range(400):
        (tokens, targets), masks, count, *_ = task.batch([found], rng)
        hidden = targets[0] != IGNORED
        assert hidden.sum() == count == round(0.15 * 30) and not hidden[[0, -1]].any()
        assert (targets[0][hidden] == found.tokens[hidden]).all() and masks["mask"].all()
        assert (tokens[0][~hidden] == found.tokens[~hidden]).all()
        seen += [(tokens[0][hidden] == MASK), (tokens[0][hidden] == found.tokens[hidden])]
    as_mask, as_was = (np.mean(seen[i::2]) for i in range(2))
    assert abs(as_mask - 0.8) < 0.04 and abs(as_was - (0.1 + 0.1 / V)) < 0.03
    assert batch(task, {"text": "a"}).n_targets == 1


def test_classify(tmp_path: Path) -> None:
    task, _ = made("classify", tmp_path, max_len=5)
    got = batch(task, {"text": "ab", "label": "so"}, {"text": "abcdef", "label": 0})
    assert got.arrays[0].tolist() == wide([[CLS, *ids("ab"), SEP], [CLS, *ids("abc"), SEP]])
    assert got.arrays[1].tolist() == [2, 0]
    wanted = "here: label must be a number below 3 or one of no, yes, so, got "
    for label in (3, -1, True, "maybe", None, 1.0, [0]):
        with pytest.raises(ValueError, match=f"{wanted}.*{str(label).strip('[]')}"):
            examples(task, {"text": "a", "label": label})


def test_classes_of_one_name_are_told_apart_by_number(tmp_path: Path) -> None:
    names = {"0": "no", "1": "yes", "2": "no"}
    task, _ = made("classify", tmp_path, config={"id2label": names})
    got = batch(task, {"text": "a", "label": "yes"}, {"text": "a", "label": 2})
    assert got.arrays[1].tolist() == [1, 2]
    with pytest.raises(ValueError, match="2 classes are called 'no': label must be a number"):
        examples(task, {"text": "a", "label": "no"})


PAIRS = [
    {"text": "ab", "text_pair": "c", "label": "so"},
    {"text": "abc", "text_pair": "defghij", "label": 0},
]


def test_classify_pairs(tmp_path: Path) -> None:
    """The longer text is cut. A model without token types gets none."""
    task, _ = made("classify-pairs", tmp_path, max_len=9)
    tokens, classes = (got := batch(task, *PAIRS)).arrays
    rows = [row[keep].tolist() for row, keep in zip(tokens, got.masks["mask"], strict=True)]
    assert rows == [
        [CLS, *ids("ab"), SEP, *ids("c"), SEP],
        [CLS, *ids("abc"), SEP, *ids("def"), SEP],
    ]
    assert [e.is_cut for e in examples(task, *PAIRS)] == [False, True]
    assert got.masks["types"].tolist() == [
        [0, 0, 0, 0, 1, 1, *[0] * 10],
        [0, 0, 0, 0, 0, 1, 1, 1, 1, *[0] * 7],
    ]
    assert classes.tolist() == [2, 0] and (got.n_targets, got.n_tokens) == (2, 15)
    plain, _ = made("classify-pairs", tmp_path, config={"type_vocab_size": 1})
    assert batch(plain, *PAIRS).masks.keys() == {"mask"}
    with pytest.raises(ValueError, match="here: label must be a number below 3 or one of no, yes"):
        examples(task, PAIRS[0] | {"label": 3})
    with pytest.raises(ValueError, match="max_len must exceed the 3 special tokens, got 3"):
        examples(made("classify-pairs", tmp_path, max_len=3)[0], PAIRS[0])


def test_tag(tmp_path: Path) -> None:
    """The first token of a word has its tag; a space is a token of no word here."""
    task, _ = made("tag", tmp_path, max_len=9)
    long = {"words": ["a", "bcd", "ef", "g"], "tags": [0, 1, 2, 0]}
    got = batch(task, {"words": ["ab", "c"], "tags": ["B-X", 2]}, long)
    tokens, targets = got.arrays
    rows = [row[keep].tolist() for row, keep in zip(tokens, got.masks["mask"], strict=True)]
    assert rows == [[CLS, *ids("ab c"), SEP], [CLS, *ids("a bcd e"), SEP]]
    no = IGNORED
    assert targets.tolist() == [
        [no, 1, no, no, 2, *[no] * 11],
        [no, 0, no, 1, no, no, no, 2, *[no] * 8],
    ]
    assert (got.n_targets, got.n_tokens) == (5, 15)
    assert [e.is_cut for e in examples(task, long)] == [True]
    for words, tags, message in (
        (["a", "b"], [0], "here: there must be a tag for each of 2 words, got 1"),
        (["a"], ["B-Y"], "here: a tag must be a number below 3 or one of O, B-X, I-X, got 'B-Y'"),
    ):
        with pytest.raises(ValueError, match=message):
            examples(task, {"words": words, "tags": tags})


def test_a_word_whose_beginning_is_cut_has_no_tag(tmp_path: Path) -> None:
    made("tag", tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation_side": "left"}))
    task = finetune.task("tag", pretrained.model(TAGGER), tokenizer(tmp_path), max_len=6)
    (found,) = examples(task, {"words": ["abc", "d"], "tags": [1, 2]})
    assert found.tokens.tolist() == [CLS, *ids("bc d"), SEP] and found.is_cut
    assert found.targets.tolist() == [IGNORED] * 4 + [2, IGNORED]
    with pytest.raises(ValueError, match="here: no word has a token"):
        examples(task, {"words": ["abcdefg"], "tags": [1]})


@pytest.mark.parametrize(
    ("maker", "kind", "options"),
    [
        ("bert", "Bert", {}),
        ("roberta", "Roberta", {"add_prefix_space": True}),  # or transformers refuses words
        ("xlm-roberta", "XLMRoberta", {}),
    ],
)
def test_first_tokens_of_words_are_those_of_transformers(
    maker: str, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    write(tmp_path, maker, config(f"{kind}Tokenizer", **options))
    own, theirs = tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    words = ["hello", "don't", "Hello,", "helloa", "a", "(3.14)", "naïve", "hello"]
    tags = [0, 1, 2, 1, 0, 2, 1, 2]
    model = pretrained.model(TAGGER | {"vocab_size": own.vocab_size, "max_position_embeddings": 99})
    (found,) = examples(finetune.task("tag", model, own), {"words": words, "tags": tags})
    wanted = theirs(words, is_split_into_words=True)
    assert found.tokens.tolist() == wanted["input_ids"]
    numbers = wanted.word_ids()
    firsts = [n is not None and n not in numbers[:i] for i, n in enumerate(numbers)]
    assert (found.targets != IGNORED).tolist() == firsts
    assert found.targets[firsts].tolist() == tags


def test_seq2seq(tmp_path: Path) -> None:
    """Targets behind the token that begins them; both ends are cut to max_len."""
    task, _ = made("seq2seq", tmp_path, max_len=4)
    got = batch(task, {"source": "a", "target": "bc"}, {"source": "abcdef", "target": "defgh"})
    src, tgt, targets = (a.tolist() for a in got.arrays)
    assert src == wide([[*ids("a"), EOS], [*ids("abc"), EOS]])
    assert tgt == wide([[PAD, *ids("bc")], [PAD, *ids("def")]])
    assert targets == wide([[*ids("bc"), EOS], ids("defg")], IGNORED)
    assert got.masks["src_mask"].sum() == 6 and (got.n_targets, got.n_tokens) == (7, 13)


def test_contrastive(tmp_path: Path) -> None:
    task, _ = made("contrastive", tmp_path, prompt="q")
    got = batch(task, {"anchor": "a", "positive": "bc"}, {"anchor": "d", "positive": "e"})
    (tokens,), mask = got.arrays, got.masks["mask"]
    rows = [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]
    assert rows == [[CLS, *ids(text), SEP] for text in ("qa", "qd", "qbc", "qe")]
    assert got.n_targets == 2


RECORDS: dict[str, list[dict[str, Any]]] = {
    "causal": [{"text": "abcabc"}, {"text": "ab"}],
    "prefix": TWO,
    "masked": [{"text": "abcdefghijkl"}, {"text": "abc"}],
    "classify": [{"text": "abc", "label": 0}, {"text": "defgh", "label": 2}],
    "seq2seq": [{"source": "abc", "target": "cba"}, {"source": "d", "target": "d"}],
    "classify-pairs": PAIRS,
    "tag": [{"words": ["abc", "d"], "tags": [0, 2]}, {"words": ["e"], "tags": ["B-X"]}],
    "rank": [
        {"query": "abc", "document": "defgh", "score": 1.0},
        {"query": "d", "document": "e", "score": 0.25},
    ],
}


@pytest.mark.parametrize("name", RECORDS)
def test_padding_does_not_matter(name: str, tmp_path: Path) -> None:
    """A batch's loss is the mean of its texts' losses, by how many tokens count in each."""
    task, params = made(name, tmp_path)
    rng = np.random.default_rng(0)
    found = examples(task, *RECORDS[name])
    together = task.batch
    if name == "masked":  # the same tokens are hidden in both
        found = [task._masked(example, rng) for example in found]
        together = partial(finetune.Task.batch, task)
    whole = together(found, rng)
    parts = [together([example], rng) for example in found]
    losses = [float(task.loss(params, part, NUMPY)[0]) for part in parts]
    counts = [part.n_targets for part in parts]
    got = float(task.loss(params, whole, NUMPY)[0])
    assert sum(counts) == whole.n_targets
    np.testing.assert_allclose(got, np.average(losses, weights=counts), rtol=1e-13)


@only("torch")
def test_contrastive_gradients_are_those_of_autograd(library: Backend, tmp_path: Path) -> None:
    import torch

    task, params = made("contrastive", tmp_path)
    params = tree.map(library.asarray, params)
    leaves = tree.flatten(params)
    for leaf in leaves.values():
        leaf.requires_grad_()
    pairs = [{"anchor": "abc", "positive": "ab"}, {"anchor": "x", "positive": "yz"}]
    loss, cache = task.loss(params, batch(task, *pairs), library)
    grads = tree.flatten(cache.backward())
    wanted = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    largest = max(float(g.abs().max()) for g in wanted if g is not None)
    for name, want in zip(leaves, wanted, strict=True):
        got = grads[name].detach().numpy()
        want = np.zeros(got.shape) if want is None else want.numpy()  # of the head
        assert np.abs(got - want).max() <= AUTOGRAD * largest, name


# ---- Training ----


def alphabets(n: int, seed: int = 0) -> list[str]:
    """Pieces of the alphabet."""
    rng = np.random.default_rng(seed)
    letters, sizes = "abcdefghijklmnopqrstuvwxyz" * 2, rng.integers(4, 9, n)
    return [letters[i : i + k] for i, k in zip(rng.integers(0, 26, n), sizes, strict=True)]


def records(name: str, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Something to learn from."""
    texts = alphabets(n, seed)
    if name == "classify":
        return [
            {"text": text, "label": "abcdefghijklmnopqrstuvwxyz".index(text[0]) // 9}
            for text in texts
        ]
    if name == "classify-pairs":
        rows = records("classify", n, seed)
        return [row | {"text": row["text"][:2], "text_pair": row["text"][2:]} for row in rows]
    if name == "tag":
        words = [[text[:2], text[2:]] for text in texts]
        tags = [["abcdefghijklmnopqrstuvwxyz".index(w[0]) // 9 for w in pair] for pair in words]
        return [{"words": w, "tags": t} for w, t in zip(words, tags, strict=True)]
    if name == "rank":
        rows = records("classify", n, seed)
        cut = [(row["text"][:2], row["text"][2:], row["label"] / 2) for row in rows]
        return [dict(zip(finetune.TASKS[name].fields, row, strict=True)) for row in cut]
    fields = finetune.TASKS[name].fields
    if fields == ("text",):
        return [{"text": text} for text in texts]
    cut = {"prefix": (0, 2, 2), "seq2seq": (0, 3, 0), "contrastive": (0, 3, 1)}[name]
    start, end, second = cut
    return [{fields[0]: text[start:end], fields[1]: text[second : second + 3]} for text in texts]


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("name", slow_but(["causal", "classify", "contrastive", "rank"], MODELS))
def test_it_beats_its_base_on_what_it_has_not_seen(
    name: str, adapters: bool, tmp_path: Path
) -> None:
    """Whole or by adapters; merged they are the same, and what is frozen is as it was."""
    task, params = made(name, tmp_path)
    if adapters:
        params = lora.attach(params, 8, 16, ("*",))
    found, held_out = (examples(task, *records(name, 60, seed)) for seed in (0, 1))
    config = TrainConfig(60, 12, lr=1e-2, warmup=6, weight_decay=0.0)
    steps = list(finetune.train(task, params, found, config, NUMPY))
    assert [step.step for step in steps] == list(range(1, 61))
    new = steps[-1].params
    before, after, merged = (
        finetune.evaluate(task, p, held_out, NUMPY) for p in (params, new, lora.merge(new))
    )
    assert after < (0.95 if adapters else 0.85) * before  # random, and a random head stays frozen
    np.testing.assert_allclose(merged, after, rtol=1e-12)
    leaves = tree.flatten(new)
    for leaf_name, leaf in tree.flatten(params).items():
        assert isinstance(leaf, Frozen) == (value(leaves[leaf_name]) is value(leaf)), leaf_name


@only("numpy-readonly", "array-api-strict", "torch", "cupy")  # JAX compiles it for too long
def test_a_seed_is_a_training(library: Backend, tmp_path: Path) -> None:
    """The same batches, dropout masks and hidden tokens everywhere."""
    config = TrainConfig(2, 3, lr=1e-3, warmup=1, seed=3)
    losses = []
    for place in (NUMPY, library):
        task, params = made("masked", tmp_path)
        params = lora.attach(tree.map(place.asarray, params), 2, 2)
        found = examples(task, *records("masked", 5))
        losses.append([s.loss for s in finetune.train(task, params, found, config, place)])
    np.testing.assert_allclose(*losses, rtol=1e-12)
    assert losses[0][0] != losses[0][1]


def test_evaluating_is_a_mean_over_targets(tmp_path: Path) -> None:
    task, params = made("causal", tmp_path)
    found = examples(task, *records("causal", 11))
    one, all_at_once = (
        finetune.evaluate(task, params, found, NUMPY, batch_size=n) for n in (1, 100)
    )
    np.testing.assert_allclose(one, all_at_once, rtol=1e-12)
    done: list[int] = []
    finetune.evaluate(task, params, found, NUMPY, batch_size=4, progress=done.append)
    assert len(done) > 1 and sum(done) == len(found)
    masked, params = made("masked", tmp_path)
    found = examples(masked, *records("masked", 11))
    got = [finetune.evaluate(masked, params, found, NUMPY, seed=seed) for seed in (0, 0, 1)]
    assert got[0] == got[1] != got[2]


def test_what_cannot_be_trained(tmp_path: Path) -> None:
    task, params = made("contrastive", tmp_path)
    found = examples(task, *records("contrastive", 4))
    config = TrainConfig(1, 4)
    with pytest.raises(ValueError, match="train: all parameters are frozen"):
        next(finetune.train(task, tree.freeze(params), found, config, NUMPY))
    for batch_size, texts in ((1, found), (4, found[:1])):
        with pytest.raises(ValueError, match="batches of at least 2 pairs"):
            next(finetune.train(task, params, texts, TrainConfig(1, batch_size), NUMPY))
        with pytest.raises(ValueError, match=r"evaluate: .* batches of at least 2 pairs, got 1"):
            finetune.evaluate(task, params, texts, NUMPY, batch_size=batch_size)
    with pytest.raises(ValueError, match="evaluate: there are no examples"):
        finetune.evaluate(task, params, [], NUMPY)
    task, params = made("causal", tmp_path)
    found = examples(task, *records("causal", 4))
    broken = tree.map(lambda a: a * np.inf, params)
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match="of step 1 is nan"):
        next(finetune.train(task, broken, found, config, NUMPY))


# ---- Models and tasks that do not go together ----


@pytest.mark.parametrize(
    ("name", "config", "style", "message"),
    [
        ("causal", BERT, "bert", "must be a causal language model, got a masked language model"),
        ("prefix", T5, "t5", "must be a causal language model, got an encoder-decoder"),
        ("masked", LLAMA, "llama", "must be a masked language model, got a causal language model"),
        ("masked", BERT, "llama", "the tokenizer must have a mask token"),
        ("classify", BERT, "bert", "this task the model must be a classifier, got a masked lang"),
        (
            "classify",
            CLASSIFIER | {"id2label": {"0": "x"}},
            "bert",
            "must be a classifier of 2 classes or more, got a classifier of 1 class",
        ),
        (
            "classify",
            CLASSIFIER | {"problem_type": "multi_label_classification"},
            "bert",
            "problem_type must be single_label_classification, got 'multi_label_classification'",
        ),
        (
            "seq2seq",
            LLAMA,
            "llama",
            "must be an encoder-decoder with one vocabulary and a head, got a caus",
        ),
        ("contrastive", T5, "t5", "must be an encoder or a decoder of tokens, got an encoder-deco"),
        ("summary", LLAMA, "llama", "task must be one of causal, prefix, masked, classify, seq2"),
    ],
)
def test_other_models(
    name: str, config: dict[str, Any], style: str, message: str, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, style)
    with pytest.raises(ValueError, match=message):
        finetune.task(name, pretrained.model(config), tokenizer(tmp_path))


def test_lengths(tmp_path: Path) -> None:
    task, _ = made("masked", tmp_path)
    assert task.max_len == 32  # BERT's places
    assert made("causal", tmp_path)[0].max_len == 32  # what the configuration says of a Llama
    assert made("causal", tmp_path, max_len=100)[0].max_len == 100
    assert made("seq2seq", tmp_path)[0].max_len == 512
    with pytest.raises(ValueError, match="max_len must be at most the model's 32, got 33"):
        made("masked", tmp_path, max_len=33)
    with pytest.raises(ValueError, match="max_len must be an int of at least 2, got 1"):
        made("causal", tmp_path, max_len=1)
    with pytest.raises(ValueError, match="max_len must exceed the 2 special tokens, got 2"):
        examples(made("masked", tmp_path, max_len=2)[0], {"text": "a"})


LONG = {
    "masked": {"text": "abcdefghij"},
    "classify": {"text": "abcdefghij", "label": 0},
    "contrastive": {"anchor": "abcdefghij", "positive": "klmnopqrst"},
    "seq2seq": {"source": "abcdefghij", "target": "klmnopqrst"},
    "prefix": {"prompt": "abcdefghij", "completion": "kl"},
}


@pytest.mark.parametrize("name", LONG)
def test_the_end_of_long_texts_is_read_as_by_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    made(name, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation_side": "left"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    config, _ = MODELS[name]
    task = finetune.task(name, pretrained.model(config), tokenizer(tmp_path), max_len=6)

    def cut(text: str, most: int = 6) -> list[int]:
        ids: list[int] = theirs(text, truncation=True, max_length=most)["input_ids"]
        return ids

    (found,) = examples(task, LONG[name])
    texts = [value for value in LONG[name].values() if isinstance(value, str)]
    assert found.is_cut
    if name == "prefix":  # one text, with the end that the tokenizer does not add itself
        assert found.tokens.tolist() == cut("".join(texts))
        assert found.targets.tolist() == [IGNORED] * 3 + [*ids("kl"), EOS]
        return
    assert found.tokens.tolist() == cut(texts[0])
    if len(texts) == 2:
        assert found.targets.tolist() == cut(texts[1])


def test_a_new_head_of_tokens() -> None:
    body = pretrained.model(BERT)
    params = body.init(0)
    names = ("O", "B-X", "I-X")
    model, new = finetune.with_classifier(body, params, names, head="token_classifier")
    assert model.hf_config["architectures"] == ["BertForTokenClassification"]
    assert finetune.is_classifier(model, "token_classifier") and not finetune.is_classifier(model)
    assert new.head.out.w.shape == (24, 3) and new.embed.table is params.embed.table
    with pytest.raises(ValueError, match="models of type gpt2 have no token classifier"):
        finetune.with_classifier(pretrained.model(GPT2), None, names, head="token_classifier")
    with pytest.raises(ValueError, match="with_classifier: head must be one of"):
        finetune.with_classifier(body, params, names, head="words")


def test_another_models_tokenizer(tmp_path: Path) -> None:
    task, _ = made("causal", tmp_path, config={"vocab_size": 20})
    with pytest.raises(
        ValueError, match="here: the tokenizer must be the model's, whose ids are b"
    ):
        examples(task, {"text": "abcdefghijklmnop"})


# ---- A classifier on another model's body ----


@pytest.mark.parametrize("config", [BERT, GPT2, LLAMA], ids=lambda c: c["model_type"])
def test_a_new_head(config: dict[str, Any]) -> None:
    body = pretrained.model(config)
    params = body.init(0)
    model, new = finetune.with_classifier(body, tree.freeze(params), ("x", "y"), pad_id=3)
    before, after = tree.flatten(params), tree.flatten(new)
    assert all(leaf is before[name] for name, leaf in after.items() if not name.startswith("head"))
    assert model.head.n_labels == 2
    assert model.hf_config["id2label"] == {"0": "x", "1": "y"}
    assert model.hf_config["pad_token_id"] == config.get("pad_token_id", 3)
    again = finetune.with_classifier(body, params, ("x", "y"))[1]
    assert np.array_equal(again.head.out.w, new.head.out.w)
    logits, _ = model.forward(new, np.ones((2, 3), np.int64))
    assert logits.shape == (2, 2) and np.abs(logits).max() > 0


@pytest.mark.parametrize(("kind", "kept"), [("Bert", True), ("Roberta", False)])
def test_berts_pooler_is_kept(kind: str, kept: bool) -> None:
    """As transformers does; RoBERTa's classifier has a dense layer of its own."""
    named = {"model_type": kind.lower(), "architectures": [f"{kind}Model"]}
    body = pretrained.model(BERT | named)
    params = body.init(0)
    _, new = finetune.with_classifier(body, tree.freeze(params), ("x", "y"))
    assert (new.head.dense.w is params.head.w) == (new.head.dense.b is params.head.b) == kept


def test_no_new_head() -> None:
    body = pretrained.model(T5)
    with pytest.raises(ValueError, match="models of type t5 have no classifier"):
        finetune.with_classifier(body, body.init(0), ("x", "y"))
    for names in (("x",), ("x", "x")):
        with pytest.raises(ValueError, match="labels must be two or more, all different"):
            finetune.with_classifier(pretrained.model(BERT), None, names)


def test_labels_of_records() -> None:
    def found(*labels: Any) -> Sequence[str]:
        return finetune.labels_in([finetune.Record("", {"label": label}) for label in labels])

    assert found("b", "a", "b") == ["a", "b"]
    assert found(0, 2) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    for labels in (("a", 1), (-1, 0), (True, False), (10**9, 0), (1.0, 2.0)):
        with pytest.raises(ValueError, match="labels must all be names, or all numbers from 0 to"):
            found(*labels)


# ---- Files ----


def test_lines_of_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  \n two \nthree")
    got = finetune.read(path)
    assert [r.fields["text"] for r in got] == ["one", " two ", "three"]
    assert [r.where.rpartition(": ")[2] for r in got] == ["line 1", "line 4", "line 5"]


@pytest.mark.parametrize(
    "name", ["a.txt", "A.TXT", "a.jsonl", "A.JSONL", "a.jsonl.gz", "A.JSON.GZ"]
)
def test_a_byte_order_mark_is_no_text_and_suffixes_have_any_case(name: str, tmp_path: Path) -> None:
    is_text = name.lower().endswith(".txt")
    raw = b"\xef\xbb\xbf" + (b"a text" if is_text else b'{"text": "a text"}') + b"\r\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(raw) if name.lower().endswith(".gz") else raw)
    assert [record.fields for record in finetune.read(path)] == [{"text": "a text"}]
    assert finetune.data.first_fields(path) == ("text",)


def test_lines_of_json(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a\nb", "label": 1, "id": 7}])
    assert finetune.read(path, ("text", "label"))[0].fields == {"text": "a\nb", "label": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "line 2: is no valid JSON: Expecting ',' delimiter"),
        ("[1]", "line 2: must be a JSON object, got list"),
        ("[" * 100_000, "line 2: "),
        ('{"txt": "a"}', "line 2: lacks 'text', it has 'txt'"),
        ('{"text": 3}', "line 2: text must be a text that is not empty, got 3"),
        ('{"text": ""}', "line 2: text must be a text that is not empty, got ''"),
        ('{"text": null}', "line 2: text must be a text that is not empty, got None"),
        ("{}", "line 2: lacks 'text', it has nothing"),
        ("\xff", "line 2: must be UTF-8"),
    ],
)
def test_lines_that_are_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=message):
        finetune.read(path)


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*a\.txt"):
        finetune.read(path)
    path.write_text("\n \n")
    with pytest.raises(ValueError, match=r"a\.txt: there is nothing in it to train on"):
        finetune.read(path)
    with pytest.raises(
        ValueError, match=r"a\.txt: must be a \.jsonl, \.json or \.csv file with prompt"
    ):
        finetune.read(path, ("prompt", "completion"))


def test_half_a_letter_is_refused(tmp_path: Path) -> None:
    task, _ = made("causal", tmp_path)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ok"}\n{"text": "\\ud800"}\n')
    with pytest.raises(ValueError, match=r"line 2: .*surrogates not allowed"):
        finetune.examples(task, finetune.read(path))


def test_split() -> None:
    items = list(range(20))
    training, held_out = finetune.split(items, 0.1)
    assert len(held_out) == 2 and sorted(training + held_out) == items
    assert finetune.split(items, 0.1) == (training, held_out) != finetune.split(items, 0.1, seed=1)
    assert finetune.split(items, 0) == (items, [])
    assert len(finetune.split([1, 2], 0.01)[1]) == 1
    with pytest.raises(ValueError, match="split: 1 examples are too few to keep 1 for validation"):
        finetune.split([1], 0.1)
    for share in (1, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"split: share must lie in \[0, 1\), got"):
            finetune.split(items, share)
