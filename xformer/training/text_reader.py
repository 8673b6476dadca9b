"""Read the text of a file piece by piece. The file may be larger than memory."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path

PIECE = 1 << 20  # bytes of a piece
# Tokenizers cut here too: before a line break after a letter, some after any character.
CUTS = (re.compile(rb"(?<=[0-9A-Za-z\x80-\xff])\n"), re.compile(rb"(?<=\S)\n"))


def beginning(path: Path) -> int:
    """The offset at which a file's text begins: after a byte order mark, if any."""
    with path.open("rb") as file:
        return len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0


def decoded(path: Path, start: int, end: int) -> Iterator[str]:
    """Yield the text of bytes `start` to `end` of a file in pieces, which end at line ends if any.

    ValueError, with the offset of the byte, if it is not UTF-8, and if the file becomes shorter.
    """
    with path.open("rb") as file:
        file.seek(start)
        pending = b""
        while start + len(pending) < end:
            # `pending` may be long, if the last line end was near its beginning.
            n_bytes = min(PIECE, 2 * PIECE - len(pending))
            data = pending + file.read(min(n_bytes, end - start - len(pending)))
            if len(data) == len(pending):
                raise ValueError(f"{path}: was cut short while it was read")
            cut = len(data) if start + len(data) >= end else _cut_offset(data)
            try:
                piece = data[:cut].decode("utf-8")
            except UnicodeDecodeError as error:
                byte, offset = data[error.start], start + error.start
                raise ValueError(
                    f"{path} is not UTF-8 text: byte {byte:#04x} at offset {offset}, {error.reason}"
                ) from error
            start, pending = start + cut, data[cut:]
            if piece:
                yield piece


def _cut_offset(data: bytes) -> int:
    """The offset at which to cut data, one of these, the first that exists:

    - the last line break after a letter, a digit or a character outside ASCII
    - the last line break after another character that is not white space
    - the beginning of the last character, whose bytes may be incomplete
    """
    for cut in CUTS:
        if offsets := [match.start() for match in cut.finditer(data)]:
            return offsets[-1]
    return boundary(data, len(data) - 1)


def boundary(data: bytes, offset: int) -> int:
    """The last offset up to `offset` at which a character begins. It has at most 4 bytes."""
    begins = (i for i in range(offset, max(offset - 4, -1), -1) if data[i] & 0xC0 != 0x80)
    return next(begins, offset)
