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
    check,
    classify,
    embed,
    finetune,
    flow,
    generate,
    info,
    ledger,
    plot,
    prepare,
    summary,
    train,
)

COMMANDS = (
    prepare,
    train,
    plot,
    generate,
    embed,
    classify,
    finetune,
    attention,
    flow,
    check,
    summary,
    ledger,
    info,
)
DESCRIPTION = "The transformer, forward and backward, on any array library."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its errors are one line on stderr and exit status 1, warnings a line too."""
    parser = argparse.ArgumentParser(prog="xformer", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"xformer {xformer.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    usual, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
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
