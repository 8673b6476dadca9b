"""Functions of trees compiled by `jax.jit`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from xformer.backends import results
from xformer.base import tree
from xformer.base.keys import exact
from xformer.dispatch import observed
from xformer.dispatch.backend import summary


@dataclass(frozen=True)
class _Placeholder:
    """The mark of an array in the arguments: array i of the donated arrays, or of the others.

    is_number: whether it is a Python number. In results it marks a number of the arguments.
    """

    donated: bool
    i: int
    is_number: bool


@dataclass(frozen=True)
class _Result:
    """The mark of array i of the results."""

    i: int


class _NotReturned(TypeError):
    """The function returns what a compiled call cannot return."""


@jax.tree_util.register_pytree_node_class
class _Results:
    """Arrays, and the tree of all results with marks for arrays and numbers of the arguments.

    `jax.jit` returns arrays only. It keeps the tree with the compiled call.
    """

    def __init__(self, arrays: list[Any], like: Any) -> None:
        self.arrays, self.like = arrays, like

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.arrays, _Kept(self.like)

    @classmethod
    def tree_unflatten(cls, kept: Any, arrays: Any) -> _Results:
        return cls(list(arrays), kept.like)


class _Kept:
    """A tree that is equal to itself only, as JAX compares and hashes it."""

    def __init__(self, like: Any) -> None:
        self.like = like


class _Structure:
    """Arguments with a placeholder for each array, hashable by structure and other leaves.

    `jax.jit` compiles again for a structure that is not equal to an earlier one.
    """

    def __init__(self, arguments: Any) -> None:
        leaves, nodes = tree.parts(arguments)
        keys = (
            x if isinstance(x, _Placeholder) else (type(x), exact(tree.value(x))) for x in leaves
        )
        self.arguments, self._key = arguments, (nodes, tuple(keys))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self._key == other._key


class Compiled:
    """A function of trees that `jax.jit` compiles, as `Backend.compiled` returns it.

    JAX compiles again for other shapes or dtypes, and for other leaves that are not arrays.
    A call deletes donated arrays, except `Frozen` ones. A function that JAX cannot trace runs
    uncompiled, with a RuntimeWarning.
    """

    def __init__(self, fn: Callable[..., Any], donated: Sequence[int]) -> None:
        self.fn, self.donated = fn, frozenset(donated)
        self._warnings: set[str] = set()
        self._call: Any = jax.jit(self._flat, static_argnums=0, donate_argnums=1)

    def __call__(self, *arguments: Any) -> Any:
        arrays: dict[bool, list[Any]] = {True: [], False: []}
        frozen = {id(x.value) for arg in arguments for x in tree.parts(arg)[0] if _is_frozen(x)}

        def placeholder(x: Any, *, donated: bool) -> Any:
            if not _is_input(x):
                return x
            donated = donated and isinstance(x, jax.Array) and id(x) not in frozen
            arrays[donated].append(x)
            return _Placeholder(donated, len(arrays[donated]) - 1, not hasattr(x, "dtype"))

        without_arrays = []
        for i, argument in enumerate(arguments):
            replace = partial(placeholder, donated=i in self.donated)
            without_arrays.append(tree.map(replace, [argument])[0])
        try:
            returned = self._call(_Structure(without_arrays), arrays[True], arrays[False])
        except JaxRuntimeError:  # of a run
            raise
        except Exception as error:  # raised while JAX traces, so nothing has been computed
            why = f"backend jax: not compiled: {summary(error)}"
        else:
            return _returned(returned, arrays[False])
        result = self.fn(*arguments)  # its own errors are raised
        if why not in self._warnings:
            self._warnings.add(why)
            warnings.warn(why, RuntimeWarning, stacklevel=3)
        return result

    def _flat(self, structure: _Structure, donated: list[Any], other: list[Any]) -> Any:
        """Call fn with the arrays at their placeholders: the function that JAX traces."""
        arrays = {True: donated, False: other}

        def filled(x: Any) -> Any:
            return arrays[x.donated][x.i] if isinstance(x, _Placeholder) else x

        with observed(None):  # the arrays have no values
            result = self.fn(*tree.map(filled, structure.arguments))
        leaves = [tree.value(x) for x in tree.parts(structure.arguments)[0]]
        if (why := results.refusal(result, set(map(id, leaves)))) is not None:
            raise _NotReturned(why)
        marks = [x for x in leaves if isinstance(x, _Placeholder) and x.is_number]
        numbers = {id(other[x.i]): x for x in marks}
        computed = list[Any]()

        def mark(x: Any) -> Any:
            if id(x) in numbers or not isinstance(x, jax.Array):
                return numbers.get(id(x), x)
            computed.append(x)
            return _Result(len(computed) - 1)

        return _Results(computed, tree.map(mark, [result]))

    def explain(self) -> str:
        """Return how often JAX has compiled the function, and why it did not."""
        compiled = f"backend jax: jax.jit, compiled {self._call._cache_size()} times"
        return "\n".join([compiled, *sorted(self._warnings)])


def _returned(returned: _Results, other: list[Any]) -> Any:
    """Return the tree of the results. other: the arrays and numbers that were not donated."""

    def value(x: Any) -> Any:
        if isinstance(x, _Placeholder):
            return other[x.i]
        return returned.arrays[x.i] if isinstance(x, _Result) else x

    return tree.map(value, returned.like)[0]


def _is_frozen(leaf: Any) -> bool:
    return isinstance(leaf, tree.Frozen)


def _is_input(x: Any) -> bool:
    """Return whether x is an array or a number: its value may differ in each call."""
    return hasattr(x, "dtype") or type(x) in (int, float)
