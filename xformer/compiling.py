"""`xformer.compile`: run a function of trees of arrays as one compiled call of their library.

    step = xf.compile(training_step, donate=(0, 1))
    params, state, loss = step(params, state, tokens, targets, 3e-4)
    print(step.explain())

On NumPy with the extra `numba`, the function is recorded once for each set of shapes and run on
threads (`docs/compile.md`). On CuPy it becomes a CUDA graph, on JAX `jax.jit` compiles it. Other
libraries call the function itself.
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
    """A compiled version of `fn(*trees) -> tree`, which computes the same.

    fn: a pure function: its result depends only on its arguments, and it reads shapes and dtypes of
        arrays, but not their values. Arrays and numbers of the arguments may change from call to
        call. Everything else (names, booleans, None, shapes, dtypes) is compiled in: each
        combination is compiled once.
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
        self._calls: dict[Any, Any] = {}  # array type and device -> compiled call

    def __call__(self, *arguments: Any) -> Any:
        """The result of fn. ValueError if no argument has an array, or donate is out of range."""
        return self._call(arguments)(*arguments)

    def timed(self, *arguments: Any) -> str:
        """A table of the time of each instruction of a program, the longest first.

        See `docs/compile.md`. The arguments are not changed. ValueError if the library has no
        programs, and if a call raises it. TypeError for a function that cannot be recorded.
        """
        call = self._call(arguments)
        if not hasattr(call, "timed"):
            raise ValueError(f"timed: a call is no program here: {call.explain()}")
        table: str = call.timed(*arguments)
        return table

    def _call(self, arguments: tuple[Any, ...]) -> Any:
        """The compiled call for the library and device of the arguments."""
        if any(i >= len(arguments) for i in self.donate):
            raise ValueError(
                f"compile: donate must be below the {len(arguments)} arguments, got {self.donate}"
            )
        first = _first(arguments)
        if first is None:
            raise ValueError("compile: an argument must hold an array, got none")
        where = type(first), str(device(first))  # CuPy's devices cannot be keys
        if where not in self._calls:
            backend = replace(backends.backend_of(first), device=device(first))
            self._calls[where] = backend.compiled(self.fn, self.donate) or _Plain(self.fn, backend)
        return self._calls[where]

    def explain(self) -> str:
        """A text: what is compiled, what is not, and why."""
        if not self._calls:
            return "nothing is compiled yet: the first call compiles"
        return "\n".join(call.explain() for call in self._calls.values())

    def __str__(self) -> str:
        """The listing of the compiled programs, if the library has one."""
        return "\n\n".join(map(str, self._calls.values()))


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
    return first is not None and backends.backend_of(first).records(first.dtype)


def bucket(length: int) -> int:
    """The length to which texts are padded, so that programs are recorded for few lengths.

    Up to 128 it is a multiple of 16; above, a multiple of 1/8 of the next power of two. So a long
    text gets at most 1/8 more tokens.
    """
    step = max(16, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


class _Plain:
    """The function without compilation, for libraries that cannot compile."""

    def __init__(self, fn: Callable[..., Any], backend: backends.Backend) -> None:
        self.fn, self.backend = fn, backend

    def __call__(self, *arguments: Any) -> Any:
        return self.fn(*arguments)

    def explain(self) -> str:
        return f"backend {self.backend.name} compiles nothing here: the function is called as it is"


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
