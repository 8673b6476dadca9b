"""What the commands of this package share: options, errors and progress, as xformer's commands."""

from __future__ import annotations

import importlib.util
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import stored
from xformer.cli.errors import in_words
from xformer.cli.output import end
from xformer.cli.parser import Parser
from xformer.cli.progress import progress

PIP = {"mpi4py": "'xformer-array[mpi]'"}  # what pip installs for a package, if not its name


def parser(name: str, what: str | None) -> Parser:
    """Return the parser of the command `name`. what: the docstring that describes it."""
    first = (what or "").partition("\n\n")[0]
    return Parser(prog=f"python -m {name}", description=" ".join(first.split()))


def add_rounds(parser: Parser, default: int | None = None) -> None:
    """Add the option --rounds. default: None: each shape has a number."""
    shown = "by shape" if default is None else default
    options: dict[str, Any] = {"type": count, "default": default, "metavar": "N"}
    parser.add_argument("--rounds", **options, help=f"timed rounds (default: {shown})")


def add_out(parser: Parser) -> None:
    """Add the option --out. The folder is made when a result is written."""
    parser.add_argument("--out", type=folder, metavar="FOLDER", help=stored.DEFAULT)


def add_out_file(parser: Parser) -> None:
    """Add the option --out of a single result. Its folder is made when the result is written."""
    parser.add_argument("--out", type=file, metavar="FILE.json", help=stored.DEFAULT)


def count(text: str) -> int:
    """Return the value of an option that is a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def folder(text: str) -> Path:
    """Return the value of an option that is a folder, or does not exist yet."""
    path = Path(text)
    above = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not above.is_dir():
        raise ArgumentTypeError(f"must be a folder, and {above} is a file")
    if not os.access(above, os.W_OK):  # now, not after an hour of measuring
        raise ArgumentTypeError(f"must be a folder that may be written to, and {above} may not")
    return path


def file(text: str) -> Path:
    """Return the value of an option that is a file, or does not exist yet."""
    if Path(text).is_dir():
        raise ArgumentTypeError(f"must be a file, and {text} is a folder")
    folder(str(Path(text).parent))
    return Path(text)


def require(*packages: str) -> None:
    """Raise ImportError if one of `packages` is not installed."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        way = " ".join(PIP.get(name, name) for name in absent)
        are = "are" if len(absent) > 1 else "is"
        raise ImportError(f"{' and '.join(absent)} {are} not installed: pip install {way}")


@contextmanager
def ticking(what: str, total: int, unit: str = "runs") -> Iterator[Callable[[], None]]:
    """A context that yields a function to call after each of `total` runs.

    It shows a bar on a terminal, otherwise a line every few seconds.
    """
    done = 0
    with progress(unit) as report:
        report(what, done, total)

        def tick() -> None:
            nonlocal done
            done += 1
            report(what, done, total)

        yield tick


def run(main: Callable[[], int]) -> int:
    """Return the exit status of `main`. An error of the user or the system is one line."""
    try:
        return main()
    except (ValueError, OSError, ImportError, ArithmeticError, MemoryError, RuntimeError) as error:
        end(f"benchmarks: error: {in_words(error)}")  # perhaps with the output of a process
        return 1
    except KeyboardInterrupt:
        end("benchmarks: interrupted")
        return 130
