"""Search in a folder of texts: passages, the index, what is embedded again, the command."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import damaged, refused_at_most, some
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from sentences import BERT, write, write_model
from test_embed_modules import chain, write_dense

from xformer import pretrained
from xformer.cli import main
from xformer.cli.search import INDEX
from xformer.pretrained.files import open_tensors
from xformer.pretrained.reading import PretrainedError
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import (
    Index,
    embed,
    make_index,
    read_index,
    search,
    settings,
    similarity,
    write_index,
)
from xformer.sentences.index import Stamp, texts_in
from xformer.sentences.passages import passages

SEARCH = sys.modules["xformer.sentences.search"]  # the package has a function of this name
NOTES = {
    "a.txt": "the cat sat on the mat\n\nit was so bad that the dog ran\n",
    "b/c.md": "# the tree\n\nthe tree was very good\nand the cat ran\n\n\n## why\n",
    "d.TXT": "why",
}
LEFT_OUT = {"e.rst": "a cat", ".hidden.txt": "a cat", ".git/f.txt": "a cat", "g.txt/h.c": "a"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model"), BERT, "float32")
    prompts = {"query": "why ", "passage": "the "}
    write(folder, config_sentence_transformers={"prompts": prompts})
    return folder


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    for name, text in (NOTES | LEFT_OUT).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passages that are embedded."""
    texts: list[str] = []

    def listening(*args: Any, **options: Any) -> np.ndarray:
        texts.extend(args[3])
        return embed(*args, **options)

    monkeypatch.setattr(SEARCH, "embed", listening)
    return texts


def indexed(model_folder: Path, folder: Path, old: Index | None = None, **changes: Any) -> Index:
    own = (*pretrained.load(model_folder), tokenizer(model_folder))
    options = settings(model_folder)._asdict() | changes
    return make_index(*own, folder, model_folder=model_folder, options=options, old=old)


# Passages


def cut(text: str, most: int = 1000) -> list[tuple[int, str]]:
    found = passages(text, lambda part: len(part) <= most)
    return [(line, text[start:end]) for line, start, end in found]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        (" \n\n\t\n", []),
        ("a", [(1, "a")]),
        ("\n\n a b \n c\n\n\nd\n", [(3, "a b \n c"), (7, "d")]),
        ("a\r\nb\r\n\r\nc\r\n", [(1, "a\r\nb"), (4, "c")]),
        ("a\n \t\nb", [(1, "a"), (3, "b")]),
        ("# A\n\nb\n\n## C\n\n### D\n\ne\nf", [(1, "# A\n\nb"), (5, "## C\n\n### D\n\ne\nf")]),
        ("a\n\n# B\n\n", [(1, "a"), (3, "# B")]),
        ("#a\n\nb", [(1, "#a"), (3, "b")]),
    ],
)
def test_paragraphs(text: str, wanted: list[tuple[int, str]]) -> None:
    assert cut(text) == wanted


def test_long_paragraphs_are_halved() -> None:
    assert cut("One two. Three  four five.", 20) == [(1, "One two."), (1, "Three  four five.")]
    assert cut("one two\nthree\nfour", 13) == [(1, "one two"), (2, "three\nfour")]
    assert cut("one   two", 7) == [(1, "one"), (1, "two")]
    assert cut("abcdefg", 2) == [(1, "a"), (1, "bc"), (1, "de"), (1, "fg")]
    assert cut("abc", 0) == [(1, "a"), (1, "b"), (1, "c")]  # characters are not cut


@some
@given(text=st.text("ab #.\n\r\t", max_size=60), most=st.integers(1, 9))
def test_every_word_is_in_a_passage(text: str, most: int) -> None:
    found = cut(text, most)
    assert "".join("".join(part.split()) for _, part in found) == "".join(text.split())
    assert all(part.strip() == part and 0 < len(part) <= most for _, part in found)
    starts = [start for _, start, _ in passages(text, lambda part: len(part) <= most)]
    lines = [text.count("\n", 0, start) + 1 for start in starts]
    assert lines == [line for line, _ in found]


# The index


def test_which_files_are_texts(notes: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("a cat")
    (notes / "link.txt").symlink_to(tmp_path / "outside.txt")
    (notes / "folder").symlink_to(tmp_path)
    assert texts_in(notes) == sorted(NOTES)
    with pytest.raises(
        NotADirectoryError, match=r"there is no folder .*/notse; did you mean .*/no"
    ):
        texts_in(tmp_path / "notse")
    with pytest.raises(NotADirectoryError, match=r"a\.txt is a file, not a folder"):
        texts_in(notes / "a.txt")


def test_hits_are_the_most_similar_passages(model_folder: Path, notes: Path) -> None:
    index = indexed(model_folder, notes)
    own = (*pretrained.load(model_folder), tokenizer(model_folder))
    parts = [(1, "the cat sat on the mat"), (3, "it was so bad that the dog ran")]
    parts += [(1, "# the tree\n\nthe tree was very good\nand the cat ran"), (7, "## why")]
    places = [("a.txt", *parts[0]), ("a.txt", *parts[1])]
    places += [("b/c.md", *parts[2]), ("b/c.md", *parts[3]), ("d.TXT", 1, "why")]
    vectors = embed(*own, [text for _, _, text in places])
    np.testing.assert_allclose(index.vectors, vectors, atol=1e-6)
    queries = embed(*own, ["a good tree", "not a cat"])
    for scores, hits in zip(
        similarity(queries, vectors), search(index, notes, queries, top=4), strict=True
    ):
        order = np.argsort(-scores)[:4]
        assert [hit[1:] for hit in hits] == [places[i] for i in order]
        np.testing.assert_allclose([hit.score for hit in hits], scores[order], atol=1e-6)
    assert len(search(index, notes, queries, top=99)[0]) == 5
    with pytest.raises(ValueError, match="search: top must be an int of at least 1, got 0"):
        search(index, notes, queries, top=0)


def test_only_what_changed_is_embedded(
    model_folder: Path, notes: Path, tmp_path: Path, embedded: list[str]
) -> None:
    (notes / "z.txt").write_text("a cat")
    index = indexed(model_folder, notes)
    assert len(embedded) == 6
    path = tmp_path / "index"
    write_index(index, path)
    old = read_index(path)
    for name in ("files", "model", "options"):
        assert getattr(old, name) == getattr(index, name)
    assert np.array_equal(old.vectors, index.vectors)
    assert np.array_equal(old.passages, index.passages)
    embedded.clear()

    os.utime(notes / "a.txt", ns=(5, 5))  # another time, the same text
    (notes / "b" / "c.md").write_text("a dog\n\nthe tree was very good")
    (notes / "d.TXT").write_text("bad")  # another text of the same size
    os.utime(notes / "d.TXT", ns=(6, 6))
    (notes / "z.txt").unlink()
    (notes / "0.txt").write_text("so why")
    new = indexed(model_folder, notes, old)
    assert sorted(embedded) == ["a dog", "bad", "so why", "the tree was very good"]
    whole = indexed(model_folder, notes)
    assert new.files == whole.files and list(new.files) == list(whole.files)
    assert np.array_equal(new.passages, whole.passages)
    np.testing.assert_allclose(new.vectors, whole.vectors, atol=1e-6)
    embedded.clear()
    assert np.array_equal(indexed(model_folder, notes, new).vectors, new.vectors)
    assert embedded == []


def test_interrupted_work_is_resumed(
    model_folder: Path, notes: Path, embedded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SEARCH, "PART", 2)
    own = (*pretrained.load(model_folder), tokenizer(model_folder))
    options: Any = {"model_folder": model_folder, "options": settings(model_folder)._asdict()}
    parts: list[Index] = []
    whole = make_index(*own, notes, **options, save=parts.append)
    assert [list(part.files) for part in parts] == [["a.txt"], ["a.txt", "b/c.md"], [*whole.files]]
    assert parts[1].passages[:, 0].tolist() == [0, 0, 1, 1]
    assert len(embedded) == 5
    for part in parts:
        embedded.clear()
        resumed = make_index(*own, notes, **options, old=part)
        assert len(embedded) == 5 - len(part.vectors)
        assert list(resumed.files) == list(whole.files)
        assert np.array_equal(resumed.passages, whole.passages)
        np.testing.assert_allclose(resumed.vectors, whole.vectors, atol=1e-6)


def test_passages_fit_the_model(model_folder: Path, notes: Path, embedded: list[str]) -> None:
    (notes / "long.txt").write_text("the cat sat. " * 50)
    prompt = "so very good "
    indexed(model_folder, notes, prompt=prompt, max_len=12)  # a warning would be an error
    own = tokenizer(model_folder)
    assert 6 < max(len(own.encode(prompt + text)) for text in embedded) <= 12


def test_another_model_or_option_is_named(model_folder: Path, notes: Path, tmp_path: Path) -> None:
    index = indexed(model_folder, notes)
    other = write_model(tmp_path, BERT | {"hidden_size": 24}, "float32")
    with pytest.raises(ValueError, match=r"search: the index was made with another model; .*--reb"):
        indexed(other, notes, index)
    with pytest.raises(ValueError, match="made with another max_len and prompt; "):
        indexed(model_folder, notes, index, max_len=10, prompt="a ")
    own = (*pretrained.load(model_folder), tokenizer(other))
    options = settings(model_folder)._asdict()
    with pytest.raises(ValueError, match="made with another model"):
        make_index(*own, notes, model_folder=model_folder, options=options, old=index)
    with pytest.raises(NotADirectoryError, match="the model must be a folder"):
        make_index(*own, notes, model_folder=other / "config.json", options=options)


def test_what_is_not_utf8_is_left_out(model_folder: Path, notes: Path) -> None:
    (notes / "bad.txt").write_bytes(b"\xff")
    (notes / "bad.md").write_bytes(b"a \xe4")
    with pytest.warns(UserWarning, match=r"^search: not UTF-8, left out: bad\.md and 1 more$"):
        index = indexed(model_folder, notes)
    assert len(index.vectors) == 5
    for name in NOTES:
        (notes / name).write_text(" \n")
    with pytest.raises(ValueError, match=r"search: .*notes has no text in files named \*\.txt or"):
        indexed(model_folder, notes, index)


def test_what_may_not_be_read_is_left_out(
    model_folder: Path, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files and folders; root may read all, so the system's answers are stand-ins."""
    index = indexed(model_folder, notes)
    scandir, closed = os.scandir, {notes / "a.txt", notes / "b", tmp_path / "index"}

    def open_folder(path: str) -> Any:
        if Path(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "access", lambda path, _: Path(path) not in closed)
    monkeypatch.setattr(os, "scandir", open_folder)
    with pytest.warns(UserWarning, match=r"^search: may not be read, left out: a\.txt and 1 more$"):
        assert list(indexed(model_folder, notes, index).files) == ["d.TXT"]
    write_index(index, tmp_path / "index")
    with pytest.raises(PermissionError, match="denied"):  # safetensors would not find the file
        read_index(tmp_path / "index")
    closed.add(notes)
    with pytest.raises(PermissionError, match="denied"):
        texts_in(notes)


def test_an_interrupted_write_leaves_the_old_index(
    model_folder: Path, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, path = indexed(model_folder, notes), tmp_path / "index"
    write_index(index, path)
    before = path.read_bytes()

    def full(_: Any, part: Path, **__: Any) -> None:
        part.write_bytes(b"half")
        raise SafetensorError("no space left")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(OSError, match="index cannot be written: no space left"):
        write_index(index, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def made(**changes: Any) -> Index:
    """An index of two passages of one file."""
    passages = np.asarray([[0, 1, 0, 3], [0, 2, 4, 9]], np.int64)
    index = Index(np.ones((2, 3), np.float32), passages, {"a.txt": (1, 2, "0")}, {}, {})
    return index._replace(**changes)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (made(vectors=np.full((2, 3), np.nan, np.float32)), "vectors must be finite float32"),
        (made(vectors=np.ones((2, 3))), "vectors must be finite float32"),
        (made(vectors=np.ones(2, np.float32)), "vectors must be finite float32"),
        (made(vectors=np.ones((3, 3), np.float32)), r"passages must be int64 of shape \(3, 4\)"),
        (made(passages=np.ones((2, 4))), "passages must be int64"),
        (made(passages=np.asarray([[0, 1, 0, 3], [1, 2, 4, 9]])), "no such file or line"),
        (made(passages=np.asarray([[0, 0, 0, 3], [0, 2, 4, 9]])), "no such file or line"),
        (made(passages=np.asarray([[0, 1, 3, 3], [0, 2, 4, 9]])), "has no characters"),
        (
            made(
                passages=np.asarray([[1, 1, 0, 3], [0, 2, 4, 9]]),
                files={"a": (1, 2, "0"), "b": (1, 2, "0")},
            ),
            "passages must be in the order of their files",
        ),
        (made(files={"a.txt": (1, -2, "0")}), "a.txt must be a time, a size and a digest"),
        (made(files={"a.txt": (1, "0")}), "a.txt must be a time, a size and a digest"),
        (made(model={"a.txt": (0.5, 1, "0")}), "a.txt must be a time, a size and a digest"),
    ],
    ids=range(12),
)
def test_a_damaged_index_is_refused(
    index: Index, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the reader, and before it is written."""
    path = tmp_path / "index"
    write_index(made(), path)
    assert np.array_equal(read_index(path).passages, made().passages)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        write_index(index, path)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]
    with monkeypatch.context() as patch:
        patch.setattr("xformer.sentences.index._described", lambda *_: made())
        write_index(index, path)
    with pytest.raises(PretrainedError, match=message):
        read_index(path)


def require_read(index: Index, path: Path) -> None:
    """What is written is read back."""
    write_index(index, path)
    back = read_index(path)
    assert back.files == index.files and list(back.files) == list(index.files)
    assert back.model == index.model and back.options == index.options
    for name in ("vectors", "passages"):
        got, want = getattr(back, name), getattr(index, name)
        assert got.dtype == want.dtype.newbyteorder("=") and np.array_equal(got, want)


@some
@given(data=st.data())
def test_what_is_written_can_be_read(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Times before 1970 and after 2116, names of any bytes, any options, any layout of memory."""
    stamp = st.builds(Stamp, st.integers(-(1 << 70), 1 << 70), st.integers(0, 1 << 80), st.text())
    names = st.text(st.characters(codec=None), max_size=300)
    value = st.text() | st.booleans() | st.integers(-9, 9) | st.lists(st.text(), max_size=2)
    layout: Any = data.draw(st.sampled_from([np.asarray, np.asfortranarray, lambda x: x[::-1]]))
    vectors = np.asarray([[0.5, -2.0, 3.0], [1e-40, 7.0, 3e38]], np.float32)
    vectors = layout(vectors).astype(data.draw(st.sampled_from(["<f4", ">f4"])))
    index = made(
        vectors=vectors,
        passages=np.asfortranarray(made().passages),
        files=data.draw(st.dictionaries(names, stamp, min_size=1, max_size=3)),
        model=data.draw(st.dictionaries(names, stamp, max_size=3)),
        options=data.draw(st.dictionaries(st.text(), value, max_size=3)),
    )
    require_read(index, tmp_path_factory.mktemp("written") / "index")


@pytest.mark.parametrize("year", [1901, 1969, 2117, 2400])
def test_texts_and_models_of_any_time(
    year: int, model_folder: Path, notes: Path, tmp_path: Path, embedded: list[str]
) -> None:
    time = round((year - 1970) * 31_556_952) * 10**9 + 123_456_789
    os.utime(notes / "a.txt", ns=(time, time))
    own = tmp_path / "model"
    shutil.copytree(model_folder, own)
    os.utime(own / "config.json", ns=(time, time))
    index = indexed(own, notes)
    stored = (notes / "a.txt").stat().st_mtime_ns
    assert index.files["a.txt"].mtime == stored and (stored < 0) == (year < 1970)
    require_read(index, tmp_path / "index")
    embedded.clear()
    indexed(own, notes, read_index(tmp_path / "index"))
    assert embedded == []


def test_names_of_any_bytes(said: Any, notes: Path) -> None:
    path = notes / os.fsdecode(b"no\xff.txt")
    try:
        path.write_text("a very good dog")
    except OSError:
        pytest.skip("the file system has names of Unicode only")
    for _ in range(2):
        status, out, err = said("a good dog", "-k", "9", "--json")
        rows = [json.loads(line) for line in out.splitlines()]
        assert (status, err) == (0, "") and [row["file"] for row in rows].count(str(path)) == 1


def test_only_the_files_of_a_model_count(
    model_folder: Path, notes: Path, tmp_path: Path, embedded: list[str]
) -> None:
    own = tmp_path / "model"
    shutil.copytree(model_folder, own)
    write_dense(own / "2_Dense", (12, 12), "torch.nn.Tanh")
    write(own, modules=chain("Transformer", "Pooling", "Dense"), **{"1_Pooling__config": {}})
    (own / "model.spm.model").write_bytes(b"0")
    index = indexed(own, notes)
    assert set(index.model) == {
        *("config.json", "model.safetensors", "tokenizer.json", "model.spm.model"),
        *("modules.json", "config_sentence_transformers.json"),
        *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    }
    for name in ("notes/today.txt", "todo.txt", "other.safetensors", "logs/run.json", "x.json"):
        (own / name).parent.mkdir(exist_ok=True)
        (own / name).write_text("{}")
    write(own, generation_config={"max_length": 3})
    embedded.clear()
    assert indexed(own, notes, index).model == index.model and embedded == []
    for name in index.model:
        before = (own / name).read_bytes()
        data = before.replace(b"}", b" }", 1) if name.endswith(".json") else before + b" "
        if name.endswith(".safetensors"):
            data = before[:-1] + bytes([before[-1] ^ 1])
        (own / name).write_bytes(data)
        with pytest.raises(ValueError, match="the index was made with another model"):
            indexed(own, notes, index)
        (own / name).write_bytes(before)


def test_shards_of_a_model_count(model_folder: Path, notes: Path, tmp_path: Path) -> None:
    own = tmp_path / "model"
    shutil.copytree(model_folder, own)
    (own / "model.safetensors").rename(own / "part.safetensors")
    names = list(open_tensors(model_folder))
    (own / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "part.safetensors")})
    )
    files = {"part.safetensors", "model.safetensors.index.json"}
    assert indexed(own, notes).model.keys() >= files


def test_of_another_tokenizer_only_its_files_count(
    model_folder: Path, notes: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    options: Any = {"model_folder": model_folder, "options": settings(model_folder)._asdict()}
    for where in (other, other / "tokenizer.json"):
        own = (*pretrained.load(model_folder), tokenizer(where))
        index = make_index(*own, notes, **options)
        beside = [name for name in index.model if name.startswith("tokenizer/")]
        assert beside == ["tokenizer/tokenizer.json"]


def test_another_file_is_refused(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PretrainedError, match=r"is no index of xformer search; .*--rebuild"):
        read_index(model_folder / "model.safetensors")
    with pytest.raises(PretrainedError, match=r"is damaged, or no index: .*--rebuild"):
        read_index(model_folder / "config.json")
    with pytest.raises(PretrainedError, match="is damaged, or no index"):
        read_index(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_index(tmp_path / "absent")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_a_pipe_is_no_place_for_an_index(said: Any, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    status, out, err = said("a tree", "--index", str(pipe))
    assert (status, out) == (1, "") and "is damaged, or no index: not a file" in err
    status, out, err = said("a tree", "--index", str(pipe), "--rebuild")
    assert status == 0 and out and err.startswith(UNSTORED) and "is a device or a pipe" in err
    assert pipe.is_fifo()


@some
@given(data=st.data())
def test_damaged_bytes_are_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "index"
    write_index(made(), path)
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    with refused_at_most():
        read_index(path)


# The command


@pytest.fixture
def said(model_folder: Path, notes: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: str) -> tuple[int, str, str]:
        status = main(["search", str(notes), *argv, "--model", str(model_folder)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_the_command(said: Any, model_folder: Path, notes: Path, embedded: list[str]) -> None:
    status, out, err = said("the good tree", "-k", "2")
    assert (status, err) == (0, "") and len(embedded) == 5
    assert sorted(p.name for p in notes.iterdir() if p.is_file()) == sorted(
        [INDEX, "a.txt", "d.TXT", "e.rst", ".hidden.txt"]
    )
    own = (*pretrained.load(model_folder), tokenizer(model_folder))
    index = read_index(notes / INDEX)
    assert index.options["prompt"] == "the "  # of the model, for passages
    (hits,) = search(index, notes, embed(*own, ["the good tree"], prompt="why "), top=2)
    lines = [
        f"{hit.score:.4f}  {notes / hit.file}:{hit.line}\n"
        + "".join(f"        {line}".rstrip() + "\n" for line in hit.text.split("\n"))
        for hit in hits
    ]
    assert out == "".join(lines)
    status, again, _ = said("the good tree", "-k", "2")
    assert (status, again) == (0, out) and len(embedded) == 5
    status, out, _ = said("the good tree", "a dog", "--json", "--top", "1")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["query"] for row in rows] == ["the good tree", "a dog"]
    want = {
        "score": pytest.approx(hits[0].score, abs=1e-6),
        "file": str(notes / hits[0].file),
        "line": hits[0].line,
    }
    assert rows[0] == {"query": "the good tree", **want, "text": hits[0].text}
    _, out, _ = said("the good tree", "a dog", "-k", "1")
    assert out.startswith("the good tree\n0.") and "\na dog\n0." in out


@pytest.mark.parametrize(
    ("error", "seconds", "status"), [(KeyboardInterrupt, 60.0, 130), (RuntimeError, 0.0, 1)]
)
def test_an_interrupted_command_goes_on(
    error: type[BaseException],
    seconds: float,
    status: int,
    said: Any,
    notes: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SEARCH, "PART", 2)
    monkeypatch.setattr("xformer.cli.search.SAVE_EVERY", seconds)
    calls: list[list[str]] = []

    def stopped(*args: Any, **options: Any) -> np.ndarray:
        if args[3]:
            calls.append(args[3])
        if len(calls) == 2:
            calls.append([])
            raise error
        return embed(*args, **options)

    monkeypatch.setattr(SEARCH, "embed", stopped)
    assert said("a tree")[0] == status
    assert list(read_index(notes / INDEX).files) == ["a.txt"]
    status, out, err = said("a tree")
    assert (status, err) == (0, "") and out
    assert [len(texts) for texts in calls] == [2, 2, 0, 2, 1]  # not the first file again
    assert len(read_index(notes / INDEX).vectors) == 5


UNSTORED = "xformer: warning: the index is not stored: "


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("pathlib.Path.touch", errno.EROFS),
        ("pathlib.Path.touch", errno.EACCES),
        ("safetensors.numpy.save_file", None),  # its error for a full disk
        ("os.fsync", errno.ENOSPC),
        ("os.replace", errno.EDQUOT),
    ],
)
def test_an_index_that_cannot_be_stored_is_a_warning(
    where: str, number: int | None, said: Any, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = said("a tree", "--index", str(notes.parent / "own"))
    assert want[0] == 0 and want[1].count("\n        ") >= 5

    def fails(*_: Any, **__: Any) -> None:
        if number is None:
            raise SafetensorError("No space left on device")
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(where, fails)
        status, out, err = said("a tree")
    assert (status, out) == want[:2]
    assert err.startswith(UNSTORED) and err.count("\n") == 1
    assert ("no space left" if number is None else os.strerror(number).lower()) in err.lower()
    assert [p.name for p in notes.iterdir() if "xformer" in p.name] == []


def test_in_a_folder_that_is_read_only(said: Any, notes: Path) -> None:
    notes.chmod(0o555)
    try:
        if os.access(notes, os.W_OK):
            pytest.skip("root may write to a folder that is read-only")
        status, out, err = said("a tree")
    finally:
        notes.chmod(0o755)
    assert status == 0 and out and err.startswith(UNSTORED) and "permission denied" in err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows limits no file sizes")
def test_where_files_cannot_grow(model_folder: Path, notes: Path) -> None:
    """A process whose files may have 100 bytes, as a full disk or a quota has it."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    code = f"import sys; from xformer.cli import main; {limit}; sys.exit(main())"
    command = ["search", str(notes), "a tree", "--model", str(model_folder)]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("0.")
    assert done.stderr.startswith(UNSTORED) and done.stderr.count("\n") == 1
    assert [p.name for p in notes.iterdir() if "xformer" in p.name] == []


@pytest.mark.parametrize("stop", [False, True])
def test_an_index_that_cannot_be_stored_in_between(
    stop: bool, said: Any, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning, at the end or at Ctrl-C."""
    monkeypatch.setattr(SEARCH, "PART", 2)
    monkeypatch.setattr("xformer.cli.search.SAVE_EVERY", 0.0)
    tried: list[Path] = []

    def fails(path: Path) -> None:
        tried.append(path)
        if stop and len(tried) == 2:
            monkeypatch.setattr(SEARCH, "embed", stopped)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.touch", fails)
    status, out, err = said("a tree")
    assert err.count(UNSTORED) == 1 and err.count("\n") == 1 + stop
    assert (status, bool(out), len(tried)) == ((130, False, 3) if stop else (0, True, 4))


def test_a_prompt_leaves_room_for_a_passage(
    said: Any, model_folder: Path, notes: Path, embedded: list[str]
) -> None:
    """A model's prompts, for passages and for queries, and an option; before anything is read."""
    long = "the cat sat on the mat and " * 4
    before = (model_folder / "config_sentence_transformers.json").read_text()
    try:
        for which in ("query", "passage"):
            write(model_folder, config_sentence_transformers={"prompts": {which: long}})
            status, out, err = said("a tree")
            assert (status, out) == (1, "") and embedded == []
            assert "embed: the prompt leaves no room for a text: it has 30 tokens, special" in err
            assert "and a text at most 24, got 'the cat sat" in err and err.count("\n") == 1
    finally:
        (model_folder / "config_sentence_transformers.json").write_text(before)
    with pytest.raises(ValueError, match=r"no room for a text: it has 4 tokens, .* at most 4, got"):
        indexed(model_folder, notes, prompt="so very ", max_len=4)
    index = indexed(model_folder, notes, prompt="so very ", max_len=5)  # a word a passage
    assert len(index.vectors) == sum(len(text.split()) for text in embedded)


def test_mistakes_are_one_line(said: Any, notes: Path, tmp_path: Path) -> None:
    assert said("a dog")[0] == 0
    for options, message in [
        ([], "there are no texts"),
        (["a", "--top", "0"], "--top must be at least 1, got 0"),
        (["a", "--truncate-dim", "4"], "the index was made with another truncate_dim; to make a"),
        (["a", "--passage-prompt", "query"], "the index was made with another prompt"),
        (["a", "--query-prompt", "x"], "prompt_name must be one of query, passage, got 'x'"),
        (["a", "--index", str(notes / "a.txt")], "a.txt: is damaged, or no index"),
        (["a", "--index", str(notes / "no" / "i")], f"there is no folder {notes / 'no'}"),
        (["a", "--rebuild", "--max-len", "2"], "--max-len must exceed the 2 special tokens, got 2"),
    ]:
        status, out, err = said(*options)
        assert (status, out) == (1, ""), options
        assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1
    status, _, err = said("a", "--truncate-dim", "4", "--rebuild")
    assert (status, err) == (0, "") and read_index(notes / INDEX).vectors.shape == (5, 4)
    index = tmp_path / "own"
    index.write_bytes(b"damaged")
    assert said("a", "--index", str(index))[0] == 1
    assert said("a", "--index", str(index), "--rebuild")[0] == 0
    assert said("a", "--index", str(index), "--query-prompt", "passage")[0] == 0


# The page
