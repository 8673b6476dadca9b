"""Text to train on: files read as bytes, split into training and validation parts."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

VALIDATION_SHARE = 10  # one file in ten, or the last tenth of a single file
VOCAB_SIZE = 256  # bytes are their own vocabulary


class Corpus(NamedTuple):
    """Bytes to train on and bytes to validate on, and where they came from."""

    train: np.ndarray  # (N,) uint8
    validation: np.ndarray  # (M,) uint8
    description: str


def load_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
    """UTF-8 text of a file or of all files below a folder; without a path, Python's own source.

    Every tenth file, in the order of their names, is for validation; of a single file the last
    tenth. Files of a folder that are not UTF-8 are left out, and counted in the description.
    Raises FileNotFoundError, ValueError where there is no text.
    """
    if path is None:
        return _from_files(_standard_library(), "source code of Python's standard library")
    root = Path(path)
    if root.is_dir():
        found = sorted(p for p in root.rglob("*") if p.is_file() and not _hidden(p, root))
        return _from_files(found, f"text files of {root.name or root}")
    if not root.exists():
        raise FileNotFoundError(f"--data: there is no file or folder {path}")
    text = root.read_bytes()
    if not _is_utf8(text):
        raise ValueError(f"--data: {path} is not UTF-8 text")
    return _split_one(text, root.name)


def windows(
    text: np.ndarray, *, length: int, batch_size: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches without end: tokens (B, T) at random places of text, and the bytes that follow.

    Raises ValueError where text is shorter than length + 1.
    """
    require_length(text, length)
    rng = np.random.default_rng(seed)
    while True:
        yield _cut(text, rng.integers(0, len(text) - length, batch_size), length)


def fixed_windows(
    text: np.ndarray, *, length: int, batch_size: int, n_batches: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same batches at every call, at places spread evenly over text."""
    require_length(text, length)
    starts = np.linspace(0, len(text) - length - 1, batch_size * n_batches).astype(np.int64)
    return [_cut(text, part, length) for part in np.split(starts, n_batches)]


def unigram_loss(corpus: Corpus) -> float:
    """Nats per validation byte of the training part's byte frequencies, each count plus one."""
    counts = np.bincount(corpus.train, minlength=VOCAB_SIZE) + 1
    log_probs = np.log(counts / counts.sum())
    return float(-log_probs[corpus.validation].mean())


def require_length(text: np.ndarray, length: int) -> None:
    """ValueError unless text holds a window of `length` bytes and one more."""
    if len(text) <= length:
        raise ValueError(
            f"the text is too short: {length + 1} bytes are needed in the training and in the "
            f"validation part, got {len(text)}"
        )


def _cut(text: np.ndarray, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    rows = text[starts[:, None] + np.arange(length + 1)].astype(np.int64)  # (B, T + 1)
    return rows[:, :-1], rows[:, 1:]


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    found = sorted(p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts))
    if not found:
        raise FileNotFoundError(
            "this Python carries no source of its standard library: name a text with --data"
        )
    return found


def _from_files(paths: list[Path], description: str) -> Corpus:
    texts = [text for text in (p.read_bytes() for p in paths) if text and _is_utf8(text)]
    if not texts:
        raise ValueError(f"--data: no UTF-8 text in {len(paths)} files")
    left_out = len(paths) - len(texts)
    note = f", {left_out} empty or not UTF-8 left out" if left_out else ""
    description = f"{description}: {len(texts)} files{note}"
    if len(texts) == 1:
        return _split_one(texts[0], description)
    validation = [t for i, t in enumerate(texts) if i % VALIDATION_SHARE == 1]
    train = [t for i, t in enumerate(texts) if i % VALIDATION_SHARE != 1]
    return Corpus(_bytes(b"".join(train)), _bytes(b"".join(validation)), description)


def _split_one(text: bytes, description: str) -> Corpus:
    cut = len(text) - len(text) // VALIDATION_SHARE
    return Corpus(_bytes(text[:cut]), _bytes(text[cut:]), description)


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
