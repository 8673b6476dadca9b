"""What an error says, in the words of the user."""

from __future__ import annotations

import argparse
import errno
import os
import re
from pathlib import Path

# Arguments of functions -> their options, if these have other names.
OPTIONS = {
    "length": "seq_len",
    "penalty": "repetition_penalty",
    "rank": "lora",
    "share": "validation_fraction",
    "t": "temperature",
}
VALUE = re.compile(r"\b(\w+) = ([^\s,;]+)")  # "n_heads = 3 must divide d_model = 8"
MUST_BE = re.compile(r"(?:([\w ]+): )?(\w+)( must .*, got )(\S+)", re.DOTALL)


def in_words(error: Exception) -> str:
    """The message of an error. For an error of the system: which path, and what is wrong with it.

    Python says "[Errno 2] No such file or directory: 'x'".
    """
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}" if str(error) else "not enough memory"
    if not isinstance(error, OSError) or error.errno is None or error.strerror is None:
        return str(error) or type(error).__name__
    what = error.strerror.lower()
    return what if error.filename is None else _about(Path(os.fsdecode(error.filename)), error)


def by_option(message: str, args: argparse.Namespace) -> str:
    """`message` with the option in place of an argument that got the option's value.

    "attach: rank must be an int of at least 1, got 0" of `--lora 0` begins with "--lora".
    """
    if match := MUST_BE.fullmatch(message):
        function, name, what, got = match.groups()
        option = _option(name, got, args) or _option(function or "", got, args)
        message = f"{option}{what}{got}" if option else message
    return VALUE.sub(lambda m: f"{_option(m[1], m[2], args) or m[1]} = {m[2]}", message)


def _option(name: str, value: str, args: argparse.Namespace) -> str | None:
    """The option of the argument `name` of a function, if it was given as `value`."""
    names = (name, name.removeprefix("n_"), name.removesuffix("_size"), OPTIONS.get(name, name))
    given = (n for n in names if str(getattr(args, n, None)) == value)
    return next((f"--{n.replace('_', '-')}" for n in given), None)


def sizes_given(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The sizes that were given, as options: "--batch 512 --d-model 1024"."""
    sizes = (a for a in parser._actions if a.type is int and a.dest not in ("seed", "steps"))
    given = ((a.option_strings[-1], getattr(args, a.dest), a.default) for a in sizes)
    words = [f"{name} {value}" for name, value, usual in given if value != usual]
    return " ".join(words).translate({ord(c): None for c in "[],"})  # of a list


def _about(path: Path, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        from xformer.base.choices import near_path

        return f"there is no file or folder {path}{near_path(path)}"
    if error.errno == errno.EISDIR:
        return f"{path} must be a file, it is a folder"
    if error.errno == errno.ENOTDIR:
        file = next((above for above in path.parents if above.is_file()), path)
        return f"{file} must be a folder, it is a file"
    return f"{path}: {(error.strerror or '').lower()}"
