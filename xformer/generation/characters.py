"""Vocabularies that need no files: the bytes of a text, or its characters."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from xformer.base.files import replacing
from xformer.dispatch.checks import require_text

VOCABULARY, FORMAT = "vocabulary.json", "xformer-vocabulary-1"
SHOWN = 10  # most unknown characters in an error message


@dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes as token ids. Every valid text can be encoded; all models have the same ids."""

    size = 256  # of the vocabulary
    bos_id = eos_id = None  # no byte begins or ends a text

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`, ids 0 to 255. UnicodeEncodeError for a lone surrogate."""
        require_text("Bytes", text)
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes `ids`, with U+FFFD for bytes that are not UTF-8."""
        return bytes(ids).decode(errors="replace")

    def array(self, text: str) -> np.ndarray:
        """The UTF-8 bytes of `text`, (N,) uint8. UnicodeEncodeError for a lone surrogate."""
        return np.frombuffer(text.encode(), np.uint8)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `vocabulary.json`; an interrupted write leaves the old one."""
        _write(Path(folder), {"kind": "bytes"})


@dataclass(frozen=True)
class Characters:
    """Characters as token ids, in the order of their Unicode code points.

    ValueError unless `characters` has at least one character, each once, in this order.
    """

    characters: str
    bos_id = eos_id = None  # no character begins or ends a text

    def __post_init__(self) -> None:
        if not self.characters or self.characters != "".join(sorted(set(self.characters))):
            raise ValueError(
                f"Characters: must be sorted, each once, at least one, got {self.characters!r:.60}"
            )

    @classmethod
    def of(cls, texts: Iterable[str]) -> Characters:
        """The characters of `texts`. ValueError if there are none."""
        characters: set[str] = set()
        for text in texts:
            characters |= set(text)
        if not characters:
            raise ValueError("Characters: there is no text, and so no character")
        return cls("".join(sorted(characters)))

    @property
    def size(self) -> int:
        """The size of the vocabulary."""
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. ValueError, with their list, for unknown characters."""
        require_text("Characters", text)
        ids: list[int] = self.array(text).tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. ValueError for ids outside the vocabulary."""
        if any(not 0 <= i < self.size for i in ids):
            raise ValueError(
                f"decode: ids must lie in [0, {self.size}), got {min(ids)} to {max(ids)}"
            )
        return "".join(self.characters[i] for i in ids)

    def array(self, text: str) -> np.ndarray:
        """The ids of `text`, (N,) int64. ValueError, with their list, for unknown characters."""
        points = _points(text)
        ids = np.searchsorted(self._known, points)
        wrong = self._known[np.minimum(ids, self.size - 1)] != points
        if wrong.any():
            unknown = sorted(set(map(chr, points[wrong].tolist())))
            more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
            raise ValueError(
                f"encode: the vocabulary of {self.size} characters does not have "
                f"{', '.join(map(repr, unknown[:SHOWN]))}{more}"
            )
        return ids

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `vocabulary.json`; an interrupted write leaves the old one."""
        _write(Path(folder), {"kind": "characters", "characters": self.characters})

    @cached_property
    def _known(self) -> np.ndarray:
        return _points(self.characters)


def _points(text: str) -> np.ndarray:
    """The Unicode code points of the characters of `text`, (N,) int64."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.int64)


def _write(folder: Path, data: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / VOCABULARY) as (part,):
        text = json.dumps({"format": FORMAT} | data, indent=2) + "\n"
        part.write_text(text, encoding="utf-8")
