"""One gradient check to make, and what several of them are made of."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

from xformer import backends, tree
from xformer.backends import Backend, Generator
from xformer.gradcheck import Report, gradcheck
from xformer.ops import Key
from xformer.typing import Array

Function = Callable[..., tuple[Any, Any]]
Make = Callable[[Generator, Backend], tuple[Function, tuple[Any, ...]]]
Draw = Callable[[Generator, Backend], Array]
Options = dict[str, Any]

KEY = Key(seed=7, step=3)
DEAD_QUERY = (..., 2, slice(None))  # one that may attend to nothing
DEAD_BATCH = (1,)


@dataclass(frozen=True)
class Case:
    """One function to check: `fn(*args)` gives (y, cache), with gradients for all of args.

    name: "linear: no b", the thing first. room: "ops", "layers" or "models".
    """

    room: str
    name: str
    make: Make

    @property
    def subject(self) -> str:
        """The op, layer or model that the case is about."""
        return self.name.partition(":")[0]

    def build(self, backend: Backend, dtype: str = "float64") -> tuple[Function, tuple[Any, ...]]:
        """fn and args on a backend: the same values on each, in every run."""
        return self.make(backend.generator(zlib.crc32(self.name.encode()), dtype), backend)

    def check(self, backend: Backend, **options: Any) -> Report:
        """`gradcheck` of the case on a backend; options are those of `gradcheck`.

        Only fn itself runs there. The comparison is made on the host: JAX would compile it anew
        for every shape.
        """
        fn, _ = self.build(backend)
        _, args = self.build(backends.get("numpy"))

        def on_backend(*args: Any) -> tuple[Any, Any]:
            y, cache = fn(*_move(args, backend.asarray))
            return _move(y, backend.to_numpy), _HostCache(cache, backend)

        update_wrapper(on_backend, fn)
        on_backend.__name__ = self.name
        return gradcheck(on_backend, *args, **options)


@dataclass(frozen=True)
class _HostCache:
    """A cache of a backend, for gradients that are on the host."""

    cache: Any
    backend: Backend

    def backward(self, *dy: Any) -> Any:
        return _move(self.cache.backward(*_move(dy, self.backend.asarray)), self.backend.to_numpy)


def _move(arrays: Any, mover: Callable[[Any], Any]) -> Any:
    return tree.map(mover, arrays)


def drawn(rng: Generator, backend: Backend, options: Options) -> Options:
    """`options`, with arrays in place of the functions that draw them."""
    return {k: v(rng, backend) if callable(v) else v for k, v in options.items()}


def mask(shape: tuple[int, ...], dead: tuple[Any, ...] | None = None) -> Draw:
    """Random booleans, two of three True, all False at the index `dead`."""

    def draw(rng: Generator, backend: Backend) -> Array:
        host = backend.to_numpy(rng.integers(shape, high=3)) > 0
        if dead is not None:
            host[dead] = False
        return backend.asarray(host)

    return draw


@dataclass(frozen=True)
class Without:
    """A cache less the gradients that are None since what they belong to is not trained."""

    cache: Any
    places: tuple[int, ...]

    def backward(self, *dy: Any) -> Any:
        """The other gradients."""
        grads = self.cache.backward(*dy)
        if any(grads[i] is not None for i in self.places):
            raise AssertionError("a gradient was computed of what is not trained")
        return tuple(grad for i, grad in enumerate(grads) if i not in self.places)


def random(rng: Generator, like: Any) -> Any:
    """Parameters of the shapes of `like`: weights of unit gain, the rest around 1/2."""

    def draw(a: Array) -> Array:
        if a.ndim == 2:
            return rng.normal(a.shape, std=a.shape[0] ** -0.5)
        return rng.normal(a.shape, mean=0.5, std=0.5)

    return tree.map(draw, like)
