"""The text of a file larger than memory, in pieces."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path

PIECE = 1 << 20  # bytes that are read, and encoded, at once
# Where a tokenizer would have cut too: before a new line after a letter, for some after any sign.
CUTS = (re.compile(rb"(?<=[0-9A-Za-z\x80-\xff])\n"), re.compile(rb"(?<=\S)\n"))


def beginning(path: Path) -> int:
    """The place where a file's text begins: behind a byte order mark."""
    with path.open("rb") as file:
        return len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0


def decoded(path: Path, start: int, end: int) -> Iterator[str]:
    """The text of bytes start to end of a file, cut at ends of lines where there are some."""
    with path.open("rb") as file:
        file.seek(start)
        rest = b""
        while start + len(rest) < end:
            # Of the rest the only good place may have been at its beginning: it can be long.
            room = min(PIECE, 2 * PIECE - len(rest))
            data = rest + file.read(min(room, end - start - len(rest)))
            if len(data) == len(rest):
                raise ValueError(f"{path}: was cut short while it was read")
            cut = len(data) if start + len(data) >= end else _place_to_cut(data)
            try:
                piece = data[:cut].decode("utf-8")
            except UnicodeDecodeError as error:
                byte, place = data[error.start], start + error.start
                raise ValueError(
                    f"{path} is not UTF-8 text: byte {byte:#04x} at offset {place}, {error.reason}"
                ) from error
            start, rest = start + cut, data[cut:]
            if piece:
                yield piece


def _place_to_cut(data: bytes) -> int:
    """The last good place, or where the last character begins, of which a part may be missing."""
    for cut in CUTS:
        if found := [match.start() for match in cut.finditer(data)]:
            return found[-1]
    return boundary(data, len(data) - 1)


def boundary(data: bytes, place: int) -> int:
    """The place, or the last one before it, where a character begins; it has 4 bytes at most."""
    begins = (p for p in range(place, max(place - 4, -1), -1) if data[p] & 0xC0 != 0x80)
    return next(begins, place)
