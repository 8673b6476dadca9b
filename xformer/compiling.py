"""`xformer.compile`: a function of trees of arrays as one call of the library they belong to.

    step = xf.compile(training_step, donate=(0, 1))
    params, state, loss = step(params, state, tokens, targets, 3e-4)
    print(step.explain())

On NumPy with the extra `numba` it is recorded once for each set of shapes and run on threads
(`docs/compile.md`), on CuPy it is a CUDA graph, on JAX `jax.jit`; elsewhere the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from array_api_compat import device, is_array_api_obj

from xformer import backends, tree
from xformer.checks import require_sizes
from xformer.dispatch import inference
from xformer.typing import Array


def compile(fn: Callable[..., Any], *, donate: int | Sequence[int] = ()) -> Compiled:
    """`fn(*trees) -> tree` as one call, which computes the same.

    fn must be pure: what it gives depends on its arguments alone, and what it asks of arrays is
    their shapes and dtypes, not their values. Arrays and numbers of the arguments may differ from
    call to call; all else of them (names, booleans, None) belongs to what is compiled, as shapes
    and dtypes do: for each combination anew. donate: numbers of arguments whose arrays the call may
    write over, but for those that are `tree.Frozen`; they are not to be used again. What comes back
    in their place, in order and of the same shapes and dtypes, needs no memory of its own.

    Where the library cannot make it one call, a RuntimeWarning says why, and fn is called.
    TypeError for fn that is no function; ValueError for donate that are no numbers of arguments.
    """
    return Compiled(fn, donate)


class Compiled:
    """What `compile` gives."""

    def __init__(self, fn: Callable[..., Any], donate: int | Sequence[int] = ()) -> None:
        if not callable(fn):
            raise TypeError(f"compile: fn must be a function, got {fn!r:.60}")
        numbers = (donate,) if isinstance(donate, int) else tuple(donate)
        names = {f"donate[{i}]": number for i, number in enumerate(numbers)}
        self.fn, self.donate = fn, tuple(require_sizes("compile", 0, **names))
        self._calls: dict[Any, Any] = {}  # of each library and device

    def __call__(self, *arguments: Any) -> Any:
        """As fn. ValueError where no argument holds an array, or donate names one that is not."""
        return self._call(arguments)(*arguments)

    def timed(self, *arguments: Any) -> str:
        """What each instruction of a call on these arguments takes, the longest first.

        A table of a program (`docs/compile.md`). They are left as they are. ValueError as a call,
        and where the library has no programs; TypeError for what cannot be recorded.
        """
        call = self._call(arguments)
        if not hasattr(call, "timed"):
            raise ValueError(f"timed: a call is no program here: {call.explain()}")
        found: str = call.timed(*arguments)
        return found

    def _call(self, arguments: tuple[Any, ...]) -> Any:
        """What arrays of this library and device are given to."""
        if any(i >= len(arguments) for i in self.donate):
            raise ValueError(
                f"compile: donate must be below the {len(arguments)} arguments, got {self.donate}"
            )
        first = _first(arguments)
        if first is None:
            raise ValueError("compile: an argument must hold an array, got none")
        where = type(first), device(first)
        if where not in self._calls:
            place = replace(backends.backend_of(first), device=device(first))
            self._calls[where] = place.compiled(self.fn, self.donate) or _Plain(self.fn, place)
        return self._calls[where]

    def explain(self) -> str:
        """What a call does: what is compiled, and what is not, and why."""
        if not self._calls:
            return "nothing is compiled yet: it is at the first call"
        return "\n".join(call.explain() for call in self._calls.values())

    def __str__(self) -> str:
        """The listing of what is compiled, where the library has one."""
        return "\n\n".join(map(str, self._calls.values()))


class Forward:
    """`fn(params, *inputs)` within `inference()`, for calls on many inputs of few shapes.

    A call of `compile` where the backend `records`. Results are new arrays.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.compiled = fn, Compiled(fn)

    def __call__(self, params: Any, *inputs: Any) -> Any:
        """As fn."""
        with inference():
            call = self.compiled if records(params) else self.fn
            return call(params, *inputs)


def records(params: Any) -> bool:
    """Whether `Forward` compiles functions of these parameters, by their backend and dtype."""
    first = _first([params])
    return first is not None and backends.backend_of(first).records(first.dtype)


def bucket(length: int) -> int:
    """The length that texts are padded to where programs are recorded for each length.

    A multiple of 16 up to 128, of an eighth of the next power of two above: few lengths, and of
    long texts at most an eighth more tokens.
    """
    step = max(16, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


class _Plain:
    """The function itself, where its library has nothing better."""

    def __init__(self, fn: Callable[..., Any], place: backends.Backend) -> None:
        self.fn, self.place = fn, place

    def __call__(self, *arguments: Any) -> Any:
        return self.fn(*arguments)

    def explain(self) -> str:
        return f"backend {self.place.name} compiles nothing here: the function is called as it is"


def _first(parts: Iterable[Any]) -> Array | None:
    """The first array of trees."""
    for part in parts:
        if isinstance(part, tree.INNER):
            found = _first(part.values() if isinstance(part, dict) else part)
        else:
            leaf = tree.value(part)
            found = leaf if is_array_api_obj(leaf) else None
        if found is not None:
            return found
    return None
