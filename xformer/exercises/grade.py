"""Grade the functions of a learner: values by our op, gradients by finite differences.

The finite differences are of our own forward, so a wrong forward does not make a right backward
wrong. The learner's functions run once in each case, on each array library.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from typing import Any

import numpy as np
from array_api_compat import is_array_api_obj

from xformer import backends, dispatch
from xformer.backends import Backend
from xformer.base import tree
from xformer.exercises.exercise import Exercise
from xformer.exercises.findings import Finding, Grade
from xformer.exercises.hints import distance, hints_of
from xformer.exercises.limit import limited
from xformer.proofs.gradcheck import gradcheck

RTOL = 1e-9  # of values, relative to the largest: float64 rounding in another order


def load(path: str | Path, *, seconds: float | None = None) -> dict[str, Any]:
    """Run the Python file at `path` and return its names.

    seconds: the time limit; None: no limit

    ValueError, with the line, if it is not Python or raises; OSError if it cannot be read.
    TimeoutError if it runs longer than `seconds`.
    """
    path = Path(path)
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    code = path.read_bytes()
    try:
        with limited(seconds, str(path), path):
            exec(compile(code, str(path), "exec"), names)
    except TimeoutError:
        raise
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid Python: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be imported: {_raised(error, path)}") from error
    return names


def grade(
    exercise: Exercise,
    names: Mapping[str, Any],
    libraries: Sequence[str | Backend],
    *,
    seconds: float | None = None,
) -> Grade:
    """Run the functions among `names` in every case on every library, and compare.

    names: of the learner's file, as `load` returns them.
    libraries: backends with float64.
    seconds: the time limit of each call of a function; None: no limit

    TimeoutError, with the line, if a function runs longer than `seconds`.
    """
    findings: list[Finding] = []
    hints: dict[str, list[str]] = {}
    used = [backends.get(library) for library in libraries]
    for backend in used:
        for case in exercise.draws:
            run = Run(exercise, names, backend, case, seconds)
            findings += run.findings()
            for row, hint in hints_of(run):
                hints.setdefault(row, []).append(hint)
    by_row = {row: tuple(dict.fromkeys(texts)) for row, texts in hints.items()}
    return Grade(exercise, tuple(b.name for b in used), tuple(findings), by_row)


class _Wrong(Exception):
    """What is wrong with a row, as a sentence."""


@dataclass
class Run:
    """The learner's functions in one case on one library."""

    exercise: Exercise
    names: Mapping[str, Any]
    backend: Backend
    case: str
    seconds: float | None
    # NumPy arrays by row. A row of `got` is missing if it could not be computed.
    got: dict[str, Any] = field(default_factory=dict)
    wanted: dict[str, Any] = field(default_factory=dict)
    dy: Any = None
    says: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrays, self.options = self.exercise.draw(self.case)
        self.arguments: dict[str, Any] = {}  # the arguments, on the library

    def findings(self) -> list[Finding]:
        """A finding for each output and gradient, and one for what else is wrong."""
        exercise = self.exercise
        with dispatch.reference_only():
            y = exercise.reference(*self.arrays.values(), **self.options)
        cache: Any = None
        if exercise.has_backward:
            y, cache = y
        outputs = y if isinstance(y, tuple) else (y,)
        self.wanted = tree.flatten(dict(zip(exercise.outputs, outputs, strict=True)))
        try:
            saved = self._forward()
        except _Wrong as wrong:
            self.says = dict.fromkeys(self.wanted, str(wrong))
        else:
            if exercise.has_backward:
                self.dy = np.random.default_rng(0).normal(size=y.shape)
                grads = cache.backward(self.dy)
                grads = grads if isinstance(grads, tuple) else (grads,)
                self.wanted |= dict(zip(exercise.gradient_names, grads, strict=False))
                self._backward(saved, y)
        return [Finding(row, self.backend.name, self.case, says) for row, says in self.says.items()]

    def _forward(self) -> Any:
        """Call the forward, judge its outputs, and return what it saves."""
        exercise, name = self.exercise, self.exercise.function_name
        arguments = {k: self._moved(v) for k, v in (self.arrays | self.options).items()}
        options = {k: arguments[k] for k in self.options}
        result = self._call(name, *(arguments[k] for k in self.arrays), **options)
        saved = None
        if exercise.has_backward:
            if not isinstance(result, tuple) or len(result) != 2:
                raise _Wrong(f"{name} must return (y, saved), got {_form(result)}")
            result, saved = result
        n = len(exercise.outputs)
        outputs = (result,) if n == 1 else result
        if not isinstance(outputs, tuple) or len(outputs) != n:
            wanted = f"({', '.join(exercise.outputs)})"
            raise _Wrong(f"{name} must return {wanted}, got {_form(outputs)}")
        got = tree.flatten(dict(zip(exercise.outputs, outputs, strict=True)))
        if more := got.keys() - self.wanted.keys():
            raise _Wrong(f"{name} must return {', '.join(self.wanted)}; {min(more)} is too many")
        for row, wanted in self.wanted.items():
            self.says[row] = self._formed(row, got, wanted) or self._difference(row, wanted)
        written = self._written(arguments)
        if written:
            self.says["inputs"] = f"{name} writes to its argument {written}: return a new array"
        self.arguments = arguments
        return saved

    def _backward(self, saved: Any, y: Any) -> None:
        """Call the backward, judge the form of each gradient, then its values."""
        names, name = self.exercise.gradient_names, f"{self.exercise.function_name}_backward"
        try:
            grads = self._gradients(name, saved, self.dy)
        except _Wrong as wrong:
            self.says |= dict.fromkeys(names, str(wrong))
            return
        wanted = {row: self.wanted[row] for row in names}
        formed = {row: self._formed(row, grads, wanted[row]) for row in names}
        if any(formed.values()):  # finite differences need all; the others are compared with ours
            self.says |= {r: formed[r] or self._difference(r, wanted[r]) for r in names}
            return
        for row, error in self._numeric(name, saved, y).items():
            self.says[row] = error and (self._difference(row, wanted[row]) or error)
        written = self._written(self.arguments)
        if written:
            says = f"{name} writes to the argument {written} of the forward"
            self.says.setdefault("inputs", says)

    def _gradients(self, name: str, saved: Any, dy: Any) -> dict[str, Any]:
        """The learner's gradients for the host's dy, on the library, by row."""
        moved = self.backend.asarray(dy + 0)
        grads = self._call(name, moved, saved)
        names = self.exercise.gradient_names
        grads = grads if isinstance(grads, (tuple, list)) else (grads,)
        if len(grads) != len(names):
            wanted = f"{len(names)} gradient{'s' if len(names) > 1 else ''} ({', '.join(names)})"
            raise _Wrong(f"{name} must return {wanted}, got {len(grads)}")
        if not np.array_equal(self.backend.to_numpy(moved), dy):
            raise _Wrong(f"{name} writes to dy: return a new array")
        return dict(zip(names, grads, strict=True))

    def _numeric(self, name: str, saved: Any, y: Any) -> dict[str, str]:
        """By gradient: what finite differences of our own forward say, empty if they agree."""

        def backward(dy: Any) -> Any:
            grads = self._gradients(name, saved, dy)
            return tuple(self.backend.to_numpy(g) for g in grads.values())

        def forward(*arrays: Any) -> tuple[Any, Any]:
            with dispatch.reference_only():
                y, _ = self.exercise.reference(*arrays, **self.options)
            return y, SimpleNamespace(backward=backward)

        try:
            report = gradcheck(forward, *self.arrays.values(), elementwise=0)
        except _Wrong as wrong:
            return dict.fromkeys(self.exercise.gradient_names, str(wrong))
        _, *rows = report.rows
        errors = [row.error for row in rows]
        *each, again, _ = ["" if e <= report.rtol else f"relative error {e:.1e}" for e in errors]
        if again:
            says = f"{name} gives another result when it is called again: it changes `saved`"
            return dict.fromkeys(self.exercise.gradient_names, says)
        return dict(zip(self.exercise.gradient_names, each, strict=True))

    def _formed(self, row: str, got: dict[str, Any], wanted: Any) -> str:
        """What is wrong with the library, dtype, shape or finiteness of a row; it goes to `got`."""
        array, wanted = got.get(row), np.asarray(wanted)
        form = f"{wanted.dtype} of shape {wanted.shape}"
        mine = type(self.backend.asarray(wanted))
        if array is None or not is_array_api_obj(array):
            return f"must be an array, {form}, got {_form(array)}"
        if not isinstance(array, (mine, np.generic) if mine is np.ndarray else mine):
            library = type(array).__module__.partition(".")[0]
            return f"must be an array of {self.backend.name}, got one of {library}"
        host = self.got[row] = np.asarray(self.backend.to_numpy(array))
        if host.dtype != wanted.dtype:
            return f"must be {form}, got {host.dtype}"
        if host.shape != wanted.shape:
            return f"must have shape {wanted.shape}, got {host.shape}"
        if not np.all(np.isfinite(host)):
            at = np.unravel_index(int(np.argmax(~np.isfinite(host))), host.shape)
            return f"must be finite, got {host[at]} at {_at(row, at)}"
        return ""

    def _difference(self, row: str, wanted: Any) -> str:
        """The error of a row, relative to the largest element, and the worst element."""
        got, wanted = self.got[row], np.asarray(wanted)
        error = distance(got, wanted)
        if error <= RTOL:
            return ""
        at = np.unravel_index(int(np.argmax(abs(got - wanted))), wanted.shape)
        return (
            f"relative error {error:.2g}: {_at(row, at)} is {got[at]:.4g}, must be {wanted[at]:.4g}"
        )

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        """The result of the learner's function. _Wrong if there is none, or if it raises."""
        function = self.names.get(name)
        if not callable(function):
            raise _Wrong(f"the file has no function {name}")
        path = self.names.get("__file__")
        try:
            with np.errstate(all="ignore"), limited(self.seconds, name, path):
                return function(*args, **options)
        except TimeoutError:
            raise
        except NotImplementedError:
            raise _Wrong(f"{name} is still to be written") from None
        except (Exception, SystemExit) as error:
            raise _Wrong(f"{name} raises {_raised(error, path)}") from error

    @property
    def wrong(self) -> list[str]:
        """The rows that are wrong and have values."""
        return [row for row, says in self.says.items() if says and row in self.got]

    def _moved(self, argument: Any) -> Any:
        """A copy on the library of an array or of a list or dict of arrays; all else as it is."""
        if isinstance(argument, (np.ndarray, list, dict)):
            return tree.map(lambda a: self.backend.asarray(a + 0), argument)
        return argument

    def _written(self, arguments: dict[str, Any]) -> str:
        """The name of an argument that is not what it was."""
        for name, before in tree.flatten(self.arrays | self.options).items():
            if isinstance(before, np.ndarray):
                now = self.backend.to_numpy(tree.flatten(arguments)[name])
                if not np.array_equal(now, before):
                    return name
        return ""


def _form(value: Any) -> str:
    """What a value is, for a message."""
    if is_array_api_obj(value):
        return f"an array of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else type(value).__name__


def _at(row: str, index: tuple[Any, ...]) -> str:
    return f"{row}[{', '.join(str(int(i)) for i in index)}]" if index else row


def _raised(error: BaseException, path: Any) -> str:
    """The error as text, with the last line of the learner's file that led to it."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {shorten(str(error), 160)}{where}"
