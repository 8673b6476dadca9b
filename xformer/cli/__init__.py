"""The command line: `xformer train`, `generate`, `embed`, `finetune` and others.

Each command is one module with two functions: `add_parser(subparsers)` adds its options and sets
`run`; `run(args)` returns the exit status.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import xformer
from xformer.cli import (
    attention,
    classify,
    completion,
    config_file,
    embed,
    exercise,
    export,
    finetune,
    generate,
    gradcheck,
    info,
    memory,
    plot,
    prepare,
    rank,
    search,
    signal_flow,
    summary,
    tag,
    trace,
    train,
)
from xformer.cli.models import kernels_of
from xformer.cli.output import printing
from xformer.cli.parser import Parser
from xformer.renamed import command_line
from xformer.world import end_all, launched, world

COMMANDS = (
    prepare,
    train,
    plot,
    generate,
    embed,
    classify,
    tag,
    rank,
    search,
    finetune,
    export,
    attention,
    signal_flow,
    trace,
    exercise,
    gradcheck,
    summary,
    memory,
    info,
    completion,
)
TOGETHER = ("train", "finetune")  # commands that several processes run together
DESCRIPTION = "The transformer, forward and backward, on any array library."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    An error is one line on stderr and status 1; a warning is one line on stderr. A failed print
    does not end a command (see `output`). The status is 1 if standard output could not be written,
    unless its reader closed it.
    """
    with printing() as out:
        status = _run(argv)
        out.flush()
        if out.lost is not None and not isinstance(out.lost, BrokenPipeError):
            why = out.lost.strerror
            print(f"xformer: error: standard output cannot be written: {why}", file=sys.stderr)
            status = status or 1
    return status


def command_parser() -> tuple[Parser, Mapping[str, Parser]]:
    """The parser of the command line, and the parsers of the commands by name."""
    parser = Parser(prog="xformer", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"xformer {xformer.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser, subparsers.choices


def _run(argv: Sequence[str] | None) -> int:
    parser, commands = command_parser()
    usual, warnings.formatwarning = warnings.formatwarning, _one_line
    file: config_file.ConfigFile | None = None
    try:
        words = command_line(sys.argv[1:] if argv is None else argv)
        _meet(words, commands)
        file = config_file.use(words, commands)
        args = parser.parse_args(words)
        with kernels_of(getattr(args, "backend", None)):
            status: int = args.run(args)
    except (ValueError, OSError, ImportError, ArithmeticError, MemoryError, RuntimeError) as error:
        if file is not None and isinstance(error, ValueError):
            error.add_note(file.note(error, args))
        notes = getattr(error, "__notes__", [])  # for example, the last good checkpoint
        end_all(f"xformer: error: {'; '.join([str(error), *notes])}")
        return 1
    except KeyboardInterrupt:
        end_all("xformer: interrupted")
        return 130
    except Exception:  # a mistake of ours: with other processes, end them too
        if launched() > 1:
            end_all(traceback.format_exc())
        raise
    finally:
        warnings.formatwarning = usual
    return status


def _meet(words: Sequence[str], commands: Mapping[str, Parser]) -> None:
    """Find the processes that were started together, so that an error in one of them ends all.

    ValueError for a command that runs in one process: several would write the same files.
    """
    n, command = launched(), words[0] if words else ""
    if n > 1 and command in TOGETHER:
        world()
    elif n > 1 and command in commands and command != "info":
        raise ValueError(f"xformer {command} runs in one process, and {n} were started together")


def _one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    return f"xformer: warning: {message}\n"
