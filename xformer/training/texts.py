"""Texts to train on, read piece by piece: a file, a folder of files, or JSON lines.

source = texts("books.jsonl")
for is_held_out, document in source.documents(share=0.1):
    for piece in document.pieces(): ...
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from xformer.pretrained.foreign import elsewhere
from xformer.training.lines import fields, holds_json, lines, require_file
from xformer.training.text_reader import beginning, boundary, decoded

Progress = Callable[[str, int, int], Any]  # (name of the work, done, total), in bytes


class Document(NamedTuple):
    """A document: a range of bytes of a file, or a text in memory."""

    where: str  # the path, or the line for messages
    text: str | None  # None: the text is in the file `where`
    start: int = 0
    end: int = 0
    goes_on: bool = False  # whether it is the first part of a longer text

    def pieces(self) -> Iterator[str]:
        """Yield the text in order: a text in memory as one piece, a file in several.

        Pieces of a file have about a megabyte, and end at line ends if there are any. ValueError
        if the file is not UTF-8, or becomes shorter.
        """
        if self.text is not None:
            yield self.text
        else:
            yield from decoded(Path(self.where), self.start, self.end)


class Texts(NamedTuple):
    """Documents whose number, size and encoding (UTF-8) are checked."""

    read: Callable[[], Iterator[Document]]
    n_documents: int
    n_bytes: int
    description: str

    def pieces(self) -> Iterator[str]:
        """Yield the text of all documents in order, each in pieces (`Document.pieces`)."""
        for document in self.read():
            yield from document.pieces()

    def documents(self, share: float = 0.1) -> Iterator[tuple[bool, Document]]:
        """Yield the documents, each with whether it is held out for validation.

        share: the fraction to hold out. 0.1 holds out every tenth document, the second one first; a
            single document is split, and its last tenth is held out.
        ValueError unless 0 <= share <= 0.5.
        """
        require_share(share)
        if share and self.n_documents == 1:
            head, tail = _split_document(next(self.read()), share)
            yield False, head
            yield True, tail
            return
        part = Fraction(share).limit_denominator(10**9)  # the float 0.1 is more than a tenth
        for i, document in enumerate(self.read()):
            # Held out if share * (number of documents before it) reaches another whole number.
            before, now = ((i - n) * part.numerator // part.denominator for n in (2, 1))
            yield now > before, document


def texts(
    path: str | os.PathLike[str] | None = None,
    *,
    field: str = "text",
    progress: Progress | None = None,
) -> Texts:
    """The documents of a UTF-8 file, of a folder of such files, or of a .jsonl file.

    It reads everything once. A byte order mark is removed.

    path: a file is one document. In a folder, every file below it is a document, in the order of
        their names; empty files and files that are not UTF-8 are left out, and counted in the
        description. Links to folders are followed, and a folder is read once. In a .jsonl or
        .jsonl.gz file (in any case) each line is a document. None: the source of Python's standard
        library.
    field: of the JSON objects of a .jsonl file
    progress: called with the name of the work, the bytes that are read and the total bytes

    FileNotFoundError if path does not exist. ValueError for an empty path, for a pipe, and if there
    is no text. ValueError with the offset of the byte if a file is not UTF-8, and with the number
    of the line if a line has no such field.
    """
    if path is None:
        name = "source code of Python's standard library"
        return _of_files(_standard_library(), name, progress)
    if not os.fspath(path):
        raise ValueError("texts: path must name a file or a folder, got an empty one")
    root = Path(path)
    if root.is_dir():
        return _of_files(sorted(_below(root)), f"text files of {root.name or root}", progress)
    if not root.exists():
        raise FileNotFoundError(f"there is no file or folder {root}{elsewhere(root, 'dataset')}")
    require_file(root, "file or folder")
    if holds_json(root):
        return _of_lines(root, field, progress)
    return _of_file(root, progress)


def require_share(share: float) -> None:
    """ValueError unless 0 <= share <= 0.5. share: the fraction to hold out for validation."""
    if not 0 <= share <= 0.5:
        raise ValueError(f"share must lie in [0, 0.5], got {share}")


def _of_file(path: Path, progress: Progress | None) -> Texts:
    document, done = _whole(path), 0
    size = document.end - document.start
    for piece in document.pieces():
        done += len(piece.encode())
        _report(progress, f"reading {path.name}", done, size)
    if not done:
        raise ValueError(f"{path}: is empty, there is no text in it")
    return Texts(lambda: iter([document]), 1, size, path.name)


def _of_files(entries: list[Path], name: str, progress: Progress | None) -> Texts:
    paths = [path for path in entries if path.is_file()]
    sizes = [path.stat().st_size for path in paths]
    documents, done = [], 0
    for path, size in zip(paths, sizes, strict=True):
        document = _whole(path)
        if document.end > document.start and _is_utf8(document):
            documents.append(document)
        done += size
        _report(progress, f"reading {len(paths)} files", done, sum(sizes))
    if not documents:
        raise ValueError(f"there is no UTF-8 text in the {len(paths)} files ({name})")
    left_out = len(paths) - len(documents)
    note = f", {left_out} empty or not UTF-8 left out" if left_out else ""
    if others := len(entries) - len(paths):
        note += f", {others} broken links or pipes left out"
    n_bytes = sum(document.end - document.start for document in documents)
    description = f"{name}: {len(documents)} files{note}"
    return Texts(lambda: iter(documents), len(documents), n_bytes, description)


def _of_lines(path: Path, field: str, progress: Progress | None) -> Texts:
    n_lines = n_documents = n_bytes = 0
    size = path.stat().st_size
    for document in _records(path, field):
        text = document.text or ""
        n_lines += 1
        n_documents += bool(text)
        n_bytes += len(text.encode())
        _report(progress, f"reading {path.name}", min(n_bytes, size), size)
    if not n_documents:
        raise ValueError(f"{path}: there is no text in its {n_lines} lines")
    note = f", {n_lines - n_documents} without text left out" if n_lines > n_documents else ""
    description = f"{field!r} of {path.name}: {n_documents} documents{note}"
    return Texts(
        lambda: (document for document in _records(path, field) if document.text),
        n_documents,
        n_bytes,
        description,
    )


def _records(path: Path, field: str) -> Iterator[Document]:
    """Yield the field of each line that is not blank as a document."""
    for where, line in lines(path):
        if not line.strip():
            continue
        try:
            text = fields(line, [field])[field]
            if not isinstance(text, str):
                raise ValueError(f"{field} must be a text, got {text!r:.60}")
            text.encode()  # UnicodeEncodeError, a ValueError, for a lone surrogate
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {error}") from error
        yield Document(where, text)


def _split_document(document: Document, share: float) -> tuple[Document, Document]:
    """The document in two parts. The second part, its end, is the fraction `share` of it.

    share: of the characters of a text in memory, of the bytes of a text in a file. No character is
        split.
    """
    if document.text is not None:
        cut = int(len(document.text) * (1 - share))
        head, tail = document.text[:cut], document.text[cut:]
        return document._replace(text=head, goes_on=True), document._replace(text=tail)
    cut = document.start + int((document.end - document.start) * (1 - share))
    if document.start < cut < document.end:
        with open(document.where, "rb") as file:
            file.seek(max(cut - 4, 0))
            around = file.read(5)
        before = min(cut, 4)
        cut += boundary(around, before) - before
    return document._replace(end=cut, goes_on=True), document._replace(start=cut)


def _whole(path: Path) -> Document:
    """The document of a whole file, without a byte order mark."""
    return Document(str(path), None, beginning(path), path.stat().st_size)


def _is_utf8(document: Document) -> bool:
    try:
        for _ in document.pieces():
            pass
    except ValueError:
        return False
    return True


def _report(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(what, done, total)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    sources = sorted(p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts))
    if not sources:
        raise FileNotFoundError(
            "this Python has no source of its standard library: give the path of a text"
        )
    return sources


def _below(root: Path) -> Iterator[Path]:
    """Yield all files below a folder that are not hidden. A folder with several links is read once.

    OSError if a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    known: set[tuple[int, int]] = set()
    roots = [str(root)]  # links come later, so that a folder inside root has its real name
    for start in roots:
        for folder, inner, names in os.walk(start, onerror=refuse):
            status = os.stat(folder)
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            if (status.st_dev, status.st_ino) in known:
                inner.clear()
                continue
            known.add((status.st_dev, status.st_ino))
            roots += (path for name in inner if os.path.islink(path := os.path.join(folder, name)))
            yield from (Path(folder, name) for name in names if not name.startswith("."))
