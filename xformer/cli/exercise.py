"""`xformer exercise`: write an exercise's file, and grade it on every installed array library."""

from __future__ import annotations

import argparse
import os
import threading
from itertools import groupby
from pathlib import Path

from xformer import backends
from xformer.base.files import replacing
from xformer.cli.open_model import enable_float64
from xformer.cli.parser import Parser
from xformer.cli.paths import nonempty
from xformer.exercises import EXERCISES, Exercise, get, grade, load
from xformer.exercises.limit import threads_limited

LIMIT = 30.0  # seconds of a call; one takes milliseconds, more where JAX compiles
ABOUT = (
    "Without NAME, list the exercises of the six lectures (docs/lectures). With NAME, write the "
    "file NAME.py, whose text says what is to be written. With --check, run it on every installed "
    "array library: values are compared with our own op, gradients with finite differences. The "
    "exit status is 0 if all is right, 1 if not."
)


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer exercise`."""
    parser.description = ABOUT
    parser.add_argument("name", nargs="?", metavar="NAME", help="an exercise (default: list all)")
    what = parser.add_mutually_exclusive_group()
    out = "write the exercise to this file (default: NAME.py); an existing file is kept"
    what.add_argument("--out", metavar="FILE", type=nonempty, help=out)
    check = "grade this file (default: NAME.py)"
    what.add_argument("--check", nargs="?", const=True, metavar="FILE", type=nonempty, help=check)
    solution = "print where our own implementation and its derivation are"
    what.add_argument("--solution", action="store_true", help=solution)
    limit = f"stop a call that runs longer (default: {LIMIT:g}; 0: no limit)"
    add = parser.add_argument
    add("--time-limit", type=float, default=LIMIT, metavar="SECONDS", help=limit)


def run(args: argparse.Namespace) -> int:
    """List, write or grade. 1 if something is wrong in the graded file."""
    if args.name is None:
        if args.out or args.check or args.solution:
            raise ValueError("--out, --check and --solution need the NAME of an exercise")
        print(_listed())
        return 0
    exercise = get(args.name)
    if args.solution:
        lines = [f"mistake:     {says}" for says in exercise.planted]
        lines += [f"source:      {exercise.source}", f"explanation: {exercise.page}"]
        print("\n".join(lines))
        return 0
    if args.check:
        path = Path(f"{exercise.name}.py" if args.check is True else args.check)
        with threads_limited(args.time_limit or None, str(path)):
            return _check(exercise, path, args.time_limit)
    path = Path(args.out or f"{exercise.name}.py")
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists and is kept; --out FILE writes another file")
    with replacing(path) as (part,):
        part.write_text(exercise.stub, encoding="utf-8")
    command = f"xformer exercise {exercise.name} --check"
    print(f"{path}: read it, complete it, then run\n{command}{f' {path}' if args.out else ''}")
    return 0


def _listed() -> str:
    """A line for each exercise, by lecture."""
    width = max(map(len, EXERCISES))
    lines = []
    for lecture, exercises in groupby(EXERCISES.values(), lambda one: one.lecture):
        lines.append(f"lecture {lecture} (docs/lectures/{lecture}.md)")
        lines += [f"  {one.name:{width}}  {one.summary}" for one in exercises]
    lines.append("\nxformer exercise NAME writes NAME.py; xformer exercise NAME --check grades it")
    return "\n".join(lines)


def _check(exercise: Exercise, path: Path, seconds: float) -> int:
    """Print the grade; 1 if something is wrong. seconds: the time limit of each call; 0: none."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: `xformer exercise {exercise.name}` writes {exercise.name}.py"
        )
    if not 0 <= seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"--time-limit must be a number of seconds, got {seconds}")
    names = load(path, seconds=seconds or None)
    libraries, skipped = [], []
    for name in backends.names():
        if name in backends.ON_NUMPY:  # further kernels, for the same arrays
            continue
        try:
            enable_float64(name, "float64")
            libraries.append(backends.get(name))
        except backends.Unusable:
            skipped.append(name)
    result = grade(exercise, names, libraries, seconds=seconds or None)
    print(result)
    if skipped:
        print(f"\nskipped: {', '.join(skipped)} (`xformer info` says why)")
    if result.ok:
        print(
            f"\n{exercise.name}: all is right. Compare: xformer exercise {exercise.name} --solution"
        )
    return 0 if result.ok else 1
