"""Functions of trees as CUDA graphs: the donated arrays are the state of a `Captured`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from xformer.backends import results as of_calls
from xformer.backends.cupy.captured import Captured, is_of_device
from xformer.backends.cupy.index_add import is_deterministic
from xformer.base import tree
from xformer.base.keys import Unkeyed, exact
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import observed
from xformer.dispatch.backend import Backend, next_arguments


@dataclass(frozen=True)
class _FromState:
    """A placeholder in a tree of results for an array of the state."""

    name: str


class _NotReturned(TypeError):
    """The function returns what a graph cannot return."""


class _Step:
    """The function with the signature that `Captured` needs.

    A result with the shape and dtype of an array of the state becomes its new value.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.arguments: tuple[Any, ...] = ()  # of the current call

    def __call__(self, state: dict[str, Array], inputs: dict[str, Any]) -> Any:
        arguments = []
        for i, argument in enumerate(self.arguments):
            names = (f"{i}.{n}" for n in itertools.count())
            arguments.append(_mapped(partial(_at, names, state, inputs), argument))
        new, free = dict(state), list(state)

        def placed(x: Any) -> Any:
            fits = [name for name in free if is_of_device(x) and _fits(state[name], x)]
            if not fits:
                return x
            name = next((name for name in fits if state[name] is x), fits[0])
            free.remove(name)
            new[name] = x
            return _FromState(name)

        with observed(None):  # a graph cannot copy values to the host
            results = self.fn(*arguments)
        leaves = [tree.value(x) for x in tree.parts(arguments)[0]]
        if (why := of_calls.refusal(results, set(map(id, leaves)))) is not None:
            raise _NotReturned(why)
        return new, (_mapped(placed, results),)


class Compiled:
    """The result of `Backend.compiled`: `fn` as a CUDA graph.

    The graph is for arguments with the tree structure of the first call's; for other structures
    `fn` runs without the graph. Results are stored in the donated arrays of the first call, if
    their shapes and dtypes are equal.

    donated: indices of the arguments whose arrays may be overwritten
    lends: whether other results may be arrays that the next call overwrites, else they are copies
    """

    def __init__(
        self, fn: Callable[..., Any], donated: Sequence[int], backend: Backend, *, lends: bool
    ) -> None:
        self.fn, self.donated, self.lends = fn, frozenset(donated), lends
        self._step = _Step(fn)
        self._call = Captured(self._step, backend)
        self._kind: list[Any] | None = None  # the structure of the first call's trees
        self._is_refused = False  # whether a graph cannot return the results

    def __call__(self, *arguments: Any) -> Any:
        if self._is_refused:
            return self.fn(*arguments)
        try:
            state, inputs, kind = self._read(arguments)
        except Unkeyed as error:
            self._call.is_launched = False
            self._call.say(f"an argument has no key: {error}")
            return self.fn(*arguments)
        self._kind = self._kind or kind
        if kind != self._kind:
            self._call.is_launched = False
            self._call.say(
                "trees of another build than at first, and calls within or without deterministic() "
                "unlike the first, are computed call by call"
            )
            return self.fn(*arguments)
        self._step.arguments = arguments
        try:
            state, (results,) = self._call(state, inputs)
        except _NotReturned as error:
            self._is_refused = True
            self._call.say(f"{error}; the function is called as it is")
            return self.fn(*arguments)
        finally:
            self._step.arguments = ()
        return _mapped(lambda x: self._out(x, state), results)

    def repeated(self, n: int, *arguments: Any) -> Any:
        """Return the results of the last of n calls.

        The first results of each call replace the donated arguments of the next. If these results
        are stored in the donated arrays, a further call is only a launch of the graph. The device
        is not read.
        """
        results, n = self(*arguments), n - 1
        while n > 0:
            arguments = tuple(next_arguments(arguments, self.donated, results))
            state, _, kind = self._read(arguments)
            if self.lends and kind == self._kind:
                n -= self._call.again(state, n)
            if n > 0:
                results, n = self(*arguments), n - 1
        return results

    def _read(self, arguments: Sequence[Any]) -> tuple[dict[str, Array], dict[str, Any], list[Any]]:
        """Return the state, the inputs, and the structure of the arguments' trees."""
        state, inputs, kind = dict[str, Array](), dict[str, Any](), list[Any]([is_deterministic()])
        for i, argument in enumerate(arguments):
            leaves, nodes = tree.parts(argument)
            kind.append(nodes)
            for n, leaf in enumerate(leaves):
                x = tree.value(leaf)
                if not _is_input(x):
                    kind.append((type(leaf), exact(x)))
                elif x is leaf and i in self.donated and is_of_device(x):
                    state[f"{i}.{n}"] = x
                else:
                    inputs[f"{i}.{n}"] = x
        return state, inputs, kind

    def explain(self) -> str:
        """Return a sentence: whether there is a graph, or why not."""
        return self._call.explain()

    def _out(self, x: Any, state: dict[str, Array]) -> Any:
        if isinstance(x, _FromState):
            return state[x.name]
        return x if self.lends or not is_of_device(x) else array_namespace(x).asarray(x, copy=True)


def _mapped(fn: Callable[[Any], Any], node: Any) -> Any:
    """Return `tree.map` of fn over `node`, which may also be a leaf or None."""
    return tree.map(fn, [node])[0]


def _at(names: Iterator[str], state: dict[str, Array], inputs: dict[str, Any], x: Any) -> Any:
    """Return the array for x, the next leaf of an argument."""
    name = next(names)
    return state.get(name, inputs.get(name, x))


def _fits(stored: Array, x: Array) -> bool:
    return bool(stored.shape == x.shape and stored.dtype == x.dtype)


def _is_input(x: Any) -> bool:
    """Return whether x is an array or a number, which may differ from call to call."""
    return hasattr(x, "dtype") or type(x) in (int, float)
