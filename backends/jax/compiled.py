"""Functions of trees compiled by `jax.jit`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.errors import JAXTypeError

from xformer import tree
from xformer.dispatch import observed


@dataclass(frozen=True)
class _Placeholder:
    """The mark of an array in the arguments: array i of the donated arrays, or of the others."""

    donated: bool
    i: int


class _Structure:
    """Arguments with a placeholder for each array, hashable by structure and other leaves.

    `jax.jit` compiles again for a structure that is not equal to an earlier one.
    """

    def __init__(self, arguments: Any) -> None:
        leaves, nodes = tree.parts(arguments)
        self.arguments, self._key = arguments, (nodes, tuple(leaves))

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
            return _Placeholder(donated, len(arrays[donated]) - 1)

        without_arrays = []
        for i, argument in enumerate(arguments):
            replace = partial(placeholder, donated=i in self.donated)
            without_arrays.append(tree.map(replace, [argument])[0])
        try:
            return self._call(_Structure(without_arrays), arrays[True], arrays[False])
        except JAXTypeError as error:  # raised while JAX traces, so nothing has been computed
            why = f"backend jax: not compiled: {str(error).splitlines()[0]}"
        if why not in self._warnings:
            self._warnings.add(why)
            warnings.warn(why, RuntimeWarning, stacklevel=3)
        return self.fn(*arguments)

    def _flat(self, structure: _Structure, donated: list[Any], other: list[Any]) -> Any:
        """Call fn with the arrays at their placeholders: the function that JAX traces."""
        arrays = {True: donated, False: other}

        def filled(x: Any) -> Any:
            return arrays[x.donated][x.i] if isinstance(x, _Placeholder) else x

        with observed(None):  # the arrays have no values
            return self.fn(*tree.map(filled, structure.arguments))

    def explain(self) -> str:
        """Return how often JAX has compiled the function, and why it did not."""
        compiled = f"backend jax: jax.jit, compiled {self._call._cache_size()} times"
        return "\n".join([compiled, *sorted(self._warnings)])


def _is_frozen(leaf: Any) -> bool:
    return isinstance(leaf, tree.Frozen)


def _is_input(x: Any) -> bool:
    """Return whether x is an array or a number: its value may differ in each call."""
    return hasattr(x, "dtype") or (isinstance(x, int | float) and not isinstance(x, bool))
