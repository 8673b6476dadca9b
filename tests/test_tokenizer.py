"""Tokenizers: every kind of file, against transformers where that is installed, and damage."""

from __future__ import annotations

import json
import random
import shutil
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hanging import SECONDS
from hostile import damaged, edited, refused_at_most, some
from hypothesis import given
from hypothesis import strategies as st
from truths import published

from xformer.pretrained import llama2c
from xformer.pretrained.reading import PretrainedError
from xformer.pretrained.tokenizer import Tokenizer, tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

TEXTS = [
    "",
    "hello",
    "Hello, hello!",
    "  hello\n\n\thello  ",
    "Héllo hÉLLO naïve",
    "東京 hello東京",
    "don't well-known 3.14 $5",
    "\x00\u200b hello\ufeff",
    "🙂 hello🙂",
    "a" * 300,
]

PIECES = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "Hello", "hell", "##o", "##lo", "h"),
    *("##é", "##e", "##l", ",", "!", "東", "京", "##京", "don", "'", "t", "3", ".", "14", "$", "5"),
    *("well", "-", "known", "na", "##i", "##ï", "##ve", "a", "##a", "é", "H", "##É"),
]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("a", "a")]


def word_piece(folder: Path, **config: Any) -> Path:
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return configured(folder, config)


def byte_level(folder: Path, *specials: str, **config: Any) -> Path:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*specials, *alphabet, *("".join(pair) for pair in MERGES)]
    vocab = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in MERGES)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return configured(folder, config)


ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
GPT2 = ("<|endoftext|>",)


def configured(folder: Path, config: dict[str, Any]) -> Path:
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# GPT-2 and RoBERTa


def test_gpt2_as_published(tmp_path: Path) -> None:
    shutil.copy(published("gpt2_vocab.json"), tmp_path / "vocab.json")
    shutil.copy(published("gpt2_merges.txt"), tmp_path / "merges.txt")
    t = tokenizer(tmp_path)
    assert t.encode("Hello, I am") == [15496, 11, 314, 716]
    assert t.decode([15496, 11, 314, 716, 50256]) == "Hello, I am"
    assert (t.bos_id, t.eos_id, t.pad_id, t.vocab_size) == (50256, 50256, None, 50257)
    for text in TEXTS:
        assert t.decode(t.encode(text)) == text


def test_gpt2_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    byte_level(tmp_path, *GPT2)
    ours, theirs = tokenizer(tmp_path), transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "hello<|endoftext|>hello"]:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text)) == text.replace(GPT2[0], "")
    assert ours.eos_id == theirs.eos_token_id == 0


def test_a_prefix_space(tmp_path: Path) -> None:
    t = tokenizer(byte_level(tmp_path, *GPT2, add_prefix_space=True))
    assert t.encode("hello") == t.encode(" hello")


def test_roberta_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    byte_level(tmp_path, *ROBERTA)
    ours, theirs = tokenizer(tmp_path), transformers.RobertaTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "hello</s>hello"]:
        assert ours.encode(text) == theirs(text)["input_ids"], text
    assert (ours.bos_id, ours.pad_id, ours.eos_id) == (0, 1, 2)


def test_robertas_mask_takes_the_space_before_it(tmp_path: Path) -> None:
    t = tokenizer(byte_level(tmp_path, *ROBERTA))
    hello, mask = t.encode("hello")[1], 4
    assert t.encode("hello <mask> hello") == [0, hello, mask, *t.encode(" hello")[1:-1], 2]


def test_the_class_says_what_the_vocabulary_does_not(tmp_path: Path) -> None:
    names = {"cls_token": "<s>", "sep_token": {"content": "</s>", "lstrip": False}}
    byte_level(tmp_path, *ROBERTA, tokenizer_class="GPT2TokenizerFast", eos_token="</s>")
    assert tokenizer(tmp_path).encode("") == []
    byte_level(tmp_path, *ROBERTA, tokenizer_class="RobertaTokenizer", **names)
    assert tokenizer(tmp_path).encode("") == [0, 2]


# BERT


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"strip_accents": False},
        {"tokenize_chinese_chars": False},
        {"tokenizer_class": "BertTokenizer", "model_max_length": 512},
    ],
)
def test_word_pieces_equal_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    word_piece(tmp_path, **config)
    ours, theirs = tokenizer(tmp_path), transformers.BertTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "hello [MASK] hello[SEP]"]:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (None, None, 0)
    assert ours.vocab_size == len(PIECES)


def test_word_pieces(tmp_path: Path) -> None:
    t = tokenizer(word_piece(tmp_path))
    names = [PIECES[i] for i in t.encode("HELLO, 東京 naïve zebra")]
    pieces = ["[CLS]", "hello", ",", "東", "京", "na", "##i", "##ve", "[UNK]", "[SEP]"]
    assert names == pieces
    assert t.decode(t.encode("Hello, hello")) == "hello, hello"
    (tmp_path / "vocab.txt").write_bytes("\r\n".join(PIECES).encode())
    assert tokenizer(tmp_path / "vocab.txt").encode("hello") == t.encode("hello")


def test_a_byte_order_mark_is_dropped_from_every_file(tmp_path: Path) -> None:
    makers: dict[str, Any] = {"bert": word_piece, "roberta": byte_level, "saved": word_piece}
    for name, make in makers.items():
        folder = tmp_path / name
        folder.mkdir()
        specials = ROBERTA if make is byte_level else ()
        want = tokenizer(make(folder, *specials, model_max_length=8))
        if name == "saved":
            want.save(folder)
        for path in folder.iterdir():
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        got = tokenizer(folder)
        assert got.vocab_size == want.vocab_size and got.pad_id == want.pad_id
        for text in TEXTS:
            assert got.encode(text) == want.encode(text), text


# llama2.c


def test_llama2c_as_published() -> None:
    t = tokenizer(published("tok512.bin"))
    text = published("stories260K_greedy_200_tokens.txt").read_bytes().decode()
    ids = t.encode(text)
    assert ids[:4] == [1, 403, 407, 261]
    assert t.decode(ids) == text
    assert (t.bos_id, t.eos_id, t.pad_id, t.vocab_size) == (1, 2, None, 512)
    assert t.encode("東") == [1, t.encode(" ")[1], *(byte + 3 for byte in "東".encode())]


def test_llama2c_merges_in_the_order_of_scores() -> None:
    """Against its rule written out: the neighbours whose piece has the highest score, leftmost."""
    path = published("tok512.bin")
    pieces = llama2c.read_pieces(path)
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}

    def encode(text: str) -> list[int]:
        found = [1]
        for letter in ("\u2581" + text if text else "").replace(" ", "\u2581"):
            found += [ids[letter]] if letter in ids else [b + 3 for b in letter.encode()]
        while True:
            pairs = [pieces[a][0] + pieces[b][0] for a, b in pairwise(found)]
            known = [(-pieces[ids[pair]][1], i) for i, pair in enumerate(pairs) if pair in ids]
            if not known:
                return found
            i = min(known)[1]
            found[i : i + 2] = [ids[pairs[i]]]

    t, rng = tokenizer(path), random.Random(0)
    text = published("stories260K_greedy_200_tokens.txt").read_bytes().decode()
    for letters in (text, "aabhllottte  ,.éd\n東"):
        for _ in range(100):
            sample = "".join(rng.choices(letters, k=40))
            assert t.encode(sample) == encode(sample), sample
    assert t.encode(text) == encode(text)


# Any of them


@pytest.fixture
def bert(tmp_path: Path) -> Tokenizer:
    return tokenizer(word_piece(tmp_path))


def test_batches_are_padded(bert: Tokenizer) -> None:
    ids, mask = bert.batch(["hello", "hello, hello", ""])
    assert ids.dtype == np.int64 and mask.dtype == np.bool_
    assert ids.tolist() == [[2, 5, 3, 0, 0], [2, 5, 14, 5, 3], [2, 3, 0, 0, 0]]
    assert mask.tolist() == (ids != 0).tolist()
    left, mask = bert.batch(["hello", "hello, hello", ""], side="left")
    assert left.tolist() == [[0, 0, 2, 5, 3], [2, 5, 14, 5, 3], [0, 0, 0, 2, 3]]
    assert mask.tolist() == (left != 0).tolist()
    assert bert.batch([])[0].shape == (0, 0)


def test_batches_are_cut(bert: Tokenizer) -> None:
    ids, mask = bert.batch(["hello, hello", "hello"], max_len=3)
    assert ids.tolist() == [[2, 5, 3], [2, 5, 3]] and mask.all()
    assert bert.encode("hello, hello") == [2, 5, 14, 5, 3]  # and nothing else ever after


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("max_len", [3, 9, 10, 400])
def test_cutting_equals_the_packages(tmp_path: Path, max_len: int, side: str) -> None:
    """`_inner.enable_truncation`, which other threads would see, is the judge."""
    makers: tuple[Any, ...] = (word_piece, byte_level, byte_level)
    for make, specials in zip(makers, ((), GPT2, ROBERTA), strict=True):
        folder = tmp_path / f"{make.__name__}{len(specials)}"
        folder.mkdir()
        make(folder, *specials, truncation_side=side)
        ours, judge = tokenizer(folder), tokenizer(folder)._inner
        judge.enable_truncation(max_len, direction=side)
        for text in TEXTS:
            ids, mask = ours.batch([text], max_len=max_len)
            assert ids[mask].tolist() == judge.encode(text).ids, text
        for a, b in product(TEXTS, TEXTS) if max_len > 4 else ():
            found, wanted = ours.encoding(a, b, max_len=max_len), judge.encode(a, b)
            assert found.ids == wanted.ids and found.types == wanted.type_ids, (a, b)
            if side == "right":  # the package trims spaces of the first token that stays otherwise
                assert found.spans == wanted.offsets, (a, b)
            assert found.special == list(map(bool, wanted.special_tokens_mask)), (a, b)


class Watched:
    """The package's tokenizer; `encode` waits for another thread, and changes are refused."""

    def __init__(self, inner: Any, meeting: threading.Barrier) -> None:
        vars(self).update(inner=inner, meeting=meeting)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError(f"a call set {name} of a tokenizer that threads share")

    def encode(self, *texts: Any, **options: Any) -> Any:
        self.meeting.wait()  # both threads are amid their calls
        encoding = self.inner.encode(*texts, **options)
        self.meeting.wait()
        return encoding


def test_a_thread_that_cuts_leaves_the_texts_of_others_whole(bert: Tokenizer) -> None:
    long = "hello, " * 50
    whole, cut = bert.encode(long), bert.batch([long], max_len=4)[0].tolist()
    bert._inner = Watched(bert._inner, threading.Barrier(2, timeout=SECONDS))
    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(bert.batch, [long], max_len=4)
        assert pool.submit(bert.encode, long).result() == whole
        assert others.result()[0].tolist() == cut and len(cut[0]) == 4


def test_padding_without_such_a_token(tmp_path: Path) -> None:
    ids, mask = tokenizer(byte_level(tmp_path, *GPT2)).batch(["hello", ""])
    assert ids.tolist()[1] == [0] and mask.tolist() == [[True], [False]]


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("hello", {}, "texts must be a list of texts, got one text"),
        ([3], {}, "text must be a string, got int"),
        (["\ud800"], {}, "surrogates not allowed"),
        (["a"], {"side": "both"}, 'side must be "right" or "left", got \'both\''),
        (["a"], {"max_len": 2}, "max_len must exceed the 2 special tokens, got 2"),
        (["a"], {"max_len": -1}, "max_len must exceed the 2 special tokens, got -1"),
    ],
)
def test_what_makes_no_batch(
    bert: Tokenizer, texts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        bert.batch(texts, **options)


def test_a_pair_without_types(tmp_path: Path) -> None:
    names = ["input_ids", "attention_mask"]
    plain = tokenizer(word_piece(tmp_path, model_input_names=names)).encoding("hello", "h")
    assert plain.ids == [2, 5, 3, 10, 3] and plain.types == [0] * 5
    (tmp_path / "tokenizer_config.json").unlink()
    assert tokenizer(tmp_path).encoding("hello", "h").types == [0, 0, 0, 1, 1]


def test_what_makes_no_pair(bert: Tokenizer) -> None:
    assert bert.encoding("hello, hello", "h", max_len=4).ids == [2, 5, 3, 3]
    with pytest.raises(ValueError, match="max_len must exceed the 3 special tokens, got 3"):
        bert.encoding("hello", "h", max_len=3)
    with pytest.raises(TypeError, match="text must be a string, got int"):
        bert.encoding("hello", 3)


def test_ids_that_cannot_be(bert: Tokenizer) -> None:
    assert bert.decode(np.asarray([2, 5, 10**6, 3])) == "hello"
    for ids in ([-1], [2**40]):
        with pytest.raises(ValueError, match="ids must lie in"):
            bert.decode(ids)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "roberta"])
def test_a_tokenizer_is_saved(tmp_path: Path, kind: str) -> None:
    (tmp_path / "old").mkdir()
    makers: dict[str, Any] = {"bert": word_piece, "gpt2": byte_level, "roberta": byte_level}
    specials = {"bert": (), "gpt2": GPT2, "roberta": ROBERTA}[kind]
    old = tokenizer(makers[kind](tmp_path / "old", *specials))
    old.save(tmp_path / "new")
    new = tokenizer(tmp_path / "new")
    for text in TEXTS:
        assert new.encode(text) == old.encode(text)
        assert new.decode(old.encode(text)) == old.decode(old.encode(text))
    for name in ("bos_id", "eos_id", "pad_id", "vocab_size"):
        assert getattr(new, name) == getattr(old, name)
    (tmp_path / "new" / "tokenizer_config.json").write_text('{"eos_token": null, "chat": "kept"}')
    new.save(tmp_path / "new")
    assert tokenizer(tmp_path / "new" / "tokenizer.json").eos_id is None
    assert "kept" in (tmp_path / "new" / "tokenizer_config.json").read_text()


def test_transformers_loads_what_is_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "old").mkdir()
    ours = tokenizer(byte_level(tmp_path / "old", *ROBERTA))
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert theirs.pad_token_id == ours.pad_id and theirs.eos_token_id == ours.eos_id


MADE: dict[str, Any] = {"bert": word_piece, "roberta": lambda p: byte_level(p, *ROBERTA)}
YY = {"content": "Y", "__type": "AddedToken"}
CLASSES = [
    ("bert", "BertTokenizer", {"model_max_length": 7}),
    ("bert", "DistilBertTokenizer", {"model_max_length": 9, "padding_side": "left"}),
    ("bert", "PreTrainedTokenizerFast", {"model_input_names": ["input_ids", "attention_mask"]}),
    ("bert", "BertTokenizer", {"extra_special_tokens": {"image_token": "X"}, "own_token": "Y"}),
    ("bert", "BertTokenizer", {"additional_special_tokens": ["X", YY]}),
    ("roberta", "RobertaTokenizer", {"add_prefix_space": True}),
    ("roberta", "GPT2Tokenizer", {"chat_template": "{{ messages }}"}),
]


@pytest.mark.parametrize(("kind", "name", "keys"), CLASSES)
def test_transformers_makes_the_same_inputs_of_what_is_saved(
    kind: str, name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    tokenizer(MADE[kind](old)).save(old)
    for path in (*old.glob("vocab.*"), *old.glob("merges.txt")):
        path.unlink()
    configured(old, {"tokenizer_class": name, **keys})
    ours = tokenizer(old)
    ours.save(new)
    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (old, new))
    for text in TEXTS:
        assert dict(after(text, text)) == dict(before(text, text))
        assert after(text)["input_ids"] == ours.encode(text)
    kept = ("model_max_length", "padding_side", "chat_template", "cls_token", "sep_token")
    assert [getattr(after, key) for key in kept] == [getattr(before, key) for key in kept]
    assert set(before.all_special_tokens) <= set(after.all_special_tokens)
    assert getattr(after, "image_token", None) == getattr(before, "image_token", None)
    # transformers 4 changes the pre-tokenizer of tokenizer.json unless the key agrees.
    spaced = json.loads((new / "tokenizer_config.json").read_text())["add_prefix_space"]
    assert spaced is keys.get("add_prefix_space", False)
    again = tokenizer(new)
    assert again.encoding("hello", "hello").types == ours.encoding("hello", "hello").types


def test_padding_and_truncation_of_a_file_are_the_callers_now(tmp_path: Path) -> None:
    word_piece(tmp_path)
    inner = tokenizer(tmp_path)._inner
    inner.enable_padding(length=64)
    inner.enable_truncation(4)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer(tmp_path).encode("hello, hello") == [2, 5, 14, 5, 3]


@pytest.mark.parametrize("said", ["left", None, "right"])
def test_the_side_at_which_texts_are_cut_is_that_of_transformers(
    tmp_path: Path, said: str | None
) -> None:
    """tokenizer_config.json says it, else tokenizer.json."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    inner = tokenizer(word_piece(tmp_path))._inner
    inner.enable_truncation(4, direction="left" if said is None else "right")
    inner.save(str(tmp_path / "tokenizer.json"))
    side = {} if said is None else {"truncation_side": said}
    configured(tmp_path, {"tokenizer_class": "BertTokenizer", **side})
    tokenizer(tmp_path).save(tmp_path / "again")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for folder in (tmp_path, tmp_path / "again"):
        ours = tokenizer(folder)
        for text in ("a hello, hell", "hello", "東京 hello 3.14"):
            want = theirs(text, truncation=True, max_length=5)["input_ids"]
            assert ours.batch([text], max_len=5)[0].tolist() == [want]
    assert ours.truncation_side == (said or "left")


def test_special_tokens_of_a_tokenizer_json(tmp_path: Path) -> None:
    byte_level(tmp_path, *ROBERTA)
    tokenizer(tmp_path).save(tmp_path)
    config = {"bos_token": None, "eos_token": {"content": "<unk>"}, "pad_token": "absent"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    t = tokenizer(tmp_path)
    assert (t.bos_id, t.eos_id, t.pad_id) == (None, 3, t.vocab_size - 1)  # transformers adds it


# What is refused


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'xformer-array\[hf\]'"):
        tokenizer(word_piece(tmp_path))


def test_no_tokenizer_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(FileNotFoundError, match="is no file of a tokenizer, and no folder"):
            tokenizer(path)
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*did you mean .*config\.json"):
        tokenizer(tmp_path / "confg.json")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*merges\.txt"):
        tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["vocab.txt", "vocab.json", "merges.txt"])
def test_a_vocabulary_is_not_as_long_as_a_tokenizer_json(tmp_path: Path, name: str) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / name).write_text("\n" * (8 << 20) + "a")
    with (
        refused_at_most(),
        pytest.raises(PretrainedError, match=f"{name}: at most 8388608 bytes are read|lacks the"),
    ):
        tokenizer(tmp_path / name)


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model"])
def test_sentence_piece_is_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x0a")
    with pytest.raises(PretrainedError, match=f"{name}: SentencePiece .* writes tokenizer.json"):
        tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json: "),
        ("tokenizer.json", "[" * 100_000, r"tokenizer\.json: "),
        ("tokenizer.json", "\x1b", r"tokenizer\.json: "),
        ("vocab.json", '{"a": -1}', "'a' must have an id, got -1"),
        ("vocab.json", '{"a": true}', "'a' must have an id, got True"),
        ("vocab.json", '{"a": 0}', "lacks the bytes"),
        ("vocab.json", "[]", "must hold a JSON object"),
        ("merges.txt", "a b c", r"line 1 must be two tokens, got 'a b c'"),
        ("merges.txt", "#version: 0.2\nab", r"line 2 must be two tokens, got 'ab'"),
        ("merges.txt", "h zz", "out of vocabulary"),
        ("vocab.txt", "hello", r"'\[CLS\]', '\[SEP\]'|'\[CLS\]'|'\[UNK\]'"),
        ("tokenizer_config.json", '{"tokenizer_class": "CLIPTokenizer"}', "tokenizer_class must"),
        ("tokenizer_config.json", '{"pad_token": 3}', "pad_token must be a string, got 3"),
        ("tokenizer_config.json", '{"sep_token": null}', "sep_token must be a token, got None"),
        (
            "tokenizer_config.json",
            '{"truncation_side": "Left"}',
            "truncation_side must be one of right, left",
        ),
        ("tokenizer_config.json", '{"do_lower_case": 1}', "do_lower_case must be true or false"),
        ("tokenizer_config.json", '{"do_basic_tokenize": false}', "do_basic_tokenize must be True"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"9": {"content": "x9"}}}',
            "'x9' must",
        ),
        ("added_tokens.json", '{"x9": 999}', "'x9' must have the id 999 that the files give"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    for folder, make in (("bert", word_piece), ("roberta", byte_level)):
        (tmp_path / folder).mkdir()
        make(tmp_path / folder, *(ROBERTA if folder == "roberta" else ()))
    of_bert = name == "vocab.txt" or "do_" in text
    folder = tmp_path / ("bert" if of_bert else "roberta")
    (folder / name).write_text(text)
    with refused_at_most(), pytest.raises(PretrainedError, match=message):
        tokenizer(folder)


def try_to_use(folder: Path) -> None:
    t = tokenizer(folder)
    t.decode(t.encode("Hello, hello [MASK] <s>"))
    t.batch(["hello", "a"], max_len=8)


@some
@given(data=st.data())
def test_damaged_tokenizers_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "x"
    folder.mkdir(exist_ok=True)
    tokenizer(word_piece(tmp_path)).save(folder)
    whole = (folder / "tokenizer.json").read_bytes()
    broken = st.one_of(damaged(whole), edited(json.loads(whole)))
    (folder / "tokenizer.json").write_bytes(data.draw(broken))
    with refused_at_most():
        try_to_use(folder)


@some
@given(data=st.data())
def test_damaged_vocabularies_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    names = {"vocab.txt": word_piece, "vocab.json": byte_level, "merges.txt": byte_level}
    name = data.draw(st.sampled_from(sorted(names)))
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    names[name](folder, *(() if name == "vocab.txt" else ROBERTA), pad_token=None)
    name = data.draw(st.sampled_from([name, "tokenizer_config.json"]))
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(data.draw(damaged(whole)))
    with refused_at_most():
        try_to_use(folder)


@some
@given(data=st.data())
def test_damaged_llama2c_tokenizers_are_read_or_refused(
    tmp_path: Path, data: st.DataObject
) -> None:
    usual = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256))]
    rows = [*usual, b" a", b"a", b" ", b"aa", b"llo"]
    packed = (struct.pack("<fi", -i, len(row)) + row for i, row in enumerate(rows))
    whole = struct.pack("<i", 7) + b"".join(packed)
    (tmp_path / "tok.bin").write_bytes(whole[:3000] + data.draw(damaged(whole[3000:])))
    with refused_at_most():
        try_to_use(tmp_path)
