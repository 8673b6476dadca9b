"""A corpus: tokens to train on and tokens to validate on, and how texts become tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from xformer.generation.characters import Bytes
from xformer.training.texts import Progress, Texts
from xformer.training.vocabulary import Vocabulary

DTYPES = ("<u1", "<u2", "<u4")  # of tokens
STEP = 1 << 22  # tokens counted at a time
HEADER = "corpus.json"

# A vocabulary, or a function that makes one from texts, such as Characters.of.
Words = Vocabulary | Callable[[Iterable[str]], Vocabulary]


class CorpusError(ValueError):
    """A folder of tokens is damaged or has another format. The message names the file."""


class Corpus(NamedTuple):
    """Tokens to train on and tokens to validate on, with their vocabulary."""

    train: np.ndarray  # (N,), of the smallest of `DTYPES` that can store the ids
    validation: np.ndarray  # (M,)
    description: str  # of the source of the text
    vocabulary: Vocabulary = Bytes()
    sha256: tuple[str, str] | None = None  # of both parts, if known


def unigram_loss(corpus: Corpus, progress: Progress | None = None) -> float:
    """The validation loss of a unigram model in nats a token, by training counts plus one.

    It reads every token once, and so checks them: CorpusError for an id outside the vocabulary, and
    for a part with another SHA-256. ValueError if the validation part is empty.
    """
    if not len(corpus.validation):
        raise ValueError("unigram_loss: the validation part must not be empty")
    counts = np.ones(corpus.vocabulary.size, np.int64)
    for ids in _checked(corpus, 0, progress):
        counts += np.bincount(ids, minlength=len(counts))
    log_probs = np.log(counts / counts.sum())
    total = sum(float(log_probs[ids].sum()) for ids in _checked(corpus, 1, progress))
    return -total / len(corpus.validation)


def make_vocabulary(
    vocabulary: Words | None, source: Texts, progress: Progress | None = None
) -> Vocabulary:
    """The given vocabulary, or one made from the texts; None: bytes."""
    if vocabulary is None:
        return Bytes()
    if not callable(vocabulary):
        given: Any = vocabulary
        if isinstance(given, str):
            named = f"training.named_vocabulary({vocabulary!r:.100})"
            raise TypeError(f"vocabulary must be a Vocabulary, got a name: {named} makes it")
        return vocabulary
    return vocabulary(_reported(source.pieces(), "learning", source.n_bytes, progress))


def encoded(
    source: Texts, words: Vocabulary, share: float, progress: Progress | None
) -> Iterator[tuple[bool, np.ndarray]]:
    """Yield the tokens piece by piece, each with whether it is held out.

    share: the fraction of documents to hold out
    """
    dtype, end, done = dtype_of(words), words.eos_id, 0
    for is_held_out, document in source.documents(share):
        for piece in _reported(document.pieces(), "tokenising", source.n_bytes, progress, done):
            yield is_held_out, words.array(piece).astype(dtype, copy=False)
            done += len(piece.encode())
        if end is not None and not document.goes_on:
            yield is_held_out, np.asarray([end], dtype)


def dtype_of(words: Vocabulary) -> np.dtype[np.unsignedinteger]:
    """The smallest dtype that can store all ids of a vocabulary."""
    return next(d for d in map(np.dtype, DTYPES) if words.size <= np.iinfo(d).max + 1)


def _checked(corpus: Corpus, i: int, progress: Progress | None) -> Iterator[np.ndarray]:
    """Yield the tokens of part i piece by piece. CorpusError for wrong ids or another SHA-256."""
    tokens, size, digest = corpus[:2][i], corpus.vocabulary.size, hashlib.sha256()
    where = getattr(tokens, "filename", None) or f"the {Corpus._fields[i]} part"
    is_file = corpus.sha256 is not None and isinstance(tokens, np.memmap)  # else made just now
    for start in range(0, len(tokens), STEP):
        ids = tokens[start : start + STEP]
        if (ids < 0).any() or (ids >= size).any():
            wrong = ids[(ids < 0) | (ids >= size)][0]
            raise CorpusError(f"{where}: ids must lie in [0, {size}), the vocabulary, got {wrong}")
        if is_file:
            digest.update(np.ascontiguousarray(ids).data)
        yield ids
        if progress is not None:
            done = min(start + STEP, len(tokens)) * tokens.itemsize
            progress(f"checking {Corpus._fields[i]} tokens", done, tokens.nbytes)
    if corpus.sha256 is not None and is_file and digest.hexdigest() != corpus.sha256[i]:
        raise CorpusError(f"{where}: is damaged, its SHA-256 is not that in {HEADER}")


def _reported(
    pieces: Iterable[str], what: str, total: int, progress: Progress | None, done: int = 0
) -> Iterator[str]:
    """Yield the pieces, and report each when the next one is requested."""
    for piece in pieces:
        yield piece
        done += len(piece.encode())
        if progress is not None:
            progress(what, done, total)
