"""The argument parser of all commands: its errors say what was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from xformer.cli.output import end


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
        """As `ArgumentParser`, but the parser of a command reports what is not known to it.

        Options may also be among the words of a list: `rank QUERY --top 3 TEXT TEXT`.
        """
        values, unknown = super().parse_known_args(args, namespace)
        if unknown and not self._appended(values, unknown):
            from xformer.base.choices import did_you_mean

            options = (word.partition("=")[0] for word in unknown if word.startswith("-"))
            near = (did_you_mean(name, self._option_string_actions) for name in options)
            self.error(f"unrecognized: {' '.join(unknown)}{next(filter(None, near), '')}")
        return values, []

    def _appended(self, values: argparse.Namespace, words: list[str]) -> bool:
        """Append words to the positional argument that is a list, if all are of it.

        argparse gives a list only the words before the next option, which may be none.
        """
        lists = [a for a in self._get_positional_actions() if a.nargs in ("*", "+")]
        end = words.index("--") if "--" in words else len(words)
        if not lists or any(self._parse_optional(word) is not None for word in words[:end]):
            return False
        try:
            more = [self._get_value(lists[0], word) for word in (*words[:end], *words[end + 1 :])]
        except argparse.ArgumentError as error:
            self.error(str(error))
        setattr(values, lists[0].dest, [*getattr(values, lists[0].dest), *more])
        return True

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from xformer.base.choices import did_you_mean

            known = tuple(action.choices)
            near = did_you_mean(value, known) or self._taken_by(value)
            message = f"must be one of {', '.join(known)}, got {value!r}{near}"
            raise argparse.ArgumentError(action, message)

    def _taken_by(self, value: Any) -> str:
        """The end of a message: another option that has this choice."""
        options = (a for a in self._actions if a.option_strings)
        names = (a.option_strings[0] for a in options if value in (a.choices or ()))
        return next((f"; {name} takes {value}" for name in names), "")

    def error(self, message: str) -> NoReturn:
        """Print the error and the command that shows the help, and leave with status 2."""
        end(f"{self.prog}: error: {message}\nfor help: {self.prog} --help")
        raise SystemExit(2)

    def format_help(self) -> str:
        """The help, ending with what `after` returns."""
        if self.after is not None:
            self.epilog = self.after()
        return super().format_help()
