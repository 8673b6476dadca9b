"""Texts, and corpora made of them in memory and in folders: what is read, and what is refused."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from truths import published

from xformer import cli, finetune, training
from xformer.cli import progress
from xformer.training import (
    Characters,
    Corpus,
    CorpusError,
    load_corpus,
    open_corpus,
    prepare,
    train_bpe,
)
from xformer.training import text_reader as cutting
from xformer.training.text_reader import decoded
from xformer.training.texts import Document, Texts

# Texts


def test_the_default_corpus_is_real_text_and_large() -> None:
    found = load_corpus()
    assert len(found.train) > 3_000_000 and len(found.validation) > 200_000
    assert b"def " in found.validation.tobytes()
    assert 3.0 < training.unigram_loss(found) < 3.7


def test_a_folder_is_split_by_files(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(f"file {i:02}\n")
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("not this")
    found = load_corpus(tmp_path)
    assert found.validation.tobytes() == b"file 01\nfile 11\n"
    assert len(found.train) == 18 * 8
    assert "20 files, 1 empty or not UTF-8 left out" in found.description
    assert load_corpus(tmp_path, share=0.5).validation.tobytes().startswith(b"file 01\nfile 03\n")
    assert len(load_corpus(tmp_path, share=0).validation) == 0


def test_folders_behind_links_are_read_once(tmp_path: Path) -> None:
    """Also where links lead round in a circle, or twice to one folder."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder, text in ((root / "z", "in z\n"), (outside / "deep", "deep\n"), (outside, "out\n")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "a.txt").write_text(text)
    for name, target in (
        ("a", root / "z"),
        ("b", outside),
        ("c", outside / "deep"),
        ("up", root),
        ("gone", tmp_path / "absent"),
        (".hidden", outside),
        ("file.txt", outside / "a.txt"),
    ):
        (root / name).symlink_to(target)
    (outside / "back").symlink_to(root)
    found = load_corpus(root, share=0)
    assert found.train.tobytes() == b"out\ndeep\nout\nin z\n"  # b/a, b/deep/a, file, z/a
    assert "4 files, 1 broken links or pipes left out" in found.description
    assert load_corpus(root / "b", share=0).train.tobytes().count(b"in z") == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_pipes_are_named(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for read in (load_corpus, finetune.read, finetune.data.first_fields):
        with pytest.raises(
            ValueError, match=r"pipe\.jsonl must be a .*got a pipe or a device, which"
        ):
            read(pipe)
    with pytest.raises(ValueError, match=" must be a file, got a folder"):
        finetune.read(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert "1 files, 1 broken links or pipes left out" in load_corpus(tmp_path).description
    reader, writer = os.pipe()  # as `--data <(command)` gives it
    try:
        with pytest.raises(ValueError, match="must be a file or folder, got a pipe"):
            prepare(f"/dev/fd/{reader}", tmp_path / "new")
    finally:
        os.close(reader)
        os.close(writer)


def test_an_empty_path_is_not_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    for read in (load_corpus, lambda path: prepare(path, "new")):
        with pytest.raises(ValueError, match="path must name a file or a folder, got an empty one"):
            read("")
    with pytest.raises(ValueError, match=r"vocabulary must be bytes, .* got ''"):
        training.named_vocabulary("")


@pytest.mark.parametrize("share", [0.01, 0.1, 1 / 3, 0.4, 0.45, 0.5])
def test_a_share_of_documents_is_what_it_says(share: float) -> None:
    found = Texts(lambda: (Document(str(i), "a") for i in range(200)), 200, 200, "")
    held = [i for i, (is_held_out, _) in enumerate(found.documents(share)) if is_held_out]
    assert held[0] == 1 and len(held) in (math.floor(200 * share), math.ceil(200 * share))
    if share in (0.01, 0.1, 1 / 3, 0.5):
        assert held == list(range(1, 200, round(1 / share)))
    assert not any(is_held_out for is_held_out, _ in found.documents(0))


def test_a_file_is_split_at_its_last_tenth(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("äbcdefghij" * 10)
    found = load_corpus(path)
    assert found.train.tobytes() + found.validation.tobytes() == path.read_bytes()
    assert len(found.validation) == 11


def test_tiny_shakespeare_is_split_as_nanogpt_does() -> None:
    found = load_corpus(published("tinyshakespeare.txt"), Characters.of)
    assert (len(found.train), len(found.validation)) == (1_003_854, 111_540)
    assert found.vocabulary.size == 65 and found.train.dtype == np.uint8


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(
        st.characters(codec="utf-8", exclude_characters="\ufeff"), min_size=1, max_size=60
    ),
    share=st.floats(0, 0.5),
)
def test_a_file_is_never_cut_inside_a_character(text: str, share: float) -> None:
    with_files(lambda folder: require_whole(folder, text, share))


def with_files(check: Callable[[Path], None]) -> None:
    """Call check with a new folder: hypothesis does not make one for each example."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        check(Path(name))


def require_whole(folder: Path, text: str, share: float) -> None:
    path = folder / "text"
    path.write_bytes(text.encode())
    found = load_corpus(path, share=share)
    train, validation = (part.tobytes().decode() for part in found[:2])
    assert train + validation == text
    n = len(text.encode())
    assert share * n - 1e-6 <= len(validation.encode()) < share * n + 4


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab \n\r.é🦊", max_size=80),
    start=st.integers(0, 20),
    piece=st.integers(4, 30),
)
@example(text="a\n.\naaaaaaaaé", start=0, piece=5)
def test_pieces_are_the_text(text: str, start: int, piece: int) -> None:
    before = "x" * start

    def check(folder: Path) -> None:
        path = folder / "text"
        path.write_bytes((before + text + "behind").encode())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cutting, "PIECE", piece)
            found = list(decoded(path, start, start + len(text.encode())))
        assert "".join(found) == text and all(found)
        assert all(len(part.encode()) <= 2 * piece for part in found)

    with_files(check)


def test_pieces_do_not_change_the_tokens_of_byte_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    source = Path(argparse_source()).read_text(encoding="utf-8")
    words = train_bpe([source], 600)
    path = tmp_path / "text"
    path.write_text(source, encoding="utf-8")
    whole = words.encode(source)
    monkeypatch.setattr(cutting, "PIECE", 500)
    parts = list(decoded(path, 0, path.stat().st_size))
    assert len(parts) > 100
    assert [i for part in parts for i in words.encode(part)] == whole


def argparse_source() -> str:
    import argparse

    return argparse.__file__


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows: list[dict[str, Any]] = [{"text": f"doc {i}\n", "n": i} for i in range(12)]
    rows.insert(3, {"text": ""})
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found = load_corpus(path)
    assert found.validation.tobytes() == b"doc 1\ndoc 11\n"
    assert found.description == "'text' of a.jsonl: 12 documents, 1 without text left out"
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load_corpus(packed).train.tobytes() == found.train.tobytes()


@pytest.mark.parametrize("share", [0, 0.1, 0.5])
@pytest.mark.parametrize("name", ["a.txt", "A.TXT", "a.jsonl", "A.JSONL", "A.NdJson", "A.JSONL.GZ"])
def test_a_byte_order_mark_is_no_text_and_suffixes_have_any_case(
    name: str, share: float, tmp_path: Path
) -> None:
    text = "é and more text"
    is_text = name.lower().endswith(".txt")
    data = text if is_text else json.dumps({"text": text})
    raw = b"\xef\xbb\xbf" + data.encode()
    path = write(tmp_path, name, gzip.compress(raw) if name.endswith(".GZ") else raw)
    found = load_corpus(path, share=share)
    assert found.train.tobytes() + found.validation.tobytes() == text.encode()
    n_held = len(found.validation)
    assert share * len(text.encode()) <= n_held + 1 and n_held <= share * len(text.encode()) + 4
    if is_text:  # each file of a folder has a mark, or none
        write(tmp_path, "b.txt", b"\xef\xbb\xbf")
        folder = load_corpus(tmp_path, share=0)
        assert folder.train.tobytes() == text.encode()
        assert "1 files, 1 empty or not UTF-8 left out" in folder.description


def test_a_file_of_a_byte_order_mark_alone_is_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is empty, there is no text in it"):
        load_corpus(write(tmp_path, "a.txt", b"\xef\xbb\xbf"))


def test_another_field_of_json_and_a_single_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"body": "0123456789é" * 10}))
    found = load_corpus(path, field="body")
    assert found.train.tobytes().decode() == "0123456789é" * 9
    assert found.validation.tobytes().decode() == "0123456789é"


def test_documents_end_with_the_end_of_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{i} is one"}) for i in range(4)))
    found = load_corpus(path, partial(train_bpe, size=270), share=0.5)
    words = found.vocabulary
    for part, numbers in ((found.train, (0, 2)), (found.validation, (1, 3))):
        ids = [[*words.encode(f"{i} is one"), words.eos_id] for i in numbers]
        assert part.tolist() == [*ids[0], *ids[1]]
    assert found.train.dtype == np.uint16
    for name, text in (("single", "one text, cut"), ("one.jsonl", '{"text": "one text, cut"}')):
        cut = load_corpus(write(tmp_path, name, text.encode()), words)
        assert words.eos_id not in cut.train and cut.validation[-1] == words.eos_id


def test_an_end_token_in_a_document_is_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    documents = ["one<|endoftext|>two", "<|endoftext|>"]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    found = load_corpus(path, training.named_vocabulary("bpe:300"), share=0)
    words = found.vocabulary
    ends = np.flatnonzero(found.train == words.eos_id)
    assert len(ends) == len(documents) and ends[-1] == len(found.train) - 1
    texts = np.split(found.train, ends[:1] + 1)
    assert [words.decode(ids.tolist()) for ids in texts] == documents


def test_text_that_is_none_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "latin1", "a schön".encode("latin-1"))
    write(tmp_path, "cut", b"a" * 1_999_999 + "é".encode()[:1])
    write(tmp_path, "empty", b"")
    (tmp_path / "folder").mkdir()
    write(tmp_path, "folder/empty", b"")
    for name, message in (
        ("latin1", "latin1 is not UTF-8 text: byte 0xf6 at offset 5, invalid start byte"),
        ("cut", "cut is not UTF-8 text: byte 0xc3 at offset 1999999, unexpected end of data"),
        ("empty", "empty: is empty, there is no text in it"),
        ("folder", "there is no UTF-8 text in the 1 files"),
    ):
        with pytest.raises(ValueError, match=message):
            load_corpus(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        load_corpus(tmp_path / "absent")
    for share in (-0.1, 0.6, math.nan):
        with pytest.raises(ValueError, match=r"share must lie in \[0, 0.5\], got"):
            load_corpus(tmp_path / "latin1", share=share)


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"txt": "a"}', "line 3: lacks 'text', it has 'txt'"),
        (b"{}", "line 3: lacks 'text', it has nothing"),
        (b'{"text": 5}', "line 3: text must be a text, got 5"),
        (b'{"text": null}', "line 3: text must be a text, got None"),
        (b'["text"]', "line 3: must be a JSON object, got list"),
        (b'{"text": "a"', "line 3: is no valid JSON"),
        (b"[" * 100_000, "line 3: "),
        (b'{"text": "\\ud800"}', "line 3: .*surrogates not allowed"),
        (b'{"text": "\xff"}', "line 3: must be UTF-8"),
    ],
)
def test_a_bad_line_of_json_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=rf"a\.jsonl: {message}"):
        prepare(path, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]


def test_json_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no text in its 1 lines"):
        load_corpus(write(tmp_path, "a.jsonl", b'\n{"text": ""}\n'))


def test_a_corpus_shorter_than_a_window_is_said_so(tmp_path: Path) -> None:
    found = load_corpus(write(tmp_path, "a", b"a"))
    assert found.train.size + found.validation.size == 1
    with pytest.raises(ValueError, match="too short: a window of 8 tokens needs 9, got"):
        training.Windows(found.train, 8, 1)


def test_unigram_loss_of_two_equal_bytes_is_one_bit() -> None:
    text = np.frombuffer(b"ab" * 50_000, np.uint8)
    loss = training.unigram_loss(Corpus(text, text, ""))
    assert math.isclose(loss, math.log(2), rel_tol=0.01)  # the other 254 bytes count one each
    words = Characters("ab")
    ids = words.array("ab" * 50_000)
    assert training.unigram_loss(Corpus(ids, ids, "", words)) == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="the validation part must not be empty"):
        training.unigram_loss(Corpus(text, text[:0], ""))


# Folders of tokens


def documents(folder: Path) -> Path:
    """Twelve documents of JSON."""
    texts = ["".join(chr(97 + (i * j) % 26) for j in range(200)) + "\n" for i in range(12)]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    return write(folder, "a.jsonl", lines.encode())


@pytest.mark.parametrize("words", [None, Characters.of, partial(train_bpe, size=300)])
def test_a_prepared_corpus_is_the_one_in_memory(words: Any, tmp_path: Path) -> None:
    if isinstance(words, partial):
        pytest.importorskip("tokenizers")
    source = documents(tmp_path)
    prepared, loaded = prepare(source, tmp_path / "out", words), load_corpus(source, words)
    for found in (prepared, open_corpus(tmp_path / "out", verify=True)):
        assert isinstance(found.train, np.memmap) and not found.train.flags.writeable
        for a, b in zip(found[:2], loaded[:2], strict=True):
            assert np.array_equal(a, b) and a.dtype == b.dtype
        assert found.description == loaded.description
        assert found.vocabulary.size == loaded.vocabulary.size
    for same in (None, loaded.vocabulary):
        assert np.array_equal(load_corpus(tmp_path / "out", same).train, loaded.train)
    with pytest.raises(ValueError, match="has its own vocabulary, another was given"):
        load_corpus(tmp_path / "out", Characters("ab"))
    batches = [training.Windows(c.train, 8, 4).batch(3).arrays[0] for c in (prepared, loaded)]
    assert np.array_equal(*batches)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(max_size=40), min_size=1, max_size=25).filter(any),
    share=st.sampled_from([0, 0.1, 0.25, 0.5]),
)
def test_preparing_is_loading(texts: list[str], share: float) -> None:
    def check(folder: Path) -> None:
        lines = "\n".join(json.dumps({"text": text}) for text in texts)
        source = write(folder, "a.jsonl", lines.encode())
        loaded = load_corpus(source, Characters.of, share=share)
        prepared = prepare(source, folder / "out", Characters.of, share=share)
        for a, b in zip(prepared[:2], loaded[:2], strict=True):
            assert np.array_equal(a, b)
        words = loaded.vocabulary
        whole = sorted(
            words.decode(loaded.train.tolist()) + words.decode(loaded.validation.tolist())
        )
        assert whole == sorted("".join(texts))

    with_files(check)


def test_tokens_take_as_few_bytes_as_they_can(tmp_path: Path) -> None:
    text = "".join(map(chr, [*range(32, 0xD800), *range(0xE000, 0x12000)]))
    for n, dtype in ((256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")):
        source = write(tmp_path, f"{n}.txt", text[:n].encode())
        found = prepare(source, tmp_path / dtype / str(n), Characters.of, share=0)
        assert found.train.dtype == dtype and found.train.tolist() == list(range(n))
        assert len(found.validation) == 0


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    source = documents(tmp_path)
    (tmp_path / "used").mkdir()
    mine = write(tmp_path, "used/mine", b"precious")
    for target in (tmp_path / "used", source):
        with pytest.raises(FileExistsError, match="is in use; name a new folder"):
            prepare(source, target)
    assert mine.read_bytes() == b"precious"
    (tmp_path / "empty").mkdir()
    assert len(prepare(source, tmp_path / "empty").train) == 10 * 201


def test_nothing_is_left_of_a_folder_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = documents(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="the vocabulary of 1 characters does not have"):
        prepare(source, tmp_path / "out", Characters("a"))

    def stopped(what: str, done: int, total: int) -> None:
        if what == "tokenising" and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "out", progress=stopped)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"^\S*out cannot be written: No space left on device$"):
        prepare(source, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def full(handle: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path, "a.txt", b"abc" * 1_000_000)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 2_900_000))
    with pytest.raises(OSError, match=r"takes about 3\.0 MB, and 2\.9 MB are free in /"):
        prepare(source, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 3_000_000))
    assert len(prepare(source, tmp_path / "new" / "out", share=0).train) == 3_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(documents(tmp_path), tmp_path / "out", Characters.of)
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["train.bin", "validation.bin"])
def test_damaged_tokens_are_found_where_they_are_read(name: str, folder: Path) -> None:
    """A wrong bit, and an id that is none, by the pass over all of them."""
    path, data = folder / name, (folder / name).read_bytes()
    seen: list[tuple[str, int, int]] = []
    training.unigram_loss(open_corpus(folder), lambda *told: seen.append(told))
    assert (f"checking {path.stem} tokens", len(data), len(data)) in seen
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorpusError, match=rf"{name}: is damaged, its SHA-256 is not that in corp"):
        training.unigram_loss(open_corpus(folder))
    path.write_bytes(data[:-1] + b"\xc8")
    with pytest.raises(CorpusError, match=rf"{name}: ids must lie in \[0, 27\), .*, got 200"):
        training.unigram_loss(open_corpus(folder))


@pytest.mark.parametrize("name", ["train.bin", "validation.bin"])
def test_damaged_tokens_are_refused(name: str, folder: Path) -> None:
    path = folder / name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CorpusError, match=rf"{name}: must have {len(data)} bytes, it has"):
        open_corpus(folder)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    open_corpus(folder)  # which does not read the tokens
    with pytest.raises(CorpusError, match=rf"{name}: is damaged, its SHA-256 is not that"):
        open_corpus(folder, verify=True)
    path.unlink()
    with pytest.raises(CorpusError, match=f"{name}: .* there is no such file"):
        open_corpus(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "is no valid JSON"),
        ({"format": "xformer-corpus-2"}, "format must be one of xformer-corpus-1"),
        ({"format": None}, "format is missing"),
        ({"dtype": "float32"}, "dtype must be one of uint8, uint16, uint32, got 'float32'"),
        ({"dtype": "uint16"}, r"train\.bin: must have 4020 bytes, it has 2010"),
        ({"train": None}, "tokens is missing"),
        ({"train": {"tokens": -1, "sha256": ""}}, "tokens must be an integer from 0"),
        ({"train": {"tokens": 2009, "sha256": ""}}, r"train\.bin: must have 2009 bytes"),
        ({"vocabulary": {"size": 26, "sha256": "0"}}, "the vocabulary must be the one of"),
        ({"more": 1}, "not supported: 'more'"),
    ],
)
def test_a_damaged_header_is_refused(
    change: dict[str, Any] | None, message: str, folder: Path
) -> None:
    path = folder / "corpus.json"
    header = json.loads(path.read_text())
    path.write_text("{" if change is None else json.dumps(header | change))
    with pytest.raises(CorpusError, match=message):
        open_corpus(folder)


def test_another_vocabulary_is_refused(folder: Path) -> None:
    words = open_corpus(folder).vocabulary
    assert isinstance(words, Characters)
    for other in (words.characters[:-1], words.characters[:-1] + "é"):
        Characters(other).save(folder)
        with pytest.raises(
            CorpusError, match=r"the vocabulary must be the one .*, of size 27, got"
        ):
            open_corpus(folder)
    (folder / "vocabulary.json").write_text("{")
    with pytest.raises(CorpusError, match=r"vocabulary\.json: is no valid JSON"):
        open_corpus(folder)


def test_a_folder_that_is_no_corpus_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no corpus: it has no corpus\.json"):
        open_corpus(tmp_path)


def test_a_huge_text_is_prepared_in_little_memory(tmp_path: Path) -> None:
    """No piece is larger than two megabytes, whatever the file."""
    source = write(tmp_path, "a.txt", b"no end of line " * 400_000)
    longest = 0

    class Watched(Characters):
        def array(self, text: str) -> np.ndarray:
            nonlocal longest
            longest = max(longest, len(text))
            return super().array(text)

    found = prepare(source, tmp_path / "out", Watched("".join(sorted(set("no end of line ")))))
    assert len(found.train) + len(found.validation) == 6_000_000 and 0 < longest <= 2 << 20


# The command


def test_prepare_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = documents(tmp_path), tmp_path / "out"
    options = ["--tokenizer", "characters", "--validation-fraction", "0.25"]
    assert cli.main(["prepare", str(source), str(out), *options]) == 0
    printed = capsys.readouterr()
    assert "1,809 tokens to train on, 603 to validate on, vocabulary size 27 (" in printed.out
    assert f"xformer train --data {out}" in printed.out and printed.err == ""
    assert cli.main(["prepare", str(source), str(out)]) == 1
    assert capsys.readouterr().err == (f"xformer: error: {out} is in use; name a new folder\n")
    assert cli.main(["prepare", str(source), str(tmp_path / "b"), "--tokenizer", str(out)]) == 0
    assert open_corpus(tmp_path / "b").vocabulary == open_corpus(out).vocabulary


def test_long_work_is_reported_in_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(progress, "PATIENCE", 2.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    with progress.progress() as report:
        for what in ("reading", "tokenising"):
            for done in range(0, 40_000_001, 1_000_000):
                report(what, done, 40_000_000)
                now += 0.5
    assert capsys.readouterr().err.splitlines() == [
        "reading: 4.0 MB of 40.0 MB, 18 s left",
        "reading: 24.0 MB of 40.0 MB, 8 s left",
        "tokenising: 4.0 MB of 40.0 MB, 18 s left",
        "tokenising: 24.0 MB of 40.0 MB, 8 s left",
    ]


def test_long_work_has_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "PATIENCE", 0)
    with progress.progress() as report:
        report("reading", 1_000_000, 4_000_000)
        report("reading", 4_000_000, 4_000_000)
        report("tokenising", 2_000_000, 4_000_000)
    shown = capsys.readouterr().err
    assert "reading:" in shown and "tokenising:" in shown and "4.00M" in shown
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    with progress.progress() as report:  # one bar for all of it
        report("reading", 0, 4_000_000)
        time.sleep(0.15)
        report("reading", 3_000_000, 4_000_000)
    assert "75%" in capsys.readouterr().err


def test_things_are_counted_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0)
    monkeypatch.setattr(progress, "EVERY", 0)
    assert list(progress.each([3, 5], "validating", "batches")) == [3, 5]
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("validating: 1 of 2 batches, ") and first.endswith(" s left")
    assert second == "validating: 2 of 2 batches, 0 s left"
