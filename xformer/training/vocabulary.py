"""Vocabularies: bytes, characters, or subwords by the package `tokenizers` (extra `hf`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import numpy as np

from xformer.base.choices import did_you_mean
from xformer.dispatch.checks import whole
from xformer.generation.characters import FORMAT, VOCABULARY, Bytes, Characters
from xformer.generation.text import Codec
from xformer.pretrained.config import Config
from xformer.pretrained.reading import PretrainedError, read_json
from xformer.pretrained.tokenizer import Tokenizer, tokenizer
from xformer.pretrained.tokenizer_config import package
from xformer.pretrained.vocabularies import translated

END = "<|endoftext|>"
TOKENIZER = "tokenizer.json"
LIMIT = 16 << 20  # most bytes of a vocabulary.json


class Vocabulary(Codec, Protocol):
    """A mapping between text and token ids: `Bytes`, `Characters` or `Subwords`.

    It is a codec of `generation`, whose `encode` adds neither bos_id nor eos_id; a corpus has
    eos_id after each document. Two vocabularies are equal if they give the same ids.
    """

    @property
    def size(self) -> int:
        """The size of the vocabulary: ids are below it."""

    def array(self, text: str) -> np.ndarray:
        """The ids of `encode` as an integer array (N,)."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the vocabulary into a folder, for `load_vocabulary`."""


class Subwords:
    """The vocabulary of a `pretrained.tokenizer`. `encode` adds no special tokens."""

    def __init__(self, words: Tokenizer) -> None:
        self.tokenizer, self.size = words, words.vocab_size
        self.bos_id, self.eos_id, self.pad_id = words.bos_id, words.eos_id, words.pad_id
        self.special_ids = words.special_ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subwords) and self._rules == other._rules

    def __hash__(self) -> int:
        return hash(self._rules)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens around it."""
        return self.tokenizer.encode(text, special=False)

    def array(self, text: str) -> np.ndarray:
        """The ids of `text`, (N,) int64."""
        return np.asarray(self.encode(text), np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        return self.tokenizer.decode(ids)

    def token(self, i: int) -> str | None:
        """The spelling of id `i` in the vocabulary; None for an unknown id."""
        return self.tokenizer.token(i)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`."""
        self.tokenizer.save(folder)

    @cached_property
    def _rules(self) -> tuple[str, bool]:
        return self.tokenizer.to_json(), self.tokenizer.split_special_tokens


def train_bpe(
    texts: Iterable[str],
    size: int,
    specials: Sequence[str] = (END,),
    *,
    split_special_tokens: bool = True,
) -> Subwords:
    """Learn a byte-level BPE vocabulary from texts, like GPT-2's (arXiv:1508.07909).

    size: the most tokens; there are fewer if the texts have no more pairs
    specials: special tokens, which get the first ids. `<|endoftext|>`, or `<s>` and `</s>`, begin
        and end a text; `<pad>` is padding.
    split_special_tokens: True: the name of a special token in a text is encoded as text; False: as
        the special token

    ImportError without the package `tokenizers` (extra `hf`). ValueError if size is less than 256
    bytes plus specials, or if there is no text. TypeError for a single text.
    """
    t = package()
    if isinstance(texts, str | bytes):
        raise TypeError("train_bpe: texts must be several texts, got one")
    if (n_tokens := whole(size)) is None or n_tokens < 256 + len(specials):
        raise ValueError(
            f"train_bpe: size must be an int of at least 256 bytes and {len(specials)} specials, "
            f"got {size!r}"
        )
    if n_tokens >= 1 << 32:
        raise ValueError(f"train_bpe: size must be below 2^32, got {size!r}")
    inner = t.Tokenizer(t.models.BPE())
    inner.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = t.decoders.ByteLevel()
    trainer = t.trainers.BpeTrainer(
        vocab_size=n_tokens,
        special_tokens=list(specials),
        initial_alphabet=sorted(t.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    n_characters = 0

    def counted() -> Iterator[str]:
        nonlocal n_characters
        for text in texts:
            n_characters += len(text)
            yield text

    with translated("train_bpe"):
        inner.train_from_iterator(counted(), trainer)
    if not n_characters:
        raise ValueError("train_bpe: there is no text to learn from")
    config = Config({"split_special_tokens": split_special_tokens}, "train_bpe")
    return Subwords(Tokenizer(inner, config, "train_bpe"))


def load_vocabulary(folder: str | os.PathLike[str]) -> Vocabulary:
    """The vocabulary in a folder: vocabulary.json, else a tokenizer (`pretrained.tokenizer`).

    FileNotFoundError if there is none, PretrainedError if it is damaged.
    """
    path = Path(folder) / VOCABULARY
    if not os.path.lexists(path):
        return Subwords(tokenizer(folder))
    c = Config(read_json(path, LIMIT), str(path))
    c.text("format", choices=(FORMAT,))
    kind = c.text("kind", choices=("bytes", "characters"))
    characters = c.text("characters") if kind == "characters" else None
    c.finish()
    try:
        return Bytes() if characters is None else Characters(characters)
    except ValueError as error:
        raise PretrainedError(f"{path}: {error}") from error


def named_vocabulary(name: str) -> Vocabulary | Callable[[Iterable[str]], Vocabulary]:
    """The vocabulary of a command's option: bytes, characters, bpe:SIZE, or a folder that has one.

    characters and bpe:SIZE give functions that make a vocabulary from texts. ValueError for another
    name.
    """
    if name == "bytes":
        return Bytes()
    if name == "characters":
        return Characters.of
    kind, _, size = name.partition(":")
    if kind == "bpe" and size.isdecimal():
        return partial(train_bpe, size=int(size))
    if name and Path(name).is_dir():
        return load_vocabulary(name)
    near = did_you_mean(kind, ("bytes", "characters"))
    raise ValueError(
        f"vocabulary must be bytes, characters, bpe:SIZE or a folder, got {name!r}{near}"
    )
