"""`--config FILE`: options of a command in a TOML file, by their long names, without tables."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xformer.base.files import replacing

CONFIG = "config.toml"
OPTION = "--config"
HELP = (
    "options in a TOML file, by their long names and without tables: d-model = 128; the command "
    "line wins; a run writes its own, config.toml"
)
WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class ConfigFile(NamedTuple):
    """The options in a file: long name -> value."""

    path: Path
    options: dict[str, Any]

    def note(self, message: str, args: argparse.Namespace) -> str:
        """The part of an error message that says which options came from the file."""
        named = [
            f"{name} = {_toml(value)}"
            for name, value in self.options.items()
            if re.search(rf"--{re.escape(name)}(?![\w-])", message)
            and getattr(args, name.replace("-", "_"), value) == value
        ]
        return f"{self.path} has {', '.join(named)}" if named else f"options are from {self.path}"


def add_config(add: Any) -> None:
    """Add --config by `add`, the method `add_argument` of a parser or of a group."""
    add(OPTION, metavar="FILE", action=_InUse, help=HELP)


class _InUse(argparse.Action):
    """Requires that `use` has read the file; it knows no abbreviations."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, _: str | None = None
    ) -> None:
        if parser.get_default(self.dest) != values:
            raise argparse.ArgumentError(self, f"write {OPTION} in full, and once")


def use(argv: Sequence[str], parsers: Mapping[str, argparse.ArgumentParser]) -> ConfigFile | None:
    """Make the options in the file of --config defaults of the command's parser, and return them.

    argv: the command and its options
    parsers: the parser of each command

    None without --config. FileNotFoundError if there is no file. ValueError, which names the file
    and the key, if the file is not TOML, for unknown keys, and for values of another type or not
    among the choices.
    """
    parser = parsers.get(argv[0]) if argv else None
    if parser is None:
        return None
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(OPTION, nargs="?")  # if the path is missing, the command's parser says so
    config = finder.parse_known_args(argv[1:])[0].config
    actions = _actions(parser)
    if config is None or OPTION not in actions:
        return None
    path = Path(config)
    read = _read(path)
    for name, value in read.items():
        option = f"--{name}"
        if isinstance(value, dict):
            raise ValueError(f"{path}: options must not be in tables, got [{name}]")
        if option not in actions or option == OPTION:
            from xformer.base.choices import did_you_mean

            known = (known.removeprefix("--") for known in actions if known != OPTION)
            near = _other(read, path) or did_you_mean(name, known)
            raise ValueError(f"{path}: {name} is no option of xformer {argv[0]}{near}")
        action = actions[option]
        action.required = False
        parser.set_defaults(**{action.dest: _checked(action, value, f"{path}: {name}")})
    if "--preset" in actions and any(word.partition("=")[0] == "--preset" for word in argv):
        _require_no_sizes(path, read)
    parser.set_defaults(config=config)
    return ConfigFile(path, read)


def _other(read: Mapping[str, Any], path: Path) -> str:
    """The end of a message: the command whose options are in the file, if it is another's."""
    from xformer.cli.command_line import command_parser  # which imports this module

    for command, parser in command_parser()[1].items():
        actions = _actions(parser)
        if OPTION in actions and all(f"--{name}" in actions for name in read):
            way = f"xformer {command} {OPTION} {shlex.quote(str(path))}"
            return f"; the file is for xformer {command}: {way}"
    return ""


def _require_no_sizes(path: Path, read: Mapping[str, Any]) -> None:
    """ValueError if the file has sizes, which a preset would set too."""
    from xformer.cli.train_options import Preset  # which imports this module

    sizes = [name for name in read if name.replace("-", "_") in Preset._fields]
    if sizes:
        raise ValueError(f"{path}: --preset would change {', '.join(sizes)}: leave them out")


def write(folder: Path, command: str, options: Mapping[str, Any]) -> None:
    """Write config.toml, with which `command` repeats what it does with these options.

    options: by their long names; None and empty lists are left out.
    """
    lines = [f"# To repeat it: xformer {command} {OPTION} FILE"]
    for name, value in options.items():
        if value is None or value == () or value == []:
            continue
        line = f"{name} = {_toml(value)}"
        if not _is_utf8(line):  # TOML is; paths may not be
            line = f"# {name} is not UTF-8; give it on the command line: {value!a}"
        lines.append(line)
    with replacing(folder / CONFIG) as (part,):
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        from xformer.base.choices import near_path

        raise FileNotFoundError(f"{OPTION}: there is no file {path}{near_path(path)}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options of a parser but --help, by their long names."""
    long = {
        action: [option for option in action.option_strings if option.startswith("--")]
        for action in parser._actions  # argparse has no public list of them
        if action.default != argparse.SUPPRESS
    }
    return {options[0]: action for action, options in long.items() if options}  # not --no-


def _checked(action: argparse.Action, value: Any, where: str) -> Any:
    """The value of an option. ValueError, which begins with `where`, if it is another's."""
    if action.nargs == "+":
        if not isinstance(value, list) or not value:
            raise ValueError(f"{where} must be a list of strings, got {value!r:.60}")
        return [_one(action, item, str, where) for item in value]
    return _one(action, value, _type(action), where)


def _type(action: argparse.Action) -> type:
    """The type of an option's value."""
    if action.nargs == 0:  # a flag
        return bool
    kind: Any = action.type
    return kind if kind in (int, float) else str


def _one(action: argparse.Action, value: Any, kind: type, where: str) -> Any:
    if kind is float and type(value) is int and abs(value) < 1 << 1023:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} must be {WORDS[kind]}, got {value!r:.60}")
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"{where} must be one of {', '.join(action.choices)}, got {value!r:.60}")
    convert: Any = action.type
    if kind is str and convert is not None:
        try:
            convert(value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{where} {error}") from error
    return value


def _toml(value: Any) -> str:
    if isinstance(value, str):  # escapes of JSON are escapes of TOML; TOML escapes DEL too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
