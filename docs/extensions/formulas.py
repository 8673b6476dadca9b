"""Formulas of docstrings as TeX: `y = x w + b` is read as Python is, and drawn as on a page.

A formula begins with `name = ` or `name(arguments) = `, and ends where its expression ends. What
follows must be punctuation or one of a few words; if it is anything else, the text stays text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

START = re.compile(r"(?<![\w.`\"'{<>=!+*/-])([A-Za-z]\w*'?(?:\([\w, ]*\))?) = (?=[\w(|-])")
END = re.compile(
    r"$|[.,;:)](?: |$)|(?: \(| (?:over|along|for|with|where|if|and|of|in|elementwise|by|is|are)\b)"
)
NAME = re.compile(r"[A-Za-z](?:\w*_\{[^}]*\}|\w*)'?")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
MEAN = re.compile(r"mean over (\w+) of ")
POWER = re.compile(r"\^(-?\d+(?:/\d+)?|T\b|\w|\((?:[^()]*)\))")
GREEK = ("alpha", "beta", "gamma", "phi", "Phi", "pi", "mu", "sigma")
KNOWN = ("exp", "log", "max", "min", "tanh", "sin", "cos")  # of TeX


class Unread(Exception):
    """The text is no formula."""


def parts(text: str, known: Set[str]) -> Iterator[tuple[bool, str]]:
    """The text in pieces, each with whether it is TeX.

    known: words that a formula may have beside another factor without a sign between them
    """
    at = 0
    while match := START.search(text, at):
        try:
            tex, end = Reader(text, match.end(), known).whole()
        except Unread:
            yield False, text[at : match.end()]
            at = match.end()
            continue
        yield False, text[at : match.start()]
        yield True, f"{Reader(match[1], 0, known).factor()} = {tex}"
        at = end
    yield False, text[at:]


class Reader:
    """Reads one expression; each method returns TeX and moves on."""

    def __init__(self, text: str, at: int, known: Set[str]) -> None:
        self.text, self.at, self.known = text, at, known

    def whole(self) -> tuple[str, int]:
        """The expression, and where it ends."""
        start = self.at
        tex = self.sum()
        while self.take(" = "):
            tex += f" = {self.sum()}"
        is_plain = re.fullmatch(r"[\w.-]+", self.text[start : self.at])
        if is_plain or not END.match(self.text, self.at):
            raise Unread
        return tex, self.at

    def take(self, pattern: str) -> re.Match[str] | None:
        if match := re.compile(pattern).match(self.text, self.at):
            self.at = match.end()
        return match

    def need(self, pattern: str) -> None:
        if not self.take(pattern):
            raise Unread

    def sum(self) -> str:
        tex = "-" if self.take("-") else ""
        tex += self.product()
        while match := self.take(r" ([+-]) "):
            tex += f" {match[1]} {self.product()}"
        return tex

    def product(self) -> str:
        if match := self.take(MEAN.pattern):
            over = match[1] if len(match[1]) == 1 else rf"\text{{{match[1]}}}"
            inside = self.sum()
            inside = rf"\left( {inside} \right)" if re.search(" [+-] ", inside) else inside
            return rf"\operatorname*{{mean}}_{{{over}}} {inside}"
        if match := self.take(r"sum_(\w+) "):
            return rf"\sum_{{{match[1]}}} {self.product()}"
        if self.take("integral of "):
            inside = self.product()
            self.need(" from ")
            low = self.factor()
            self.need(" to ")
            return rf"\int_{{{low}}}^{{{self.factor()}}} {inside} \, dt"
        tex = self.factor()
        while True:
            if self.take(r" / |/(?=\w)"):
                tex = rf"\frac{{{bare(tex)}}}{{{bare(self.factor())}}}"
            elif self.take(r" \* (?=sum_|integral of )"):
                tex += rf" \, {self.product()}"
            elif self.take(r" (?:\*|\.) "):
                tex += rf" \cdot {self.factor()}"
            elif self.is_beside():
                self.at += 1
                tex += rf" \, {self.factor()}"
            else:
                return tex

    def is_beside(self) -> bool:
        """Whether another factor follows without a sign."""
        if not self.text.startswith(" ", self.at):
            return False
        after = self.at + 1
        if self.text.startswith("(", after):
            return not re.compile(r"\((?:arXiv|[A-Z][a-z]|as |eq|a |the |torch)").match(
                self.text, after
            )
        match = NAME.match(self.text, after)
        if match is None:
            return False
        name = match[0].partition("_")[0].rstrip("'")
        is_call = self.text.startswith("(", match.end())
        return name in self.known or match[0] in self.known or is_call or len(name) == 1

    def factor(self) -> str:
        if match := self.take(NUMBER.pattern):
            tex = match[0]
        elif self.take(r"\("):
            tex = rf"\left( {self.sum()} \right)"
            self.need(r"\)")
        elif self.take(r"\|"):
            tex = rf"\lvert {self.sum()} \rvert"
            self.need(r"\|")
        elif match := self.take(NAME.pattern):
            tex = self.called(match[0])
        else:
            raise Unread
        if match := self.take(POWER.pattern):
            power = bare(match[1].strip("()"))
            tex = rf"{tex}^{{{chr(92) + 'top' if power == 'T' else power}}}"
        return tex

    def called(self, name: str) -> str:
        """A name with what it is applied to, or indexed by."""
        if self.take(r"\["):
            inside = self.arguments()
            self.need(r"\]")
            return f"{self.named(name)}[{inside}]"
        if not self.take(r"\("):
            return self.named(name)
        inside = self.arguments()
        self.need(r"\)")
        if name == "sqrt":
            return rf"\sqrt{{{inside}}}"
        if name == "exp":
            return f"e^{{{inside}}}" if "frac" not in inside else rf"\exp\left( {inside} \right)"
        function = self.named(name) if len(name) < 4 or name in KNOWN + GREEK else roman(name)
        return rf"{function}\left( {inside} \right)"

    def arguments(self) -> str:
        found = [self.sum()]
        while self.take(", "):
            found.append(self.sum())
        return ", ".join(found)

    def named(self, name: str) -> str:
        prime = "'" * name.endswith("'")
        name = name.removesuffix("'")
        if name in KNOWN:
            return rf"\{name}"
        base, _, below = name.partition("_")
        if name in self.known and len(base) > 1 and base not in GREEK:
            base, below = name, ""  # an argument: log_rate
        if base in GREEK:
            tex = rf"\{base}"
        elif len(base) == 1:
            tex = base
        else:
            tex = roman(base)
        if below:
            words = below.strip("{}").split("_")
            is_named = len(words) > 1  # w_up_e, not scores_ij
            words = [roman(w) if is_named and len(w) > 1 else w for w in words]
            tex += f"_{{{','.join(words)}}}"
        return tex + prime


def bare(tex: str) -> str:
    """What is in the one pair of parentheses around it, if there is one."""
    left, right = r"\left( ", r" \right)"
    if not (tex.startswith(left) and tex.endswith(right)):
        return tex
    depth, inside = 0, tex[len(left) : -len(right)]
    for match in re.finditer(r"\\(left|right)\b", inside):
        depth += 1 if match[1] == "left" else -1
        if depth < 0:
            return tex
    return inside


def roman(word: str) -> str:
    return rf"\mathrm{{{word.replace('_', chr(92) + '_')}}}"
