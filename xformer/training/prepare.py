"""Texts to tokens: in memory, or in a folder whose files are mapped."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from xformer.files import making, require_new
from xformer.training.corpus import HEADER, Corpus, Words, dtype_of, encoded, made
from xformer.training.texts import Progress, Texts, require_share, texts
from xformer.training.token_files import (
    FORMAT,
    PARTS,
    digest,
    open_corpus,
    vocabulary_in,
)
from xformer.training.vocabulary import Vocabulary


def load_corpus(
    path: str | os.PathLike[str] | None = None,
    vocabulary: Words | None = None,
    *,
    field: str = "text",
    share: float = 0.1,
    progress: Progress | None = None,
) -> Corpus:
    """The documents of `texts` as tokens in memory; without a path, Python's own source.

    A folder made by `prepare` is opened instead: it has its own vocabulary, and is split already.

    vocabulary: bytes unless given, or a function that makes one of the texts: `Characters.of`. Of
    several documents every tenth is for validation, of a single one the last tenth (share 0.1);
    each ends with the vocabulary's eos_id, if it has one. Raises as `texts` does, and ValueError
    for text that the vocabulary does not know.
    """
    if path is not None and os.path.lexists(Path(path) / HEADER):
        corpus = open_corpus(path)
        if vocabulary not in (None, corpus.vocabulary):
            raise ValueError(f"load_corpus: {path} has its own vocabulary, another was given")
        return corpus
    require_share(share)
    found = texts(path, field=field, progress=progress)
    words = made(vocabulary, found, progress)
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for is_held_out, ids in encoded(found, words, share, progress):
        parts[is_held_out].append(ids)
    train, validation = (
        np.concatenate([np.empty(0, dtype_of(words)), *part]) for part in parts.values()
    )
    sha256 = hashlib.sha256(train.data).hexdigest(), hashlib.sha256(validation.data).hexdigest()
    return Corpus(train, validation, found.description, words, sha256)


def prepare(
    path: str | os.PathLike[str] | None,
    folder: str | os.PathLike[str],
    vocabulary: Words | None = None,
    *,
    field: str = "text",
    share: float = 0.1,
    progress: Progress | None = None,
) -> Corpus:
    """The tokens of `load_corpus` in a new folder, of texts that may be larger than memory.

    The folder appears when it is complete; after an error nothing is left of it. Raises as
    `load_corpus` does; FileExistsError where the folder is in use; OSError, before anything is
    written, where the disk has not the room that the first piece of text makes expect.
    """
    target = Path(folder)
    require_new(target)
    require_share(share)
    found = texts(path, field=field, progress=progress)
    words = made(vocabulary, found, progress)
    _require_room(target, found, words)
    with _named(target), making(target) as part:
        words.save(part)
        files = [part / f"{name}.bin" for name in PARTS]
        with files[0].open("wb") as train, files[1].open("wb") as validation:
            outs = [_Out(train), _Out(validation)]
            for is_held_out, ids in encoded(found, words, share, progress):
                outs[is_held_out].write(ids)
        header = {
            "format": FORMAT,
            "description": found.description,
            "documents": found.n_documents,
            "dtype": dtype_of(words).name,
            "vocabulary": {"size": words.size, "sha256": digest(vocabulary_in(part))},
            **{name: out.entry() for name, out in zip(PARTS, outs, strict=True)},
        }
        text = json.dumps(header, indent=2) + "\n"
        (part / HEADER).write_text(text, encoding="utf-8")
    return open_corpus(target)


@contextmanager
def _named(target: Path) -> Iterator[None]:
    """Errors of the system that name no file, as that of a full disk, name the folder."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
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


def _require_room(target: Path, found: Texts, words: Vocabulary) -> None:
    """OSError where the disk cannot hold as many tokens a byte as the first piece has."""
    piece = next(piece for piece in found.pieces() if piece)
    share = len(words.array(piece)) / len(piece.encode())
    needed = int(share * found.n_bytes * dtype_of(words).itemsize)
    above = next(p for p in (target, *target.absolute().parents) if p.exists())
    free = shutil.disk_usage(above).free
    if needed > free:
        raise OSError(
            f"prepare: {target} takes about {needed / 1e6:,.0f} MB, of which {above} has "
            f"{free / 1e6:,.0f} MB free"
        )
