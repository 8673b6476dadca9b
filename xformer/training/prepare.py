"""Tokenise texts: into memory, or into a folder whose files are memory-mapped."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from xformer.base.files import making, require_new
from xformer.base.printing import size
from xformer.training.corpus import HEADER, Corpus, Words, dtype_of, encoded, make_vocabulary
from xformer.training.texts import Progress, Texts, require_share, texts
from xformer.training.token_files import FORMAT, PARTS, digest, open_corpus, vocabulary_in
from xformer.training.vocabulary import Vocabulary


def load_corpus(
    path: str | os.PathLike[str] | None = None,
    vocabulary: Words | None = None,
    *,
    field: str = "text",
    share: float = 0.1,
    progress: Progress | None = None,
) -> Corpus:
    """The documents of `texts(path)` as tokens in memory.

    Each document ends with the vocabulary's eos_id, if there is one. If `path` is a folder written
    by `prepare`, that corpus is opened instead, with its vocabulary and its parts.

    path: None: the source of Python's standard library
    vocabulary: or a function that makes one from texts, such as `Characters.of`; None: bytes
    field: of the JSON objects of a .jsonl file
    share: the fraction to validate on: 0.1 is every tenth document, or the last tenth of a single
        one

    FileNotFoundError and ValueError for missing or bad text (`texts`), and ValueError for text that
    the vocabulary cannot encode.
    """
    if path is not None and os.path.lexists(Path(path) / HEADER):
        corpus = open_corpus(path)
        if vocabulary not in (None, corpus.vocabulary):
            raise ValueError(f"load_corpus: {path} has its own vocabulary, another was given")
        return corpus
    require_share(share)
    source = texts(path, field=field, progress=progress)
    words = make_vocabulary(vocabulary, source, progress)
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for is_held_out, ids in encoded(source, words, share, progress):
        parts[is_held_out].append(ids)
    train, validation = (
        np.concatenate([np.empty(0, dtype_of(words)), *part]) for part in parts.values()
    )
    sha256 = hashlib.sha256(train.data).hexdigest(), hashlib.sha256(validation.data).hexdigest()
    return Corpus(train, validation, source.description, words, sha256)


def prepare(
    path: str | os.PathLike[str] | None,
    folder: str | os.PathLike[str],
    vocabulary: Words | None = None,
    *,
    field: str = "text",
    share: float = 0.1,
    progress: Progress | None = None,
) -> Corpus:
    """Write the tokens of `load_corpus` into a new folder. The text may be larger than memory.

    The folder appears when it is complete. After an error nothing is left. The arguments are those
    of `load_corpus`.

    FileExistsError if the folder is in use. OSError, before anything is written, if the disk has
    too little room, estimated from the first piece of text. FileNotFoundError and ValueError for
    missing or bad text (`texts`), and ValueError for text that the vocabulary cannot encode.
    """
    target = Path(folder)
    require_new(target)
    require_share(share)
    source = texts(path, field=field, progress=progress)
    words = make_vocabulary(vocabulary, source, progress)
    _require_room(target, source, words)
    with _named(target), making(target) as part:
        words.save(part)
        files = [part / f"{name}.bin" for name in PARTS]
        with files[0].open("wb") as train, files[1].open("wb") as validation:
            outs = [_Out(train), _Out(validation)]
            for is_held_out, ids in encoded(source, words, share, progress):
                outs[is_held_out].write(ids)
        header = {
            "format": FORMAT,
            "description": source.description,
            "documents": source.n_documents,
            "dtype": dtype_of(words).name,
            "vocabulary": {"size": words.size, "sha256": digest(vocabulary_in(part))},
            **{name: out.entry() for name, out in zip(PARTS, outs, strict=True)},
        }
        text = json.dumps(header, indent=2) + "\n"
        (part / HEADER).write_text(text, encoding="utf-8")
    return open_corpus(target)


@contextmanager
def _named(target: Path) -> Iterator[None]:
    """A context in which errors of a full disk name the target, not the removed temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename is not None and error.errno != errno.ENOSPC):
            raise
        raise OSError(f"{target} cannot be written: {error.strerror}") from error


class _Out:
    """A token file that is being written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.n, self.digest = file, 0, hashlib.sha256()

    def write(self, ids: np.ndarray) -> None:
        data = ids.tobytes()
        self.file.write(data)
        self.digest.update(data)
        self.n += len(ids)

    def entry(self) -> dict[str, Any]:
        return {"tokens": self.n, "sha256": self.digest.hexdigest()}


def _require_room(target: Path, source: Texts, words: Vocabulary) -> None:
    """OSError if the disk has no room for all tokens, estimated from the first piece of text."""
    piece = next(piece for piece in source.pieces() if piece)
    share = len(words.array(piece)) / len(piece.encode())
    needed = int(share * source.n_bytes * dtype_of(words).itemsize)
    above = next(p for p in (target, *target.absolute().parents) if p.exists())
    free = shutil.disk_usage(above).free
    if needed > free:
        raise OSError(
            f"prepare: {target} takes about {size(needed)}, and {size(free)} are free in {above}"
        )
