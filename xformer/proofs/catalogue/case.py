"""One case of the catalogue, and helpers that several cases share."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

from xformer import backends, layers
from xformer.backends import Backend, Generator
from xformer.base import tree
from xformer.base.typing import Array
from xformer.dispatch import reference_only
from xformer.ops import RandomKey
from xformer.proofs.gradcheck import SMALLEST, Report, Row, gradcheck

Function = Callable[..., tuple[Any, Any]]
Make = Callable[[Generator, Backend], tuple[Function, tuple[Any, ...]]]
Draw = Callable[[Generator, Backend], Array]
Options = dict[str, Any]

FLOAT32 = 1e-3  # allowed relative error of a gradient of many float32 operations
KEY = RandomKey(seed=7, step=3)
DEAD_QUERY = (..., 2, slice(None))  # a query without an allowed key
DEAD_BATCH = (1,)


@dataclass(frozen=True)
class Case:
    """One function to check: `fn(*args)` returns (y, cache), with gradients for all args.

    group: "ops", "layers" or "models".
    name: the subject and a note, such as "linear: no b".
    make: returns fn and args, from a generator and a backend.
    """

    group: str
    name: str
    make: Make

    @property
    def subject(self) -> str:
        """The name of the op, layer or model that the case checks."""
        return self.name.partition(":")[0]

    def build(self, backend: Backend, dtype: str = "float64") -> tuple[Function, tuple[Any, ...]]:
        """(fn, args) on a backend. The values are the same on every backend and in every run."""
        return self.make(backend.generator(zlib.crc32(self.name.encode()), dtype), backend)

    def check(self, backend: Backend, **options: Any) -> Report:
        """The report of `gradcheck` for the case on a backend.

        options: of `gradcheck`.

        Only fn runs on the backend. The comparison runs on the host, because JAX would compile it
        again for every shape. With `exact` all runs on the backend.
        """
        fn, exact_args = self.build(backend)
        if options.get("exact"):
            named = update_wrapper(lambda *args: fn(*args), fn)
            named.__name__ = self.name
            return gradcheck(named, *exact_args, **options)
        _, args = self.build(backends.get("numpy"))

        def on_backend(*args: Any) -> tuple[Any, Any]:
            y, cache = fn(*_move(args, backend.asarray))
            return _move(y, backend.to_numpy), _HostCache(cache, backend)

        update_wrapper(on_backend, fn)
        on_backend.__name__ = self.name
        return gradcheck(on_backend, *args, **options)

    def check_float32(self, backend: Backend) -> Report:
        """A report of a backend's gradients in float32, compared with differences in float64.

        It is for kernels that support only float32. The differences are of the reference's values.
        The last row compares the kernels' values with the reference's.
        """
        exact, args = self.build(backends.get("numpy"))
        fn, _ = self.build(backend, "float32")
        distances: list[float] = []

        def in_both(*args: Any) -> tuple[Any, Any]:
            with reference_only():
                y, _ = exact(*args)
            if distances:  # from the second call on only y is needed
                return y, None
            y_float32, cache = fn(*_move(args, lambda x: backend.asarray(x, "float32")))
            distances.append(_distance(_move(y_float32, backend.to_numpy), y))
            return y, _Float32Cache(cache, backend)

        in_both.__name__ = self.name
        update = {"__signature__": inspect.signature(fn)}
        vars(in_both).update(update)
        report = gradcheck(in_both, *args, rtol=FLOAT32, alone=False)
        row = Row("values", 0.0, 0.0, distances[0], "differ from the reference's")
        return report._replace(rows=(*report.rows, row))


@dataclass(frozen=True)
class _Float32Cache:
    """A float32 cache whose gradients are converted to float64 on the host."""

    cache: Any
    backend: Backend

    def backward(self, *dy: Any) -> Any:
        narrow = _move(dy, lambda x: self.backend.asarray(x, "float32"))
        return _move(self.cache.backward(*narrow), lambda x: x.astype("float64"))


def _distance(got: Any, wanted: Any) -> float:
    """The largest distance of two trees' arrays, each relative to its largest number."""
    pairs = zip(tree.flatten({"": got}).values(), tree.flatten({"": wanted}).values(), strict=True)
    return max(
        float(abs(a - b).max(initial=0) / max(abs(b).max(initial=0), SMALLEST)) for a, b in pairs
    )


@dataclass(frozen=True)
class _HostCache:
    """A cache of a backend whose gradients are transferred to the host."""

    cache: Any
    backend: Backend

    def backward(self, *dy: Any) -> Any:
        return _move(self.cache.backward(*_move(dy, self.backend.asarray)), self.backend.to_numpy)


def _move(arrays: Any, mover: Callable[[Any], Any]) -> Any:
    return tree.map(mover, arrays)


def drawn(rng: Generator, backend: Backend, options: Options) -> Options:
    """`options` with each function replaced by the array that it draws."""
    return {k: v(rng, backend) if callable(v) else v for k, v in options.items()}


def called(keywords: Options) -> Options:
    """`keywords` of a layer, with the fields of its context as one `layers.Context`."""
    context = {name: keywords[name] for name in layers.Context._fields if name in keywords}
    rest = {name: value for name, value in keywords.items() if name not in context}
    return {"context": layers.Context(**context), **rest}


def mask(shape: tuple[int, ...], dead: tuple[Any, ...] | None = None) -> Draw:
    """A function that draws booleans: two of three are True, all at the index `dead` are False."""

    def draw(rng: Generator, backend: Backend) -> Array:
        host = backend.to_numpy(rng.integers(shape, high=3)) > 0
        if dead is not None:
            host[dead] = False
        return backend.asarray(host)

    return draw


@dataclass(frozen=True)
class Without:
    """A cache without the gradients of arguments that are not trained.

    places: their indices among the gradients, which must be None.
    """

    cache: Any
    places: tuple[int, ...]

    def backward(self, *dy: Any) -> Any:
        """The gradients of `cache` without those at `places`.

        AssertionError if one of these is not None.
        """
        grads = self.cache.backward(*dy)
        if any(grads[i] is not None for i in self.places):
            raise AssertionError("a gradient was computed of what is not trained")
        return tuple(grad for i, grad in enumerate(grads) if i not in self.places)


def random(rng: Generator, like: Any) -> Any:
    """Random parameters with the shapes of `like`.

    Matrices have unit gain; other arrays have mean 1/2 and standard deviation 1/2.
    """

    def draw(a: Array) -> Array:
        if a.ndim == 2:
            return rng.normal(a.shape, std=a.shape[0] ** -0.5)
        return rng.normal(a.shape, mean=0.5, std=0.5)

    return tree.map(draw, like)
