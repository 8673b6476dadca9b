"""Corpora in folders: memory-mapped token files, which may be larger than memory.

corpus.json       counts, dtype and digests of the other files, and the source of the text
train.bin         tokens, little-endian, without a header
validation.bin
vocabulary.json or tokenizer.json    the vocabulary
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from xformer.generation.characters import VOCABULARY
from xformer.pretrained.config import Config
from xformer.pretrained.reading import PretrainedError, read_json
from xformer.training.corpus import DTYPES, HEADER, Corpus, CorpusError
from xformer.training.vocabulary import TOKENIZER, load_vocabulary

FORMAT = "xformer-corpus-1"
PARTS = ("train", "validation")
MAX_TOKENS = 1 << 50


def open_corpus(folder: str | os.PathLike[str], *, verify: bool = False) -> Corpus:
    """The corpus in a folder that `prepare` wrote. Tokens are memory-mapped (`np.memmap`).

    verify: read all tokens and compare their SHA-256, as `unigram_loss` does too
    FileNotFoundError if there is no corpus. CorpusError if it is damaged or incomplete, or if the
    vocabulary in the folder is another one.
    """
    root = Path(folder)
    if not os.path.lexists(root / HEADER):
        raise FileNotFoundError(f"{root} is no corpus: it has no {HEADER}")
    try:
        header = _Header(root / HEADER)
        words = load_vocabulary(root)
    except PretrainedError as error:
        raise CorpusError(str(error)) from error
    size, sha256 = header.vocabulary
    if words.size != size or digest(vocabulary_in(root)) != sha256:
        raise CorpusError(
            f"{root}: the vocabulary must be the one of the tokens, of size {size}, "
            f"got another, of size {words.size}"
        )
    train, validation = (
        _mapped(root / f"{name}.bin", header.dtype, *header.parts[name], verify) for name in PARTS
    )
    digests = header.parts["train"][1], header.parts["validation"][1]
    return Corpus(train, validation, header.description, words, digests)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def vocabulary_in(folder: Path) -> Path:
    """The vocabulary file of a folder."""
    return next(p for p in (folder / VOCABULARY, folder / TOKENIZER) if p.exists())


class _Header:
    """The content of corpus.json. PretrainedError if it is damaged."""

    def __init__(self, path: Path) -> None:
        c = Config(read_json(path), str(path))
        c.text("format", choices=(FORMAT,))
        self.description: str = c.text("description")
        c.integer("documents", high=MAX_TOKENS)
        self.dtype = np.dtype(c.text("dtype", choices=[np.dtype(d).name for d in DTYPES]))
        words = c.sub("vocabulary") or Config({}, str(path))
        self.vocabulary = (words.integer("size", low=1), words.text("sha256"))
        self.parts: dict[str, tuple[int, str]] = {}
        for name in PARTS:
            part = c.sub(name) or Config({}, str(path))
            self.parts[name] = (part.integer("tokens", high=MAX_TOKENS), part.text("sha256"))
        c.finish()


def _mapped(path: Path, dtype: np.dtype[Any], n: int, sha256: str, verify: bool) -> np.ndarray:
    size = path.stat().st_size if path.is_file() else None
    if size != n * dtype.itemsize:
        got = "there is no such file" if size is None else f"it has {size}"
        raise CorpusError(f"{path}: must have {n * dtype.itemsize} bytes, {got}")
    if verify and digest(path) != sha256:
        raise CorpusError(f"{path}: is damaged, its SHA-256 is not that in {HEADER}")
    if n == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype.newbyteorder("<"), "r")
