"""`--config FILE`: options of a command in a TOML file, by their long names, without tables."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xformer.base.choices import did_you_mean, near_path
from xformer.base.files import replacing
from xformer.cli.finetune_options import FinetuneOptions
from xformer.cli.run_options import Command, checked, dashed
from xformer.cli.train_options import Preset, TrainOptions

CONFIG = "config.toml"


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


def use(args: argparse.Namespace) -> ConfigFile:
    """Give `args` the options in the file of --config that it has not, and return all in the file.

    FileNotFoundError if there is no file. ValueError, which names the file and the key, if the file
    is not TOML, for unknown keys, and for values of another type or not among the choices.
    """
    path, command = Path(args.config), args.options
    read = _read(path)
    known = _options(command)
    values: dict[str, Any] = {}
    for name, value in read.items():
        if isinstance(value, dict):
            raise ValueError(f"{path}: options must not be in tables, got [{name}]")
        if name not in known:
            near = _other(read, path) or did_you_mean(name, known)
            raise ValueError(f"{path}: {name} is no option of xformer {command.command}{near}")
        values[name] = checked(known[name], value, f"{path}: {name}")
    sizes = [name for name in values if known[name].name in Preset._fields]
    if command is TrainOptions and args.preset is not None and sizes:
        raise ValueError(f"{path}: --preset would change {', '.join(sizes)}: leave them out")
    for name, value in values.items():
        if getattr(args, known[name].name) is None:
            setattr(args, known[name].name, value)
    return ConfigFile(path, values)


def _options(command: Command) -> dict[str, dataclasses.Field[Any]]:
    """The options that may be in a file, by their long names."""
    return {dashed(f.name): f for f in dataclasses.fields(command) if f.name != "config"}


def _other(read: Mapping[str, Any], path: Path) -> str:
    """The end of a message: the command whose options are in the file, if it is another's."""
    for command in (TrainOptions, FinetuneOptions):
        if read.keys() <= _options(command).keys():
            way = f"xformer {command.command} --config {shlex.quote(str(path))}"
            return f"; the file is for xformer {command.command}: {way}"
    return ""


def write(folder: Path, command: str, options: Mapping[str, Any]) -> None:
    """Write config.toml, with which `command` repeats what it does with these options.

    options: by their long names; None and empty lists are left out.
    """
    lines = [f"# To repeat it: xformer {command} --config FILE"]
    for name, value in options.items():
        if value is None or value == () or value == []:
            continue
        line = f"{name} = {_toml(value)}"
        if line.encode(errors="ignore").decode() != line:  # TOML is UTF-8; paths may not be
            line = f"# {name} is not UTF-8; give it on the command line: {value!a}"
        lines.append(line)
    with replacing(folder / CONFIG) as (part,):
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"--config: there is no file {path}{near_path(path)}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def _toml(value: Any) -> str:
    if isinstance(value, str):  # escapes of JSON are escapes of TOML; TOML escapes DEL too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
