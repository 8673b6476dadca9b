"""Functions of trees of arrays: recorded at the first call of each kind of arguments, then run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xformer import tree
from xformer.backends.arrays import refusal
from xformer.backends.base import next_arguments
from xformer.backends.numba.program import timing
from xformer.backends.numba.program.binding import layout_of
from xformer.backends.numba.program.run import Recorded, placed
from xformer.backends.numba.program.traced import Traced, Unrecorded
from xformer.backends.numpy.threads import n_threads
from xformer.dispatch import is_reference_only

KEPT = 16  # programs of one function: of the last kinds of arguments
READ = 0x101  # of arrays that `placed` leaves as they are: flags of NumPy's,
DONATED = READ | 0x400  # C-contiguous and aligned; and writeable


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
        self.refused: dict[Any, str] = {}  # kinds that cannot be recorded, and why

    def __call__(self, *arguments: Any) -> Any:
        return self.repeated(1, *arguments)

    def repeated(self, n: int, *arguments: Any) -> Any:
        """The results of the last of n calls.

        Each further call is given the first results of the last one in the place of the donated
        arguments: fn returns a tuple, which begins with these in their order. No Python is run
        between the calls where all that is donated comes back in its own memory.
        """
        kind, inputs = self._read(arguments)
        if kind in self.refused:
            return self._by_turns(n, arguments, self.fn)
        try:
            program, like = self._known(kind, arguments, inputs)
        except Unrecorded as error:
            self.refused[kind] = why = f"not recorded: {error}; the function is called as it is"
            warnings.warn(f"backend numba: {why}", RuntimeWarning, stacklevel=4)
            return self._by_turns(n, arguments, self.fn)
        if n > 1 and not program.goes_round:
            return self._by_turns(n, arguments, self)
        return _filled(like, iter(program.run(inputs, n)))

    def recorded(self, *arguments: Any) -> tuple[Recorded, list[Any]]:
        """The program that a call would run, and its inputs. TypeError where there is none."""
        kind, inputs = self._read(arguments)
        return self._known(kind, arguments, inputs)[0], inputs

    def timed(self, *arguments: Any, rounds: int = 10) -> str:
        """What each instruction of a call takes, the longest first: see `timing.table`.

        Arguments that are donated are left as they are.
        """
        program, inputs = self.recorded(*arguments)
        for i in program.donated:
            inputs[i] = np.array(inputs[i])
        return timing.table(program, inputs, rounds)

    def _read(self, arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The kind of a call, and its inputs."""
        inputs, kinds = list[Any](), list[Any]([n_threads(), is_reference_only()])
        for i, argument in enumerate(arguments):
            wanted = DONATED if i in self.donated else READ
            leaves, nodes = tree.parts(argument)
            kinds.append(nodes)
            for leaf in leaves:
                x = leaf.value if isinstance(leaf, tree.Frozen) else leaf
                is_array = isinstance(x, np.ndarray)
                if type(x) is not np.ndarray and (why := refusal(type(x))) is not None:
                    raise TypeError(f"compile: arguments must hold arrays, got {why}")
                if not is_array and not _is_input(x):
                    kinds.append((type(leaf), x))
                    continue
                if not is_array or x.flags.num & wanted != wanted:
                    x = placed(np.asarray(x), writeable=wanted == DONATED)
                inputs.append(x)
                kinds.append((type(leaf), is_array, x.shape, x.dtype, x.strides))
        return tuple(kinds), inputs

    def _by_turns(self, n: int, arguments: Sequence[Any], call: Callable[..., Any]) -> Any:
        """Call after call."""
        for _ in range(n - 1):
            arguments = next_arguments(arguments, self.donated, call(*arguments))
        return call(*arguments)

    def _known(
        self, kind: Any, arguments: Sequence[Any], inputs: Sequence[Any]
    ) -> tuple[Recorded, Any]:
        """The program of a kind, and its results as a tree without values."""
        known = self.programs.pop(kind, None) or self._recorded(arguments, inputs)
        self.programs[kind] = known  # as the last one
        while len(self.programs) > KEPT:
            del self.programs[next(iter(self.programs))]
        return known

    def explain(self) -> str:
        """Of each program that is kept, the last one last: what runs as Python, and why."""
        programs = [program.explain() for program, _ in self.programs.values()]
        return "\n".join([*programs, *self.refused.values()])

    def __str__(self) -> str:
        return "\n\n".join(str(program) for program, _ in self.programs.values())

    def _recorded(self, arguments: Sequence[Any], inputs: Sequence[Any]) -> tuple[Recorded, Any]:
        """The program, and its results as a tree of arrays without values."""
        leaves = [(i, x) for i, own in enumerate(arguments) for x in tree.parts(own)[0]]
        found = [(i, x) for i, x in leaves if _is_input(tree.value(x))]
        donated = [n for n, (i, x) in enumerate(found) if i in self.donated and _is_array(x)]
        numbers = [n for n, (_, x) in enumerate(found) if not _is_array(tree.value(x))]
        likes: list[Any] = []

        def flat(*traced: Traced) -> list[Traced]:
            rest = iter(traced)
            own = tree.map(lambda x: next(rest) if _is_input(x) else x, list(arguments))
            likes.append(self.fn(*own))
            return [x for x in tree.flatten({"": likes[0]}).values() if isinstance(x, Traced)]

        layouts = [layout_of(x) for x in inputs]
        program = Recorded(flat, layouts, n_threads(), donated, numbers, lends=self.lends)
        own = [arguments[i] for i in sorted(self.donated)]
        begins = likes[0][: len(own)] if isinstance(likes[0], tuple) else ()
        alike = tree.parts(own)[1] == tree.parts(list(begins))[1]
        counted = any(i in self.donated for n, (i, _) in enumerate(found) if n in numbers)
        program.goes_round &= alike and not counted
        return program, likes[0]


def _filled(like: Any, results: Iterator[Any]) -> Any:
    """A tree with the results in the place of arrays without values, in the order of `flatten`."""
    if isinstance(like, Traced):
        return next(results)
    if isinstance(like, tree.Frozen):
        return tree.Frozen(_filled(like.value, results))
    if isinstance(like, dict):
        return {name: _filled(part, results) for name, part in like.items()}
    if not isinstance(like, tree.INNER):
        return like
    parts = [_filled(part, results) for part in like]
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def _is_input(x: Any) -> bool:
    return _is_array(x) or (isinstance(x, int | float | np.number) and not isinstance(x, bool))


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)
