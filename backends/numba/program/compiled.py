"""Compile functions of trees of arrays: record a program for each kind of arguments, and run it.

The kind of a call is all that its program depends on: layouts of arrays, dtypes of numbers, all
other values in the arguments, and the number of threads.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xformer.backends import results
from xformer.backends.numba.program import timing
from xformer.backends.numba.program.binding import layout_of
from xformer.backends.numba.program.run import Recorded, gap_free
from xformer.backends.numba.program.traced import (
    Traced,
    TracedNumber,
    Unrecorded,
    require_none_caught,
)
from xformer.backends.numpy.threads import n_threads
from xformer.base import tree
from xformer.base.keys import exact
from xformer.dispatch import Refused, current_contexts
from xformer.dispatch.backend import next_arguments, summary
from xformer.dispatch.subclasses import refusal

KEPT = 16  # programs of one function that are kept: those of the last kinds of arguments
# NumPy's flags of an array that `gap_free` would not copy: C-contiguous and aligned; writeable.
READ = 0x101
DONATED = READ | 0x400
NUMBERS = "int64", "float64"  # dtypes of Python numbers


class Compiled:
    """A function of trees as a program: recorded at the first call of each kind, then replayed.

    fn: its result may depend on its arguments only. Arrays and numbers in them are inputs of the
        program. Everything else (names, booleans, None, configurations) selects the program.
    donated: indices of arguments whose arrays the call may overwrite, except `Frozen` ones. A
        result with the layout of such an array is written into its memory.
    lends: whether the next call reuses the memory of other results. It does not if the caller still
        refers to them.
    """

    def __init__(
        self, fn: Callable[..., Any], donated: Sequence[int] = (), *, lends: bool = False
    ) -> None:
        self.fn, self.donated, self.lends = fn, tuple(donated), lends
        self.programs: dict[Any, tuple[Recorded, Any]] = {}
        self._lock = threading.RLock()  # a signal handler may call, too
        self.refused: dict[Any, str] = {}  # why a kind cannot be recorded

    def __call__(self, *arguments: Any) -> Any:
        return self.repeated(1, *arguments)

    def repeated(self, n: int, *arguments: Any) -> Any:
        """Call the function n times and return the results of the last call.

        fn must return a tuple that begins with new values of the donated arguments, in their order.
        The next call gets these instead of the donated arguments. No Python runs between the calls
        if every new array is written over the donated array that it replaces.
        """
        kind = why = None
        try:
            kind, inputs = self._read(arguments)
            if kind not in self.refused:
                program, like = self._program(kind, arguments, inputs)
                program.require_numbers(inputs)
        except Refused:
            raise
        except Exception as error:
            why = f"not recorded: {summary(error)}; the function is called as it is"
        if why is not None or kind in self.refused:
            results = self._one_by_one(n, arguments, self.fn)  # its own errors are raised
            if why is not None:
                is_new = why not in self.refused.values()
                self._keep(self.refused, kind, why)
                if is_new:
                    warnings.warn(f"backend numba: {why}", RuntimeWarning, stacklevel=4)
            return results
        if n > 1 and not program.repeats_in_place:
            return self._one_by_one(n, arguments, self)
        return _filled(like, iter(program.run(inputs, n)))

    def recorded(self, *arguments: Any) -> tuple[Recorded, list[Any]]:
        """Return the program that a call would run, and its inputs.

        TypeError if the function cannot be recorded.
        """
        kind, inputs = self._read(arguments)
        return self._program(kind, arguments, inputs)[0], inputs

    def timed(self, *arguments: Any, rounds: int = 10) -> str:
        """Return a table of the times of a call's instructions, the longest first (`timing.table`).

        Donated arguments are not changed.
        """
        program, inputs = self.recorded(*arguments)
        for i in program.donated:
            inputs[i] = np.array(inputs[i])
        return timing.table(program, inputs, rounds)

    def _read(self, arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the kind of a call, and the inputs of its program.

        Inputs are the arrays and numbers of the arguments; arrays that have gaps are copied.
        """
        inputs, kind = list[Any](), list[Any]([n_threads(), current_contexts()])
        for i, argument in enumerate(arguments):
            flags = DONATED if i in self.donated else READ
            leaves, nodes = tree.parts(argument)
            kind.append(nodes)
            for leaf in leaves:
                x = leaf.value if isinstance(leaf, tree.Frozen) else leaf
                is_array = isinstance(x, np.ndarray | np.number)
                if type(x) is not np.ndarray and (why := refusal(type(x))) is not None:
                    raise Refused(why)
                if not is_array and not _is_input(x):
                    kind.append((type(leaf), exact(x)))
                    continue
                if not isinstance(x, np.ndarray) or x.flags.num & flags != flags:
                    x = gap_free(np.asarray(x), writeable=flags == DONATED)
                inputs.append(x)
                is_number = _is_number(tree.value(leaf))
                kind.append((type(leaf), is_number, x.shape, x.dtype, x.strides))
        return tuple(kind), inputs

    def _one_by_one(self, n: int, arguments: Sequence[Any], call: Callable[..., Any]) -> Any:
        """Do what `repeated` does by n calls of `call`."""
        for _ in range(n - 1):
            arguments = next_arguments(arguments, self.donated, call(*arguments))
        return call(*arguments)

    def _program(
        self, kind: Any, arguments: Sequence[Any], inputs: Sequence[Any]
    ) -> tuple[Recorded, Any]:
        """Return the program of a kind, recorded if it is new, and the tree of its results.

        The leaves of that tree are arrays without values.
        """
        program = self.programs.pop(kind, None) or self._record(arguments, inputs)
        self._keep(self.programs, kind, program)
        return program

    def _keep(self, known: dict[Any, Any], kind: Any, value: Any) -> None:
        """Store the value of a kind as the most recent one; forget the oldest ones."""
        with self._lock:
            known[kind] = value
            for oldest in list(known)[:-KEPT]:
                del known[oldest]

    def explain(self) -> str:
        """Return what runs as Python in each program, and why; the most recent program is last."""
        programs = [program.explain() for program, _ in self.programs.values()]
        return "\n".join([*programs, *self.refused.values()])

    def __str__(self) -> str:
        return "\n\n".join(str(program) for program, _ in self.programs.values())

    def _record(self, arguments: Sequence[Any], inputs: Sequence[Any]) -> tuple[Recorded, Any]:
        """Record `fn` as a program; return it and the tree of the results of `fn`.

        arguments: the trees that the caller passed
        inputs: their arrays and numbers, in order, as NumPy arrays
        The leaves of the returned tree are `Traced`: they have shapes and dtypes, but no values.
        """
        leaves = [(i, x) for i, argument in enumerate(arguments) for x in tree.parts(argument)[0]]
        input_leaves = [(i, x) for i, x in leaves if _is_input(tree.value(x))]
        donated = [n for n, (i, x) in enumerate(input_leaves) if i in self.donated and _is_array(x)]
        numbers = [n for n, (_, x) in enumerate(input_leaves) if _is_number(tree.value(x))]
        if any(inputs[n].dtype.name not in NUMBERS for n in numbers):
            raise Unrecorded("an int of the arguments needs more bits than int64 has")
        result_trees: list[Any] = []

        def on_inputs(*traced: Traced) -> list[Traced]:
            remaining = iter(traced)
            args = tree.map(lambda x: next(remaining) if _is_input(x) else x, list(arguments))
            result = require_none_caught(self.fn, *args)
            if (why := results.refusal(result, {id(tree.value(x)) for _, x in leaves})) is not None:
                raise Unrecorded(why)
            new = list(map(tree.value, tree.parts(result)[0]))
            if any(isinstance(x, np.ndarray | np.generic) for x in new):
                raise Unrecorded("its result holds an array of NumPy that no argument is")
            result_trees.append(result)
            return [x for x in new if isinstance(x, Traced)]

        layouts = [layout_of(x) for x in inputs]
        program = Recorded(on_inputs, layouts, n_threads(), donated, numbers, lends=self.lends)
        like = result_trees[0]
        old = [arguments[i] for i in sorted(self.donated)]
        new = like[: len(old)] if isinstance(like, tuple) else ()
        same_nodes = tree.parts(old)[1] == tree.parts(list(new))[1]
        has_number = any(i in self.donated for n, (i, _) in enumerate(input_leaves) if n in numbers)
        program.repeats_in_place &= same_nodes and not has_number
        return program, like


def _filled(like: Any, results: Iterator[Any]) -> Any:
    """Return the tree `like` with results instead of arrays without values.

    Results are in the order of `tree.flatten`.
    """
    if isinstance(like, Traced):
        result = next(results)
        return result.item() if isinstance(like, TracedNumber) else result
    if isinstance(like, tree.Frozen):
        return tree.Frozen(_filled(like.value, results))
    if isinstance(like, dict):
        return {name: _filled(part, results) for name, part in like.items()}
    if not isinstance(like, tree.INNER):
        return like
    parts = [_filled(part, results) for part in like]
    is_named_tuple = hasattr(like, "_fields")
    return type(like)(*parts) if is_named_tuple else type(like)(parts)


def _is_input(x: Any) -> bool:
    """Return whether a leaf is an input of the program: an array or a number."""
    return _is_array(x) or isinstance(x, np.number) or _is_number(x)


def _is_number(x: Any) -> bool:
    """Return whether x is a number of Python: no bool, and of no type of NumPy or of an enum."""
    return type(x) in (int, float)


def _is_array(x: Any) -> bool:
    """Return whether a leaf is an array. A NumPy scalar is one: it does not take other dtypes."""
    return isinstance(x, np.ndarray | np.number)
