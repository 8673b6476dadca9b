"""The argument parser of all commands: its errors say what was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from xformer.checks import did_you_mean
from xformer.world import end_all


class Help(argparse.HelpFormatter):
    """A formatter that wraps texts, but keeps texts of several lines, such as tables."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with short errors, which name the nearest command, option or choice."""

    after: Callable[[], str] | None = None  # makes the end of the help; called only to print it

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **({"formatter_class": Help} | options))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `ArgumentParser`, but the parser of a command reports what is not known to it."""
        values, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = (word.partition("=")[0] for word in unknown if word.startswith("-"))
            near = (did_you_mean(name, self._option_string_actions) for name in options)
            self.error(f"unrecognized: {' '.join(unknown)}{next(filter(None, near), '')}")
        return values, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = tuple(action.choices)
            near = did_you_mean(value, known)
            message = f"must be one of {', '.join(known)}, got {value!r}{near}"
            raise argparse.ArgumentError(action, message)

    def error(self, message: str) -> NoReturn:
        """Print the error and the command that shows the help, and leave with status 2."""
        end_all(f"{self.prog}: error: {message}\nfor help: {self.prog} --help")
        raise SystemExit(2)

    def format_help(self) -> str:
        """The help, ending with what `after` returns."""
        if self.after is not None:
            self.epilog = self.after()
        return super().format_help()
