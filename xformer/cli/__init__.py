"""The command line: `xformer train`, `generate`, `embed`, `finetune` and others."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    An error is one line on stderr and status 1; a warning is one line on stderr. A failed print
    does not end a command (see `output`). The status is 1 if standard output could not be written,
    unless its reader closed it.
    """
    try:  # imports take long enough to be interrupted
        from xformer.cli.command_line import run

        return run(argv)
    except KeyboardInterrupt:
        print("xformer: interrupted", file=sys.stderr)
        return 130
