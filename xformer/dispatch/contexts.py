"""Contexts that decide which implementation an op runs, and whether it saves for backward.

Other threads and tasks are not affected. Use each around a call, never across a yield: a generator
would leave its caller in the context.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from xformer.base.choices import require_one_of
from xformer.base.printing import short

Observer = Callable[..., Callable[..., Any]]  # (op, its implementation) -> what runs instead

# Name in `kernels` -> the library that its kernels for NumPy arrays are registered for.
SETS = {"numpy": "numpy", "numba": "numba", "mkl": "numba"}
CHOSEN: ContextVar[str] = ContextVar("kernels", default="numpy")
REFERENCE_ONLY: ContextVar[bool] = ContextVar("reference_only", default=False)
# Ops that run their references, whatever the rest does.
WITHOUT_KERNELS: ContextVar[tuple[Any, ...]] = ContextVar("without_kernels", default=())
UNFUSED: ContextVar[bool] = ContextVar("unfused", default=False)
INFERENCE: ContextVar[bool] = ContextVar("inference", default=False)
OBSERVER: ContextVar[Observer | None] = ContextVar("observer", default=None)

# Those that decide which function an op runs, and what it returns.
DECIDING: Any = CHOSEN, REFERENCE_ONLY, WITHOUT_KERNELS, UNFUSED, INFERENCE


@short
class NoCache(NamedTuple):
    """The cache that ops and models return within `inference()`. It has no backward."""

    def backward(self, *dy: Any) -> Any:
        """Raise RuntimeError."""
        raise RuntimeError(f"backward: the cache was {_MADE}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: the cache was {_MADE}")


_MADE = "made within inference(), which saves nothing"


def is_reference_only() -> bool:
    """Whether the call is within `reference_only()`."""
    return REFERENCE_ONLY.get()


@contextmanager
def kernels(name: Any) -> Iterator[None]:
    """A context in which the kernels of backend `name` run for NumPy arrays.

    name: "numpy"; "numba": its kernels are tried before NumPy's; "mkl": like "numba", with matmuls
        by Intel's MKL. Or the backend of that name.

    Other threads and tasks are not affected. `active()` of a backend of that name enters this
    context, and so do functions that get the backend as an argument. Use it around a call, never
    across a yield: a generator would leave its caller in the context.

    ValueError for another name. `backends.Unusable`, an ImportError that names the extra, if the
    backend is not installed.
    """
    name = getattr(name, "name", name)
    if name not in SETS:
        require_one_of("kernels: name", name, SETS)
    if name != "numpy":
        _require_usable(name)
    token = CHOSEN.set(name)
    try:
        yield
    finally:
        CHOSEN.reset(token)


def chosen_kernels() -> str:
    """The backend whose kernels run for NumPy arrays: the name in `kernels`, else "numpy"."""
    return CHOSEN.get()


@functools.cache  # errors are not cached
def _require_usable(name: str) -> None:
    importlib.import_module("xformer.dispatch.registry").require_kernels(name)


@contextmanager
def unfused() -> Iterator[None]:
    """A context in which ops that call other ops run their references, and the others kernels.

    So the cache of a model has a node for each layer and each op, as `xf.watch` and `xf.edit` need.
    """
    token = UNFUSED.set(True)
    try:
        yield
    finally:
        UNFUSED.reset(token)


@contextmanager
def inference() -> Iterator[None]:
    """A context in which ops save nothing for backward, so that a forward needs less memory.

    A backward then raises RuntimeError. Use it around a call, never across a yield: a generator
    would leave its caller in the context. On JAX, the remaining caches hold only arrays and
    numbers, so a function compiled by `jax.jit` may return them.
    """
    token = INFERENCE.set(True)
    try:
        yield
    finally:
        INFERENCE.reset(token)


@contextmanager
def observed(observer: Observer | None) -> Iterator[None]:
    """A context in which `observer(op, run)` returns the function that is called instead of `run`.

    run: the chosen kernel, or the reference. None: no observer, as outside.
    """
    token = OBSERVER.set(observer)
    try:
        yield
    finally:
        OBSERVER.reset(token)


def observer() -> Observer | None:
    """The observer of the calls in this context; None if there is none."""
    return OBSERVER.get()


def is_inference() -> bool:
    """Whether the call is within `inference()`, so that nothing must be saved for backward."""
    return INFERENCE.get()


def current_contexts() -> tuple[Any, ...]:
    """The values of all contexts that decide which function an op runs, and what it returns."""
    return tuple(x.get() for x in DECIDING)


@contextmanager
def again(values: tuple[Any, ...]) -> Iterator[None]:
    """Set these values of `current_contexts()`: backward runs a forward again as it ran first."""
    tokens = [x.set(value) for x, value in zip(DECIDING, values, strict=True)]
    try:
        yield
    finally:
        for x, token in zip(DECIDING, tokens, strict=True):
            x.reset(token)


def saved(cache: Any) -> Any:
    """`cache`, which only backward uses; NoCache within `inference()`."""
    return NoCache() if INFERENCE.get() else cache
