"""`xformer completion`: print a script with which a shell completes commands and options."""

from __future__ import annotations

import argparse
from typing import Any

from xformer.cli.parser import Parser
from xformer.cli.paths import nonempty
from xformer.exercises import EXERCISES

SHELLS = ("bash", "zsh", "fish")
ABOUT = """Print a script with which the Tab key completes commands, options, names and
paths. Save it where the shell looks for such scripts:

  xformer completion bash > ~/.local/share/bash-completion/completions/xformer
  xformer completion fish > ~/.config/fish/completions/xformer.fish
  xformer completion zsh > ~/.zfunc/_xformer

Make the folder first if it is missing. zsh also needs this line in ~/.zshrc,
before compinit: fpath+=~/.zfunc"""


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer completion`."""
    parser.description = ABOUT
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the script. ImportError if the package shtab, which writes it, is missing."""
    try:
        import shtab
    except ImportError as error:
        raise ImportError(
            "shtab is not installed: pip install 'xformer-array[completion]'"
        ) from error
    from xformer.cli.command_line import command_parser  # which imports this module

    parser, commands = command_parser()
    _complete_paths(parser, shtab.FILE)
    for action in commands["exercise"]._actions:
        if action.dest == "name":  # in messages, so many choices would be too long
            action.choices = tuple(EXERCISES)
    print(shtab.complete(parser, args.shell))
    return 0


def _complete_paths(parser: Parser, files: Any) -> None:
    """Mark the arguments of `parser` and of its commands that are paths as `files`."""
    for action in parser._actions:
        if action.type is nonempty:
            action.complete = files  # type: ignore[attr-defined]  # read by shtab
        commands = action.choices.values() if isinstance(action.choices, dict) else ()
        for command in commands:
            if isinstance(command, Parser):
                _complete_paths(command, files)
