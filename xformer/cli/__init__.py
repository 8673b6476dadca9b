"""The command line: `xformer train`, `generate`, `embed`, `finetune` and others.

One file a command. Its module has `add_parser(subparsers)`, which sets `run`, and `run(args)`,
which returns the exit status.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import xformer
from xformer.cli import (
    attention,
    classify,
    embed,
    finetune,
    generate,
    gradcheck,
    info,
    memory,
    plot,
    prepare,
    signal_flow,
    summary,
    train,
)
from xformer.cli.models import kernels_of
from xformer.cli.output import printing
from xformer.renamed import command_line

COMMANDS = (
    prepare,
    train,
    plot,
    generate,
    embed,
    classify,
    finetune,
    attention,
    signal_flow,
    gradcheck,
    summary,
    memory,
    info,
)
DESCRIPTION = "The transformer, forward and backward, on any array library."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its errors are one line on stderr and exit status 1, warnings a line too.

    Nothing printed ends a command: see `output`. At the end the status is 1 where standard output
    could not be written, unless its reader closed it.
    """
    with printing() as out:
        status = _run(argv)
        out.flush()
        if out.lost is not None and not isinstance(out.lost, BrokenPipeError):
            why = out.lost.strerror
            print(f"xformer: error: standard output cannot be written: {why}", file=sys.stderr)
            status = status or 1
    return status


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="xformer", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"xformer {xformer.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    usual, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        args = parser.parse_args(command_line(sys.argv[1:] if argv is None else argv))
        with kernels_of(getattr(args, "backend", None)):
            status: int = args.run(args)
    except (ValueError, OSError, ImportError, ArithmeticError, MemoryError, RuntimeError) as error:
        notes = getattr(error, "__notes__", [])  # such as which checkpoint is the last good one
        print("xformer: error:", "; ".join([str(error), *notes]), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("xformer: interrupted", file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = usual
    return status


def _one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    return f"xformer: warning: {message}\n"
