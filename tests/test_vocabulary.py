"""Vocabularies: texts to ids and back, saved and read, trained; and what they refuse."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from truths import published

import xformer as xf
from xformer.generation import stream_text
from xformer.pretrained import PretrainedError
from xformer.pretrained.tokenizer import tokenizer
from xformer.training import (
    Bytes,
    Characters,
    Subwords,
    Vocabulary,
    load_vocabulary,
    named_vocabulary,
    train_bpe,
)

TEXT = "the quick brown fox jumps over the lazy dog, naïve and coöperative 🦊\n" * 20


def subwords(size: int = 300, specials: tuple[str, ...] = ("<|endoftext|>",)) -> Subwords:
    pytest.importorskip("tokenizers")
    return train_bpe([TEXT], size, specials)


def some(kind: str) -> Vocabulary:
    if kind == "subwords":
        return subwords()
    return Bytes() if kind == "bytes" else Characters.of([TEXT])


KINDS = ("bytes", "characters", "subwords")


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_comes_back(kind: str) -> None:
    words = some(kind)
    ids = words.encode(TEXT)
    assert words.decode(ids) == TEXT
    assert all(isinstance(i, int) and 0 <= i < words.size for i in ids)
    array = words.array(TEXT)
    assert array.dtype.kind in "ui" and array.tolist() == ids
    assert words.encode("") == [] and words.array("").shape == (0,) and words.decode([]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_vocabulary_comes_back(kind: str, tmp_path: Path) -> None:
    words = some(kind)
    words.save(tmp_path / "run")
    again = load_vocabulary(tmp_path / "run")
    assert type(again) is type(words) and again.size == words.size
    assert (again.bos_id, again.eos_id) == (words.bos_id, words.eos_id)
    assert again.encode(TEXT) == words.encode(TEXT)
    assert again == words and hash(again) == hash(words)
    assert again not in (Characters("ab"), None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_writes_with_it(kind: str) -> None:
    words = some(kind)
    model = xf.GPT(words.size, 1, 8, 2, 16)
    text = "".join(stream_text(model, model.init(0), words, "the ", max_new_tokens=8))
    assert text and isinstance(text, str)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_every_text_has_bytes(text: str) -> None:
    assert Bytes().decode(Bytes().encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(), min_size=1), other=st.characters())
def test_characters_are_those_of_the_text(text: str, other: str) -> None:
    words = Characters.of([text[: len(text) // 2], text[len(text) // 2 :]])
    assert words.characters == "".join(sorted(set(text)))
    assert words.encode(text) == [words.characters.index(c) for c in text]
    assert words.decode(words.encode(text)) == text
    if other not in text:
        with pytest.raises(ValueError, match="does not have"):
            words.encode(text + other)


def test_characters_of_tiny_shakespeare() -> None:
    """65, in the order of nanoGPT's prepare.py."""
    words = Characters.of([published("tinyshakespeare.txt").read_text()])
    assert words.size == 65 and words.characters.startswith("\n !$&',-.3:;?ABC")
    assert words.encode("hii there") == [46, 47, 47, 1, 58, 46, 43, 56, 43]


def test_unknown_characters_are_named() -> None:
    words = Characters("abc")
    with pytest.raises(ValueError, match=r"^encode: the vocabulary of 3 characters does not have "):
        words.encode("abx")
    with pytest.raises(ValueError, match=r"does not have '\\n', 'x', 'é'$"):
        words.encode("xébax\n")
    with pytest.raises(ValueError, match=r"and 16 more$"):
        words.encode("abcdefghijklmnopqrstuvwxyz012")
    with pytest.raises(ValueError, match=r"^decode: ids must lie in \[0, 3\), got -1 to 2$"):
        words.decode([2, -1])


@pytest.mark.parametrize("characters", ["", "ba", "aab"])
def test_characters_out_of_order_are_refused(characters: str) -> None:
    with pytest.raises(ValueError, match="Characters: must be sorted, each once, at least one"):
        Characters(characters)


def test_no_text_has_no_characters() -> None:
    with pytest.raises(ValueError, match="there is no text"):
        Characters.of([""])


# Byte pairs


def test_byte_pairs_are_learnt() -> None:
    words = subwords(310)
    assert words.size == 310 and len(words.encode(TEXT)) < len(TEXT) / 2
    assert 310 < subwords(1000).size < 330  # the text has no more pairs
    assert words.tokenizer.decode(words.encode("日本語 \x00")) == "日本語 \x00"  # by their bytes
    assert words.bos_id == words.eos_id == 0 and words.pad_id is None
    assert train_bpe([TEXT], 310) == words != subwords(300)


def test_the_end_token_in_a_text_stays_text_unless_asked_for(tmp_path: Path) -> None:
    text = "the<|endoftext|>fox"
    words = subwords(310)
    assert 0 not in words.encode(text) and words.decode(words.encode(text)) == text
    asked = train_bpe([TEXT], 310, split_special_tokens=False)
    assert asked.encode(text) == [*asked.encode("the"), 0, *asked.encode("fox")]
    assert asked != words
    for vocabulary in (words, asked):
        vocabulary.save(tmp_path / str(vocabulary is asked))
        assert load_vocabulary(tmp_path / str(vocabulary is asked)) == vocabulary


@pytest.mark.parametrize("split", [True, False])
def test_transformers_reads_what_is_saved_likewise(tmp_path: Path, split: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    text = "the <s> fox</s>"
    specials = ("<pad>", "<s>", "</s>")
    words = train_bpe([TEXT], 300, specials, split_special_tokens=split)
    words.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text)["input_ids"] == words.encode(text)


def test_byte_pairs_with_other_specials() -> None:
    words = subwords(300, ("<pad>", "<s>", "</s>"))
    assert (words.pad_id, words.bos_id, words.eos_id) == (0, 1, 2)
    assert words.decode([1, *words.encode("fox"), 2, 0]) == "fox"


def test_the_tokens_around_a_text_are_left_out() -> None:
    """stories260K's tokenizer begins every text with <s>; a corpus has parts of texts."""
    pytest.importorskip("tokenizers")
    whole = tokenizer(published("tok512.bin"))
    assert whole.encode("Once upon")[0] == whole.bos_id
    assert Subwords(whole).encode("Once upon") == whole.encode("Once upon")[1:]


@pytest.mark.parametrize(
    ("texts", "size", "error", "message"),
    [
        ("one text", 300, TypeError, "texts must be several texts, got one"),
        ([TEXT], 1 << 70, ValueError, r"size must be below 2\^32, got 1180591620717411303424"),
        ([TEXT], 256, ValueError, "at least 256 bytes and 1 specials, got 256"),
        ([TEXT], 300.0, ValueError, "at least 256 bytes and 1 specials, got 300.0"),
        ([], 300, ValueError, "there is no text to learn from"),
        ([""], 300, ValueError, "there is no text to learn from"),
    ],
)
def test_bad_byte_pairs_are_refused(
    texts: Any, size: Any, error: type[Exception], message: str
) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(error, match=f"^train_bpe: .*{message}$"):
        train_bpe(texts, size)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'xformer-array\[hf\]'"):
        train_bpe([TEXT], 300)


# Names and files


def test_vocabularies_by_name(tmp_path: Path) -> None:
    assert named_vocabulary("bytes") == Bytes()
    assert named_vocabulary("characters") == Characters.of
    made: Any = named_vocabulary("bpe:300")
    assert isinstance(made, partial) and made.keywords == {"size": 300}
    Characters("abc").save(tmp_path)
    assert named_vocabulary(str(tmp_path)) == Characters("abc")
    for name in ("words", "bpe", "bpe:", "bpe:-1", str(tmp_path / "absent")):
        with pytest.raises(ValueError, match=r"^vocabulary must be bytes, characters, bpe"):
            named_vocabulary(name)


def test_a_folder_without_a_vocabulary_is_said_so(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(FileNotFoundError, match="no folder with one"):
        load_vocabulary(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "format is missing"),
        ('{"format": "xformer-vocabulary-2"}', "format must be one of xformer-vocabulary-1"),
        ('{"format": "xformer-vocabulary-1"}', "kind is missing"),
        ('{"format": "xformer-vocabulary-1", "kind": "words"}', "kind must be one of bytes"),
        ('{"format": "xformer-vocabulary-1", "kind": "characters"}', "characters is missing"),
        (
            '{"format": "xformer-vocabulary-1", "kind": "characters", "characters": "ba"}',
            "must be sorted",
        ),
        ('{"format": "xformer-vocabulary-1", "kind": "bytes", "more": 1}', "not supported: 'more'"),
    ],
)
def test_a_damaged_vocabulary_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_text(text)
    with pytest.raises(PretrainedError, match=message) as caught:
        load_vocabulary(tmp_path)
    assert str(path) in str(caught.value)


def test_an_interrupted_write_leaves_the_old_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Characters("abc").save(tmp_path)

    def full(self: Path, text: str, encoding: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        Characters("xyz").save(tmp_path)
    assert load_vocabulary(tmp_path) == Characters("abc")
    assert [p.name for p in tmp_path.iterdir()] == ["vocabulary.json"]
    assert json.loads((tmp_path / "vocabulary.json").read_bytes())["characters"] == "abc"


def test_ids_of_characters_are_integers_of_numpy() -> None:
    assert Characters("ab").array("ba").dtype == np.int64
