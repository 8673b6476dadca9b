"""Options and input of the commands that read texts: `embed`, `classify`, `tag` and others."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from xformer.cli.output import is_lost
from xformer.cli.paths import add_computation, add_model, nonempty
from xformer.cli.progress import progress


def add_options(parser: argparse.ArgumentParser, text: str = "text", row: str = "text") -> None:
    """Add the options for the model, the texts and the computation.

    text, row: what a text, and an object of --json, is called
    """
    add = parser.add_argument
    what = f"a {text}; - reads the lines of standard input"
    add("text", nargs="*", metavar=text, help=what)
    add_model(add, "a Hugging Face folder")
    what = f"a UTF-8 file with one {text} a line; - is standard input"
    add("--file", metavar="PATH", type=nonempty, help=what)
    add("--json", action="store_true", help=f"print one JSON object a {row}")
    add_computation(add)
    add("--batch", type=int, default=32, metavar="N", help="texts in a batch (default: 32)")
    add("--max-len", type=int, metavar="N", help="cut texts to N tokens")


def texts_of(args: argparse.Namespace) -> list[str]:
    """The texts of the command line, then the lines of --file.

    ValueError if there is no text, and for a --top below 1.
    """
    texts: list[str] = []
    words = [*args.text, *["-"] * (args.file == "-")]
    if "-" in words and sys.stdin is None:
        raise ValueError("- reads standard input, but that is closed")
    for text in words:
        texts += _lines(sys.stdin.buffer.read(), "standard input") if text == "-" else [text]
    if args.file not in (None, "-"):
        texts += _lines(Path(args.file).read_bytes(), args.file)
    if not texts:
        raise ValueError("there are no texts: give a text, --file PATH, or - for standard input")
    if (top := getattr(args, "top", None)) is not None and top < 1:
        raise ValueError(f"--top must be at least 1, got {top}")
    return texts


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options of these names that are not None."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


class Unread(Exception):
    """Standard output has failed, or its reader has closed it: no result needs to be computed."""


@contextmanager
def watched(what: str, n_texts: int, *, prints: bool = False) -> Iterator[dict[str, Any]]:
    """A context that yields the keyword `progress`, a function that counts finished texts.

    what: the name of the work
    prints: whether results are `printed` inside: a terminal that shows them needs no progress

    Inside, a warning is one line on stderr. `Unread` ends the work.
    """
    done = 0
    is_shown = not (prints and sys.stdout.isatty())
    with progress("texts") as report, warnings.catch_warnings(), suppress(Unread):
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _show

        def update(n: int) -> None:
            nonlocal done
            done += n
            if is_shown:
                report(what, done, n_texts)

        update(0)
        yield {"progress": update}


def printed(lines: Callable[[int, Any], str]) -> Callable[[int, Sequence[Any]], None]:
    """A function for the argument `finished`, which prints results at once.

    lines: lines(i, result): what is printed of text i
    """

    def finished(first: int, results: Sequence[Any]) -> None:
        for i, result in enumerate(results, first):
            print(lines(i, result))
        sys.stdout.flush()
        if is_lost():
            raise Unread

    return finished


def shown(text: str, width: int = 60) -> str:
    """`text` on one line of at most `width` characters, without control characters."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= width else line[: width - 3] + "..."


def _lines(data: bytes, where: str) -> list[str]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte, offset = data[error.start], error.start
        raise ValueError(
            f"{where} is not UTF-8 text: byte {byte:#04x} at offset {offset}, {error.reason}"
        ) from error
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _show(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"xformer: warning: {message}", file=sys.stderr)
