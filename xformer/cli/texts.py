"""What the commands that read texts have in common."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xformer import backends
from xformer.cli.paths import nonempty
from xformer.cli.progress import progress


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, the texts, and how they are computed."""
    parser.add_argument("text", nargs="*", help="a text; - for the lines of standard input")
    parser.add_argument(
        "--model",
        metavar="PATH",
        type=nonempty,
        required=True,
        help="a folder of Hugging Face's format",
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", type=nonempty, help="where it does not lie beside the model"
    )
    parser.add_argument("--file", metavar="PATH", type=nonempty, help="UTF-8; each line is a text")
    parser.add_argument("--json", action="store_true", help="print one JSON object a text")
    parser.add_argument("--backend", default="numpy", choices=backends.NAMES)
    parser.add_argument("--device", help="of the backend: cuda, for torch")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument(
        "--batch", type=int, default=32, metavar="N", help="texts at once (default: 32)"
    )
    parser.add_argument("--max-len", type=int, metavar="N", help="tokens of a text that are read")


def texts_of(args: argparse.Namespace) -> list[str]:
    """The texts of the command line, then those of the file. ValueError where there is none."""
    texts: list[str] = []
    for text in args.text:
        texts += _lines(_standard_input(), "standard input") if text == "-" else [text]
    if args.file is not None:
        texts += _lines(Path(args.file).read_bytes(), args.file)
    if not texts:
        raise ValueError("there are no texts: give some, --file PATH, or - for standard input")
    return texts


@contextmanager
def watched(what: str, n_texts: int) -> Iterator[dict[str, Any]]:
    """Options `progress`, to show how far it is; warnings are one line on stderr."""
    done = 0
    with progress("texts") as report, warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _show

        def update(n: int) -> None:
            nonlocal done
            done += n
            report(what, done, n_texts)

        update(0)
        yield {"progress": update}


def shown(text: str, width: int = 60) -> str:
    """A text on one line of at most `width` characters, none of which acts on a terminal."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= width else line[: width - 3] + "..."


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise ValueError("- reads standard input, which is closed")
    return sys.stdin.buffer.read()


def _lines(data: bytes, where: str) -> list[str]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: must be UTF-8, {error}") from error
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _show(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"xformer: warning: {message}", file=sys.stderr)
