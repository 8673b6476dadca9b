"""`xformer.compile`: run a function of trees of arrays as one compiled call of their library.

    step = xf.compile(training_step, donate=(0, 1))
    params, state, loss = step(params, state, tokens, targets, 3e-4)
    print(step.explain())

On NumPy with the extra `numba`, the function is recorded once for each set of shapes and run on
threads (`docs/compile.md`). On CuPy it becomes a CUDA graph, on JAX `jax.jit` compiles it. Other
libraries call the function itself.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from array_api_compat import device, is_array_api_obj, is_numpy_array

from xformer.base import tree
from xformer.base.keys import Reads, Unkeyed
from xformer.base.typing import Array
from xformer.dispatch import current_contexts, inference, registry
from xformer.dispatch.checks import require_sizes
from xformer.ops.random_bits import RandomKey

KEPT = 16  # sets of values that a function reads besides its arguments


def compile(fn: Callable[..., Any], *, donate: int | Sequence[int] = ()) -> Compiled:
    """A compiled version of `fn(*trees) -> tree`, which computes the same.

    fn: a pure function: its result depends only on its arguments, and it reads shapes and dtypes of
        arrays, but not their values. Arrays and numbers of the arguments, and steps of random keys,
        may change from call to call. Everything else is compiled in: names, booleans, None, shapes,
        dtypes, contexts such as `inference()`, and what fn reads of closures, globals and
        attributes. Each combination is compiled once.
    donate: indices of arguments whose arrays the call may overwrite, except for `tree.Frozen` ones;
        they must not be used afterwards. Results of the same shapes and dtypes, in the same order,
        reuse their memory.

    If the library cannot compile fn, a RuntimeWarning says why, and fn itself is called.
    TypeError if fn is not a function; ValueError if donate is not indices.
    """
    return Compiled(fn, donate)


class Compiled:
    """A compiled function, as `compile` returns it."""

    def __init__(self, fn: Callable[..., Any], donate: int | Sequence[int] = ()) -> None:
        if not callable(fn):
            raise TypeError(f"compile: fn must be a function, got {fn!r:.60}")
        numbers = (donate,) if isinstance(donate, int) else tuple(donate)
        names = {f"donate[{i}]": number for i, number in enumerate(numbers)}
        self.fn, self.donate = fn, tuple(require_sizes("compile", 0, **names))
        self.__wrapped__ = fn
        self._reads = {host: Reads(fn, host_values=host) for host in (True, False)}
        # By the array type, its device, the contexts, and what the function reads besides its
        # arguments: the compiled call, or the function itself.
        self._calls: dict[Any, Any] = {}
        self._lock = threading.RLock()  # a signal handler may call, too

    def __call__(self, *arguments: Any) -> Any:
        """The result of fn. ValueError if no argument has an array, or donate is out of range.

        Within a function that is compiled, differentiated by `jvp` or rounded it is fn itself.
        """
        call, inputs = self._call(arguments)
        return call(*inputs)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """A compiled method, as a function in a class is one: `owner` is the first argument."""
        return self if owner is None else partial(self, owner)

    def __reduce__(self) -> Any:
        """A copy compiles again."""
        return Compiled, (self.fn, self.donate)

    def timed(self, *arguments: Any) -> str:
        """A table of the time of each instruction of a program, the longest first.

        See `docs/compile.md`. The arguments are not changed. ValueError if the library has no
        programs, and if a call raises it. TypeError for a function that cannot be recorded.
        """
        call, inputs = self._call(arguments)
        if not hasattr(call, "timed"):
            raise ValueError(f"timed: a call is no program here: {call.explain()}")
        table: str = call.timed(*inputs)
        return table

    def _call(self, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The compiled call for these arguments, and the arguments for it."""
        if any(i >= len(arguments) for i in self.donate):
            raise ValueError(
                f"compile: donate must be below the {len(arguments)} arguments, got {self.donate}"
            )
        leaves: dict[type, Any] = {}
        _collect(arguments, leaves)
        arrays = [x for kind, x in leaves.items() if kind is not RandomKey and is_array_api_obj(x)]
        if not arrays:
            raise ValueError("compile: an argument must hold an array, got none")
        first = arrays[0]
        if any(type(x).__module__.startswith("xformer.") for x in arrays):
            return _Plain(self.fn, f"{type(first).__name__} arrays are not compiled"), arguments
        fn = self.fn
        if RandomKey in leaves:
            arguments, fn = _fixed(arguments), _WithKeys(fn)
        with self._lock:
            return self._of(first, fn, leaves), arguments

    def _of(self, first: Array, fn: Callable[..., Any], kinds: Iterable[type]) -> Any:
        """The compiled call of fn, made if it is new.

        first: an array of the arguments. kinds: the types of all their leaves
        """
        # CuPy's devices have no hash.
        where = type(first), str(device(first)), type(fn), current_contexts()
        backend = replace(registry.backend_of(first), device=device(first))
        try:
            key = where, self._reads[not is_numpy_array(first)].key(kinds)
        except Unkeyed as error:
            key = where, str(error)
        if key not in self._calls and sum(where == known for known, _ in self._calls) >= KEPT:
            key = where, f"what it reads besides its arguments has changed {KEPT} times"
        if key in self._calls:
            return self._calls[key]
        call: Any = backend.compiled(fn, self.donate)
        if call is None:
            call = _Plain(
                fn, f"backend {backend.name} compiles nothing here: the function is called as it is"
            )
        elif isinstance(key[1], str):
            why = f"backend {backend.name}: not compiled: {key[1]}; the function is called as it is"
            call = _Plain(fn, why)
            warnings.warn(why, RuntimeWarning, stacklevel=4)
        self._calls[key] = call
        return call

    def explain(self) -> str:
        """A text: what is compiled, what is not, and why."""
        if not self._calls:
            return "nothing is compiled yet: the first call compiles"
        return "\n".join(call.explain() for call in list(self._calls.values()))

    def __str__(self) -> str:
        """The listing of the compiled programs, if the library has one."""
        return "\n\n".join(map(str, list(self._calls.values())))


class Forward:
    """`fn(params, *inputs)` within `inference()`, for many inputs of few shapes.

    The function is compiled if `records(params)`. The results are new arrays.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.compiled = fn, Compiled(fn)

    def __call__(self, params: Any, *inputs: Any) -> Any:
        """The result of fn."""
        with inference():
            call = self.compiled if records(params) else self.fn
            return call(params, *inputs)


def records(params: Any) -> bool:
    """Whether `Forward` compiles functions of these parameters, by their backend and dtype."""
    first = _first([params])
    return first is not None and registry.backend_of(first).records(first.dtype)


def bucket(length: int) -> int:
    """The length to which texts are padded, so that programs are recorded for few lengths.

    Up to 128 it is a multiple of 16; above, a multiple of 1/8 of the next power of two. So a long
    text gets at most 1/8 more tokens.
    """
    step = max(16, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


class _Plain:
    """The function without compilation, and why."""

    def __init__(self, fn: Callable[..., Any], why: str) -> None:
        self.fn, self.why = fn, why

    def __call__(self, *arguments: Any) -> Any:
        return self.fn(*arguments)

    def explain(self) -> str:
        return self.why


class _WithKeys:
    """fn for arguments from `_fixed`: it gets keys whose parts are numbers again."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *arguments: Any) -> Any:
        return self.fn(*tree.map_nodes(self._freed, arguments, RandomKey))

    @staticmethod
    def _freed(name: str, key: Any) -> RandomKey:
        parts: Any = (x.value if isinstance(x, tree.Constant) else x for x in key)
        return RandomKey(*parts)


def _fixed(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with the seed and the site of each random key compiled in; the step is an input."""

    def fixed(name: str, key: Any) -> RandomKey:
        seed, site = (tree.Constant(x) for x in (key.seed, key.site))
        return key._replace(seed=seed, site=site)

    return tree.map_nodes(fixed, arguments, RandomKey)


def _collect(parts: Iterable[Any], leaves: dict[type, Any]) -> None:
    """Add the first leaf of each type in trees, and the first random key."""
    for part in parts:
        part = part.value if isinstance(part, tree.Frozen) else part
        if type(part) in leaves and not isinstance(part, RandomKey):
            continue
        if isinstance(part, RandomKey):
            leaves[RandomKey] = part
        if isinstance(part, tree.INNER):
            _collect(part.values() if isinstance(part, dict) else part, leaves)
        else:
            leaves[type(part)] = part


def _first(parts: Iterable[Any]) -> Array | None:
    """The first array in trees; None if there is none."""
    for part in parts:
        if isinstance(part, tree.INNER):
            array = _first(part.values() if isinstance(part, dict) else part)
        else:
            leaf = tree.value(part)
            array = leaf if is_array_api_obj(leaf) else None
        if array is not None:
            return array
    return None
