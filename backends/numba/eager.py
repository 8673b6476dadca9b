"""Calls of ops on NumPy's arrays, each as a program of that op, by the kernels of programs.

A program is recorded for each kind of arguments: shapes, dtypes, strides and options. A call takes
some 50 us of Python, so calls with fewer than `LEAST` elements use NumPy's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from xformer import tree
from xformer.backends.arrays import refusal
from xformer.backends.numba.program.binding import layout_of
from xformer.backends.numba.program.run import Recorded, placed
from xformer.backends.numba.program.traced import Traced, Unrecorded, constant
from xformer.backends.numba.tuning import LEAST
from xformer.backends.numpy.leaves import share_no_memory
from xformer.backends.numpy.threads import n_threads
from xformer.dispatch import Overridable, chosen_kernels, is_inference, is_reference_only
from xformer.ops.random_bits import RandomKey, require_key

KEPT = 512  # programs

_programs: dict[Any, _Program | str] = {}  # by kind, or why there is none


class Eager:
    """A kernel of NumPy's arrays.

    products: whether the op is mostly matmuls; with `kernels("mkl")` it is then left to MKL.
    donates: arguments that a call with donate=True may write over. varying: options whose numbers
    differ from call to call. least: how many elements all arguments have together, at least.
    """

    def __init__(
        self,
        op: Overridable[..., Any],
        *,
        products: bool = False,
        donates: Sequence[int] = (),
        varying: Sequence[str] = (),
        least: int = LEAST,
    ) -> None:
        self.op, self.__name__, self.__signature__ = op, op.__name__, signature(op)
        self.products, self.donates, self.varying = products, tuple(donates), tuple(varying)
        self.least = least

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As the op, where `unsupported` has no reason."""
        call = self._call(args, options)
        program = call.program()
        assert not isinstance(program, str), program
        try:
            results = program.run(call.inputs)
        except ValueError:
            self.op.reference(*args, **options)  # names the op, and which of its arguments is wrong
            raise
        if not self.op.has_backward:
            return _values(results)
        y, cache = results
        return _values(y), None if cache is None else Saved(cache)

    def unsupported(self, *args: Any, **options: Any) -> str | None:
        """Why there is no program of these arguments, or NumPy's kernels are better."""
        if self.products and chosen_kernels() == "mkl":
            return "products of matrices are MKL's"
        if options.get("kv_cache") is not None:
            return "a text that grows has other shapes at each call"
        call = self._call(args, options)
        others = [x for x in call.inputs if x.dtype.kind == "f" and x.dtype != np.float32]
        if not call.inputs or call.inputs[0].dtype != np.float32 or len(others) > len(self.varying):
            return "only float32"
        if sum([x.size for x in call.inputs]) < self.least:
            return f"fewer than {self.least} elements"
        if call.donated and not share_no_memory(call.inputs):
            return "arrays that may be written over share memory"
        program = call.program()
        return program if isinstance(program, str) else program.python

    def _call(self, args: Any, options: dict[str, Any]) -> _Call:
        given = {name: self._as_input(name, x) for name, x in options.items()}
        donated = self.donates if options.get("donate", False) else ()
        return _Call(self.op, (*args, given), donated)

    def _as_input(self, name: str, x: Any) -> Any:
        """An option, as an array where each call has another number."""
        if isinstance(x, RandomKey):
            require_key(self.op.__name__, x, name)
            return x._replace(step=np.asarray(x.step, np.int64))
        return np.asarray(x, np.float64) if name in self.varying else x


class Saved(NamedTuple):
    """The cache of an op."""

    cache: Any  # that of its kernel, with NumPy's arrays instead of the program's

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def backward(self, *dys: Any) -> Any:
        """The gradients, in new arrays. A dy of 1, as for a loss, skips the multiplication."""
        call = _Call(_backward, (self.cache, *map(_gradient, dys), {}), shares=False)
        program = call.program()
        if isinstance(program, str):
            raise TypeError(f"backward: {program}")
        return _values(program.run(call.inputs))


def _gradient(dy: Any) -> Any:
    """dy as an array; a constant where it is the 1 of a loss."""
    if isinstance(dy, np.generic):
        dy = np.asarray(dy)
    if dy is not None and not isinstance(dy, np.ndarray):
        raise TypeError(f"backward: dy must be an array of numpy, got {dy!r:.60}")
    is_one = dy is not None and dy.ndim == 0 and dy.dtype == np.float32 and dy == 1
    return tree.Constant(1.0) if is_one else dy


def _backward(cache: Any, *dys: Any) -> Any:
    one = constant(np.ones((), np.float32))
    return cache.backward(*(one if isinstance(dy, tree.Constant) else dy for dy in dys))


class _Program(NamedTuple):
    recorded: Recorded
    like: Any  # its results, as a tree of arrays without values, but for constants
    python: str | None  # what of it would run as Python

    def run(self, inputs: list[Any]) -> Any:
        results = iter(self.recorded.run(inputs))
        return tree.map(lambda x: next(results) if _is_result(x) else x, self.like)


def _is_result(x: Any) -> bool:
    return isinstance(x, Traced) and not x.is_constant


def _values(results: Any) -> Any:
    """The results, constants among them as arrays."""
    return tree.map(lambda x: np.array(x) if isinstance(x, Traced) else x, results)


class _Call:
    """fn(*args, **options), of trees with arrays. args: the options are the last of them."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        donated: Sequence[int] = (),
        *,
        shares: bool = True,
    ) -> None:
        self.fn, self.args, self.donated, self.shares = fn, args, list[int](), shares
        contexts = n_threads(), is_inference(), is_reference_only()
        self.inputs, kinds = list[Any](), [fn, donated, contexts]
        for i, arg in enumerate(args):
            leaves, nodes = tree.parts(arg)
            kinds.append(nodes)
            for leaf in leaves:
                x = tree.value(leaf)
                if type(x) is not np.ndarray and (why := refusal(type(x))) is not None:
                    name = fn.__name__.lstrip("_")
                    raise TypeError(f"{name}: arguments must hold arrays, got {why}")
                if not isinstance(x, np.ndarray):
                    kinds.append((type(leaf), leaf))
                    continue
                x = placed(x, writeable=i in donated)
                if i in donated:
                    self.donated.append(len(self.inputs))
                self.inputs.append(x)
                kinds.append((type(leaf), x.shape, x.dtype, x.strides))
        self.kind = tuple(kinds)

    def program(self) -> _Program | str:
        """The program of this kind of call, recorded if it is new; or why there cannot be one."""
        found = _programs.get(self.kind)
        if found is None:
            if len(_programs) >= KEPT:
                _programs.clear()
            found = _programs[self.kind] = self._recorded()
        return found

    def _recorded(self) -> _Program | str:
        likes: list[Any] = []

        def flat(*traced: Traced) -> list[Traced]:
            rest = iter(traced)
            args = tree.map(lambda x: next(rest) if isinstance(x, np.ndarray) else x, self.args)
            *own, options = args
            likes.append(self.fn(*own, **options))
            return [x for x in map(tree.value, tree.parts(likes[0])[0]) if _is_result(x)]

        layouts = [layout_of(x) for x in self.inputs]
        try:
            recorded = Recorded(flat, layouts, n_threads(), self.donated, shares=self.shares)
        except Unrecorded as error:
            return f"not recorded: {error}"
        is_native = all(native for native, _ in recorded.runs)
        return _Program(recorded, likes[0], None if is_native else recorded.explain())
