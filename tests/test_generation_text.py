"""Ids to text as they come, and the strings that end it."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from causal_models import seq2seq
from hostile import some
from hypothesis import given
from hypothesis import strategies as st
from truths import published

import xformer as xf
from xformer import pretrained, tree
from xformer.generation import Bytes, decoded, generate, stream_text, until
from xformer.generation.samplers import temperature
from xformer.generation.text import Hidden, end_of, ends_of, hidden_ids, prompt_ids
from xformer.pretrained.tokenizer import tokenizer

TEXT = "Once upon a time, there was 東京 – naïve 🦊🦊! \n\n  Two  spaces, é"
CODECS = ("bytes", "llama2.c", "gpt2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def codec(name: str, folder: Path) -> Any:
    if name == "bytes":
        return Bytes()
    pytest.importorskip("tokenizers")
    if name == "llama2.c":
        return tokenizer(published("tok512.bin"))
    for theirs, ours in (("gpt2_vocab.json", "vocab.json"), ("gpt2_merges.txt", "merges.txt")):
        shutil.copy(published(theirs), folder / ours)
    return tokenizer(folder)


# Pieces of text


@pytest.mark.parametrize("name", CODECS)
def test_pieces_are_the_text(name: str, folder: Path) -> None:
    """From every place in it on, of whole letters."""
    own = codec(name, folder)
    ids = own.encode(TEXT)
    whole = own.decode(ids)
    assert whole == TEXT
    n_pieces = set()
    for start in range(len(ids)):
        before = own.decode(ids[:start])
        pieces = list(decoded(own, ids[start:], ids[:start]))
        if "\ufffd" in before:
            continue  # begins inside of a letter
        assert before + "".join(pieces) == TEXT
        assert not any("\ufffd" in piece or piece == "" for piece in pieces)
        n_pieces.add(len(pieces))
    assert len(n_pieces) > 20  # they come one by one


@pytest.mark.parametrize("name", CODECS)
def test_pieces_come_as_soon_as_they_can(name: str, folder: Path) -> None:
    own = codec(name, folder)
    seen: list[int] = []

    def ids() -> Iterator[int]:
        for i in own.encode("a fox🦊 b"):
            seen.append(i)
            yield i

    text = ""
    for piece in decoded(own, ids()):
        text += piece
        assert own.decode(seen) == text


def test_bytes_that_are_no_text() -> None:
    assert list(decoded(Bytes(), [0xC3])) == ["\ufffd"]
    assert "".join(decoded(Bytes(), [0xFF, 65, 0xC3, 66, 0xE6, 0x9D])) == "\ufffdA\ufffdB\ufffd"
    assert list(decoded(Bytes(), [])) == []


# Strings that end it


@pytest.mark.parametrize(
    ("pieces", "stop", "want"),
    [
        (["one", " two", " three"], [], ["one", " two", " three"]),
        (["one t", "w", "o three"], ["two"], ["one "]),
        (["one t", "wice"], ["two"], ["one ", "twice"]),
        (["ab", "ab", "abc"], ["abc"], ["ab", "ab"]),
        (["aab", "b"], ["abb"], ["a"]),
        (["x\n", "\nUser", ":"], ["\nUser:"], ["x", "\n"]),
        (["two", "x"], ["two"], []),
        (["tw"], ["two"], ["tw"]),
        (["abcd"], ["bc", "abcd"], ["a"]),  # "bc" is complete first
        (["a", "b", "c", "d"], ["bc", "abcd"], ["a"]),
        (["xabc"], ["c", "bc", "abc"], ["x"]),  # of those that end together the longest
    ],
)
def test_what_comes_before_a_stop_string(
    pieces: list[str], stop: list[str], want: list[str]
) -> None:
    assert list(until(pieces, stop)) == want


letters = st.text("ab", max_size=12)


@some
@given(letters, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_however_it_is_cut(text: str, stop: list[str], data: st.DataObject) -> None:
    """The same text as letter by letter, never more than what is known, and none of the rest."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    want = next(
        (
            text[: end - max(len(s) for s in stop if text[:end].endswith(s))]
            for end in range(1, len(text) + 1)
            if text[:end].endswith(tuple(stop))
        ),
        text,
    )
    assert "".join(until(pieces, stop)) == want
    assert "".join(until(text, stop)) == want
    if not any(s in want for s in stop):
        for n in range(len(want) + 1):
            assert want.startswith("".join(until(want[:n], stop)))


@pytest.mark.parametrize(
    ("pieces", "stop", "want"),
    [
        (["a", Hidden("<e>"), "b"], [], ["a", "b"]),
        (["a", Hidden("<e>"), "b"], ["<e>"], ["a"]),
        (["ab", Hidden("<e>"), "c"], ["b<e>"], ["a"]),
        (["ab", Hidden("<e>"), "cd", "e"], ["<e>cde"], ["ab"]),
        (["ab", Hidden("<e>"), "cd", "f"], ["<e>cde"], ["ab", "cdf"]),
        (["a", Hidden("<e>"), Hidden("<f>"), "b"], ["e><f"], ["a"]),
        ([Hidden("<e>")], ["<e>x"], []),
        (["<", "e", ">"], ["<e>"], []),  # as text
    ],
)
def test_hidden_pieces_are_sought_and_not_shown(
    pieces: list[str], stop: list[str], want: list[str]
) -> None:
    assert list(until(pieces, stop)) == want


def test_nothing_is_asked_for_after_a_stop_string() -> None:
    def pieces() -> Iterator[str]:
        yield "a stop"
        raise AssertionError

    assert list(until(pieces(), ["stop"])) == ["a "]


def test_stops_of_other_kinds() -> None:
    """None is no stop, and what can be read only once has its strings and its ids."""
    model = xf.GPT(vocab_size=256, n_layers=1, d_model=8, n_heads=2, max_len=64)
    params = tree.map(lambda p: p * 20, model.init(seed=1))

    def text(stop: Any, prompt: Any = "ab") -> str:
        return "".join(stream_text(model, params, Bytes(), prompt, max_new_tokens=8, stop=stop))

    free = text(())
    assert text(None) == free
    ids = generate(model, params, [list(b"ab")], max_new_tokens=8)[0]
    for stop in (ids[3], free[2]):
        assert text(iter([stop])) == text([stop]) != free
    for bad, got in (
        (5, "strings and ids, got 5"),
        ([None], r"ids, got \[None\]"),
        (b"x", "got b"),
    ):
        with pytest.raises(TypeError, match=f"stream_text: stop must .*{got}"):
            text(bad)
    for prompt in (None, 5, b"x", ["a"]):
        with pytest.raises(TypeError, match="the prompt must be a string, got"):
            text((), prompt)
    for stop in ("b", [5]):
        with pytest.raises(TypeError, match="until: stop must hold strings, got"):
            until(["abc"], stop)


def test_an_empty_stop_string() -> None:
    with pytest.raises(ValueError, match="a string that ends the text must not be empty"):
        until([], ["a", ""])


def test_one_stop_string_is_no_list() -> None:
    with pytest.raises(TypeError, match="stop must be a list of strings and ids, got 'abc'"):
        stream_text(GPT, PARAMS, Bytes(), "a", max_new_tokens=1, stop="abc")


# Models


GPT = xf.GPT(vocab_size=256, n_layers=1, d_model=16, n_heads=2, max_len=32)
PARAMS = tree.map(lambda p: p * 4, GPT.init(seed=3))


def test_a_text_of_bytes() -> None:
    options: dict[str, Any] = {"sampler": temperature(0.7), "seed": 2, "sliding_context": True}
    ids = generate(GPT, PARAMS, [list(b"caf\xc3\xa9")], max_new_tokens=60, **options)[0]
    text = "".join(stream_text(GPT, PARAMS, Bytes(), "café", max_new_tokens=60, **options))
    assert text == bytes(ids).decode(errors="replace")


def test_a_stop_string_that_tokens_cut() -> None:
    """Every three letters of a text end it, however many tokens they come from."""
    options: dict[str, Any] = {"max_new_tokens": 25, "sampler": temperature(1.0)}
    text = "".join(stream_text(GPT, PARAMS, Bytes(), "a", **options))
    for start in range(len(text) - 3):
        stop = text[start : start + 3]
        got = "".join(stream_text(GPT, PARAMS, Bytes(), "a", stop=[stop], **options))
        assert got == text[: text.index(stop)]


def test_a_stop_id_is_no_part_of_the_text() -> None:
    options: dict[str, Any] = {"max_new_tokens": 25, "sampler": temperature(1.0)}
    (ids,) = generate(GPT, PARAMS, [[97]], **options)
    got = "".join(stream_text(GPT, PARAMS, Bytes(), "a", stop=[ids[5], "\ufffd" * 9], **options))
    assert got == bytes(ids[: ids.index(ids[5])]).decode(errors="replace")


class Words:
    """A tokenizer of words, for what the models' own would say."""

    bos_id, eos_id = 0, 1
    guessed: Collection[str] = ()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


def test_a_target_stands_alone() -> None:
    model, params = seq2seq("t5")
    (ids,) = generate(model, params, [[5, 6]], max_new_tokens=9)
    got = "".join(stream_text(model, params, Words(), "5 6", max_new_tokens=9))
    assert got.split() == [str(i) for i in ids[: (*ids, 1).index(1)]]


def test_what_ends_a_text() -> None:
    """What the model's files say, or else the tokenizer; no token that begins texts, no guess."""
    model, _ = seq2seq("t5")
    assert ends_of(Bytes(), GPT) == frozenset()
    assert ends_of(Words(), GPT) == {1}
    for told, ends in ((7, {7}), ([7, 8], {7, 8}), (None, {1}), ([99], {1}), ([99, 7], {7})):
        own = pretrained.model(dict(model.hf_config) | {"eos_token_id": told})
        assert ends_of(Words(), own) == ends
        assert end_of(Words(), own) == min(ends)
    guessing = Words()
    guessing.guessed = {"eos_token"}
    assert ends_of(guessing, GPT) == frozenset() and end_of(guessing, GPT) is None
    own = pretrained.model(dict(model.hf_config) | {"eos_token_id": [7, 1]})
    assert ends_of(guessing, own) == {7, 1} and end_of(guessing, own) == 1


def test_an_empty_prompt_is_the_token_that_begins_texts() -> None:
    assert prompt_ids(Words(), GPT, "") == [0]
    own = pretrained.model(dict(seq2seq("t5")[0].hf_config) | {"bos_token_id": 7})
    assert prompt_ids(Words(), own, "") == [7]
    with pytest.raises(ValueError, match="the prompt must hold at least one token: the tokenizer"):
        stream_text(GPT, PARAMS, Bytes(), "", max_new_tokens=3)


def test_half_a_letter_is_no_prompt() -> None:
    with pytest.raises(ValueError, match=r"^the prompt must be UTF-8, got '\\ud800' at char"):
        stream_text(GPT, PARAMS, Bytes(), "\ud800", max_new_tokens=3)


def test_unknown_tokens_are_refused() -> None:
    """A tokenizer of another model gives ids that this one has not."""
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 256\), got ids from 5 to 256"):
        list(stream_text(GPT, PARAMS, Words(), "5 256", max_new_tokens=3))
    assert np.all(np.isfinite(PARAMS.embed.table))


# Special tokens


def test_special_tokens_come_as_they_are_spelled() -> None:
    pytest.importorskip("tokenizers")
    own = tokenizer(published("tok512.bin"))
    ids = [1, *own.encode("one", special=False), 2, 1, *own.encode("two", special=False)]
    hidden = hidden_ids(own, [ids[1]])
    assert hidden == {1, 2, ids[1]}
    pieces = list(decoded(own, ids, [], hidden=hidden_ids(own, ())))
    assert "".join(pieces) == "<s>one</s><s> two"
    assert [str(p) for p in pieces if isinstance(p, Hidden)] == ["<s>", "</s>", "<s>"]
    assert "".join(decoded(own, ids)) == own.decode(ids) == "one two"
    pieces = list(decoded(own, ids[1:], [], hidden=hidden))
    assert isinstance(pieces[0], Hidden) and pieces[0] == own.decode(ids[1:2])


def test_a_tokenizer_of_ones_own_spells_ids_as_text() -> None:
    assert list(decoded(Bytes(), b"ab", hidden=b"b")) == ["a", Hidden("b")]
    pieces = list(decoded(Bytes(), b"a\xe6b\x9d\xb1c", hidden=b"b"))  # the letter is cut in two
    assert "".join(pieces) == "a\ufffdb\ufffd\ufffdc" and pieces[2] == Hidden("b")
    assert hidden_ids(Bytes(), (3,)) == {3}


# Time


class Counted:
    """A tokenizer that counts the ids that it decodes."""

    bos_id = eos_id = None

    def __init__(self, inner: Any) -> None:
        self.inner, self.count = inner, 0
        self.special_ids = getattr(inner, "special_ids", frozenset())

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def decode(self, ids: Any) -> str:
        self.count += len(ids)
        return self.inner.decode(ids)


N = 2000
LONG: dict[str, tuple[str, list[int]]] = {
    "special tokens": ("llama2.c", [1, 2] * N),
    "special tokens among others": ("llama2.c", [1, 2, 400] * N),
    "ids that the tokenizer has not": ("llama2.c", [100_000] * 2 * N),
    "bytes of no letter": ("bytes", [0x80] * 2 * N),
    "bytes that begin letters": ("bytes", [0xE6] * 2 * N),
    "pieces of bytes that are no letter": ("llama2.c", [3 + 0x80] * 2 * N),
    "parts of letters": ("bytes", [0xE6, 0x9D] * 2 * N),
    "letters": ("bytes", list("東".encode()) * N),
    "letters of pieces of bytes": ("llama2.c", [3 + byte for byte in "東".encode()] * N),
    "tokens of GPT-2": ("gpt2", [47078, 165] * N),
}


@pytest.mark.parametrize("name", LONG)
def test_time_is_linear(name: str, folder: Path) -> None:
    """Decoded ids are counted, as are those of a long prompt."""
    kind, ids = LONG[name]
    own = codec(kind, folder)
    for before in ([], ids):
        counted = Counted(own)
        text = "".join(decoded(counted, ids, before))
        assert counted.count < 40 * len(ids)
        want = own.decode([*before, *ids])
        assert len(own.decode(before)) + len(text) == len(want)
        if not before:
            assert text == want


@pytest.mark.parametrize("n", range(1, 40))
def test_letters_are_cut_nowhere(n: int) -> None:
    """Tokens that end one letter and begin the next, after and before bytes of no letter."""

    class Halves:
        bos_id = eos_id = None
        halves = (b"\x9d\xb1\xe6", b"\xe6", b"\x80", b"a", b"\x9d\xb1")

        def encode(self, text: str) -> list[int]:
            raise AssertionError

        def decode(self, ids: Any) -> str:
            return b"".join(self.halves[i] for i in ids).decode(errors="replace")

    for ids in ([1, *[0] * n, 4, 3], [*[2] * n, 1, 0, 4], [3, 1, *[0] * n], [0] * n, [2, 1, 4] * n):
        assert "".join(decoded(Halves(), ids)) == Halves().decode(ids)
