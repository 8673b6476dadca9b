"""Split a text into passages that a model can read whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

PARAGRAPH = re.compile(r"\S(?:.*\S)?(?:[ \t]*\r?\n[ \t]*\S(?:.*\S)?)*")
HEADING = re.compile(r"#{1,6}[ \t][^\r\n]*")
SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n")
SPACE = re.compile(r"\s")


class Passage(NamedTuple):
    """A part of a text: the characters from `start` to `end`."""

    line: int  # of its first character, from 1
    start: int
    end: int


def passages(text: str, fits: Callable[[str], bool]) -> list[Passage]:
    """The passages of a text, in order.

    A passage is a paragraph: lines between empty lines. A heading of Markdown that is a paragraph
    of its own belongs to the next paragraph. A longer passage than `fits` allows is halved, at the
    end of a sentence or line near its middle, else at a space, until each part fits.
    """
    spans: list[tuple[int, int]] = []
    start: int | None = None  # of headings before the next paragraph
    for found in PARAGRAPH.finditer(text):
        start = found.start() if start is None else start
        if not HEADING.fullmatch(found.group()):
            spans += _parts(text, start, found.end(), fits)
            start = None
    if start is not None:
        spans += _parts(text, start, len(text.rstrip()), fits)
    made, line, seen = [], 1, 0
    for first, last in spans:
        line += text.count("\n", seen, first)
        seen = first
        made.append(Passage(line, first, last))
    return made


def _parts(text: str, start: int, end: int, fits: Callable[[str], bool]) -> list[tuple[int, int]]:
    """The span, or its halves, and so on until each part fits or is one character."""
    if end - start <= 1 or fits(text[start:end]):
        return [(start, end)]
    left, right = _gap(text, start, end)
    return [*_parts(text, start, left, fits), *_parts(text, right, end, fits)]


def _gap(text: str, start: int, end: int) -> tuple[int, int]:
    """The space to cut at: the end of the left half, and the start of the right half."""
    middle, quarter = (start + end) // 2, (end - start) // 4
    for pattern, reach in ((SENTENCE_END, quarter), (SPACE, end - start)):
        low, high = max(start + 1, middle - reach), min(end - 1, middle + reach)
        spaces = [found.start() for found in pattern.finditer(text, low, high)]
        if spaces:
            left = right = min(spaces, key=lambda i: abs(i - middle))
            while text[left - 1].isspace():
                left -= 1
            while text[right].isspace():
                right += 1
            return left, right
    return middle, middle
