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


@dataclass(frozen=True)
class _Place:
    """Stands in arguments for an array: the i-th of those donated, or of the others."""

    donated: bool
    i: int


class _Build:
    """Arguments without their arrays: equal of all that are built alike."""

    def __init__(self, like: Any) -> None:
        leaves, nodes = tree.parts(like)
        self.like, self._key = like, (nodes, tuple(leaves))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Build) and self._key == other._key


class Compiled:
    """As `Backend.compiled`: JAX compiles anew for other shapes, dtypes, and what is no array.

    Donated arrays are deleted by the call; `Frozen` ones are not donated.
    """

    def __init__(self, fn: Callable[..., Any], donated: Sequence[int]) -> None:
        self.fn, self.donated = fn, frozenset(donated)
        self._said: set[str] = set()
        self._call: Any = jax.jit(self._flat, static_argnums=0, donate_argnums=1)

    def __call__(self, *arguments: Any) -> Any:
        arrays: dict[bool, list[Any]] = {True: [], False: []}
        frozen = {id(x.value) for own in arguments for x in tree.parts(own)[0] if _is_frozen(x)}

        def placed(x: Any, *, donated: bool) -> Any:
            if not _is_input(x):
                return x
            donated = donated and isinstance(x, jax.Array) and id(x) not in frozen
            arrays[donated].append(x)
            return _Place(donated, len(arrays[donated]) - 1)

        like = []
        for i, argument in enumerate(arguments):
            own = partial(placed, donated=i in self.donated)
            like.append(tree.map(own, [argument])[0])
        try:
            return self._call(_Build(like), arrays[True], arrays[False])
        except JAXTypeError as error:  # raised while it is traced, before anything is done
            why = f"backend jax: not compiled: {str(error).splitlines()[0]}"
        if why not in self._said:
            self._said.add(why)
            warnings.warn(why, RuntimeWarning, stacklevel=3)
        return self.fn(*arguments)

    def _flat(self, build: _Build, donated: list[Any], others: list[Any]) -> Any:
        arrays = {True: donated, False: others}
        return self.fn(
            *tree.map(lambda x: arrays[x.donated][x.i] if isinstance(x, _Place) else x, build.like)
        )

    def explain(self) -> str:
        """How often JAX has compiled it."""
        compiled = f"backend jax: jax.jit, compiled {self._call._cache_size()} times"
        return "\n".join([compiled, *sorted(self._said)])


def _is_frozen(leaf: Any) -> bool:
    return isinstance(leaf, tree.Frozen)


def _is_input(x: Any) -> bool:
    """Whether it is an array or a number, which may be another at each call."""
    return hasattr(x, "dtype") or (isinstance(x, int | float) and not isinstance(x, bool))
