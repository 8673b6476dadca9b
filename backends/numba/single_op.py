"""Run a call of one op on NumPy arrays as a program of that op.

A program is recorded for each kind of call: the op, shapes, dtypes, strides and options. A call
takes some 50 us of Python, so calls with fewer than `LEAST` elements use NumPy's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from pkgutil import iter_modules
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba import kernels
from xformer.backends.numba.program.binding import layout_of
from xformer.backends.numba.program.run import Recorded, gap_free
from xformer.backends.numba.program.traced import Traced, Unrecorded, constant
from xformer.backends.numba.tuning import LEAST
from xformer.backends.numpy.leaves import share_no_memory
from xformer.backends.numpy.threads import n_threads
from xformer.base import tree
from xformer.base.keys import Same, exact
from xformer.dispatch import Overridable, chosen_kernels, current_contexts
from xformer.dispatch.grad_callback import Ready, report
from xformer.dispatch.subclasses import refusal
from xformer.layers.protocol import Context
from xformer.ops.random_bits import RandomKey, require_key

KEPT = 512  # programs that are kept

KERNEL_FILES = {file.name for file in iter_modules(kernels.__path__)}  # ops with loops of their own

_programs: dict[Any, _Program | str] = {}  # by the kind of a call; a str says why there is none


class Eager:
    """A kernel of an op for NumPy arrays, which runs each call as a program.

    matmuls: whether the op is mostly matmuls; with `kernels("mkl")` MKL's kernel then computes it.
    donates: indices of the arguments that a call with donate=True may overwrite.
    varying: names of options that are inputs of the program, since their numbers differ between
        calls.
    least: the kernel is unsupported if all arguments together have fewer elements.
    file: the name of the file in `kernels` with the op's loops, which `explain` names; None: the
        name of the op, if there is such a file.
    """

    def __init__(
        self,
        op: Overridable[..., Any],
        *,
        matmuls: bool = False,
        donates: Sequence[int] = (),
        varying: Sequence[str] = (),
        least: int = LEAST,
        file: str | None = None,
    ) -> None:
        self.op, self.__name__, self.__signature__ = op, op.__name__, signature(op)
        self.matmuls, self.donates, self.varying = matmuls, tuple(donates), tuple(varying)
        self.least = least
        if (file := file or op.__name__) in KERNEL_FILES:
            self.__module__ = f"{kernels.__name__}.{file}"

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the op's result. Only for arguments for which `unsupported` returns None."""
        call = self._call(args, options)
        program = call.program()
        assert not isinstance(program, str), program
        try:
            results = program.run(call.inputs)
        except ValueError:
            # The reference raises an error that names the op and the wrong argument.
            self.op.reference(*args, **options)
            raise
        if not self.op.has_backward:
            return _values(results)
        y, cache = results
        return _values(y), None if cache is None else Saved(self.__name__, [cache])

    def unsupported(self, *args: Any, **options: Any) -> str | None:
        """Return why no program can run this call, or why NumPy's kernels are faster; else None."""
        if self.matmuls and chosen_kernels() == "mkl":
            return "MKL computes matmuls"
        if getattr(options.get("context"), "kv_cache", None) is not None:
            return "with a KV cache each call has new shapes"
        call = self._call(args, options)
        wider = [x for x in call.inputs if x.dtype.kind == "f" and x.dtype != np.float32]
        if not call.inputs or call.inputs[0].dtype != np.float32 or len(wider) > len(self.varying):
            return "only float32"
        if sum([x.size for x in call.inputs]) < self.least:
            return f"fewer than {self.least} elements"
        if call.donated and not share_no_memory(call.inputs):
            return "donated arrays share memory with other arguments"
        program = call.program()
        return program if isinstance(program, str) else program.python

    def _call(self, args: Any, options: dict[str, Any]) -> _Call:
        """Return the call of the op with its options as the last argument."""
        converted = {name: self._as_input(name, x) for name, x in options.items()}
        donated = self.donates if options.get("donate", False) else ()
        return _Call(self.op, (*args, converted), donated)

    def _as_input(self, name: str, x: Any) -> Any:
        """Return an option, with numbers that differ between calls as arrays."""
        if isinstance(x, Context):
            key = self._as_input("dropout_key", x.dropout_key)
            return x if key is None else x._replace(dropout_key=key)
        if isinstance(x, RandomKey):
            require_key(self.op.__name__, x, name)
            return x._replace(step=np.asarray(x.step, np.int64))
        return np.asarray(x, np.float64) if name in self.varying else x


class Saved(NamedTuple):
    """The cache of an op."""

    op_name: str
    # The kernel's cache, with NumPy arrays instead of the program's `Traced` arrays. It is in a
    # list, so that it is no node of a model's cache beside this one.
    kept: list[Any]

    def __getattr__(self, name: str) -> Any:
        if name == "backward_with":  # the kept cache's takes arrays of a program
            raise AttributeError(name)
        return getattr(self.kept[0], name)

    def backward(self, *dys: Any, ready: Ready | None = None) -> Any:
        """Return the gradients in new arrays. A dy of 1, as of a loss, is not multiplied with.

        ready: of `BlocksCache.backward`, for the op `blocks`, but called at the end, for all blocks
        """
        call = _Call(_backward, (self.kept[0], *map(_gradient, dys), {}), shares=False)
        program = call.program()
        if isinstance(program, str):
            raise TypeError(f"backward: {program}")
        grads = _values(program.run(call.inputs))
        if ready is not None:
            for i, dblock in reversed(list(enumerate(grads[1]))):
                report(ready, f"blocks.{i}", dblock)
        return grads


def _gradient(dy: Any) -> Any:
    """Return dy as an array, or as a constant if it is the float32 number 1, as of a loss."""
    if isinstance(dy, np.generic):
        dy = np.asarray(dy)
    if dy is not None and not isinstance(dy, np.ndarray):
        raise TypeError(f"backward: dy must be an array of numpy, got {dy!r:.60}")
    is_one = dy is not None and dy.ndim == 0 and dy.dtype == np.float32 and dy == 1
    return tree.Constant(1.0) if is_one else dy


def _backward(cache: Any, *dys: Any) -> Any:
    """Return cache.backward(*dys), with `tree.Constant` as the constant array 1."""
    one = constant(np.ones((), np.float32))
    return cache.backward(*(one if isinstance(dy, tree.Constant) else dy for dy in dys))


class _Program(NamedTuple):
    """A recorded program and the tree of its results."""

    recorded: Recorded
    like: Any  # the tree of results, whose leaves are `Traced` arrays
    python: str | None  # which instructions would run as Python; None if none would

    def run(self, inputs: list[Any]) -> Any:
        """Run the program; return the tree of results, with constants still `Traced`."""
        results = iter(self.recorded.run(inputs))
        return tree.map(lambda x: next(results) if _is_result(x) else x, self.like)


def _is_result(x: Any) -> bool:
    """Return whether a leaf is computed by the program."""
    return isinstance(x, Traced) and not x.is_constant


def _values(results: Any) -> Any:
    """Return the tree of results with `Traced` constants as new NumPy arrays."""
    return tree.map(lambda x: np.array(x) if isinstance(x, Traced) else x, results)


class _Call:
    """A call fn(*args[:-1], **args[-1]), whose arguments are trees with arrays.

    donated: indices of arguments that the call may overwrite. shares: as of `Recorded`.
    self.inputs are the arrays of the program, self.donated the indices of donated ones.
    self.kind is the key of the program: all that it depends on.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        donated: Sequence[int] = (),
        *,
        shares: bool = True,
    ) -> None:
        self.fn, self.args, self.donated, self.shares = fn, args, list[int](), shares
        self.inputs, kind = list[Any](), [fn, donated, n_threads(), current_contexts()]
        for i, arg in enumerate(args):
            leaves, nodes = tree.parts(arg)
            kind.append(nodes)
            for leaf in leaves:
                x = tree.value(leaf)
                if type(x) is not np.ndarray and (why := refusal(type(x))) is not None:
                    name = fn.__name__.lstrip("_")
                    raise TypeError(f"{name}: arguments must hold arrays, got {why}")
                if not isinstance(x, np.ndarray):
                    kind.append((type(leaf), Same(x) if isinstance(x, Traced) else exact(x)))
                    continue
                x = gap_free(x, writeable=i in donated)
                if i in donated:
                    self.donated.append(len(self.inputs))
                self.inputs.append(x)
                kind.append((type(leaf), x.shape, x.dtype, x.strides))
        self.kind = tuple(kind)

    def program(self) -> _Program | str:
        """Return the program of this kind of call, recorded if it is new; or why there is none."""
        program = _programs.get(self.kind)
        if program is None:
            if len(_programs) >= KEPT:
                _programs.clear()
            program = _programs[self.kind] = self._record()
        return program

    def _record(self) -> _Program | str:
        """Record the call as a program; or return why it cannot be recorded."""
        result_trees: list[Any] = []

        def on_inputs(*traced: Traced) -> list[Traced]:
            remaining = iter(traced)
            *args, options = tree.map(
                lambda x: next(remaining) if isinstance(x, np.ndarray) else x, self.args
            )
            result_trees.append(self.fn(*args, **options))
            return [x for x in map(tree.value, tree.parts(result_trees[0])[0]) if _is_result(x)]

        layouts = [layout_of(x) for x in self.inputs]
        try:
            recorded = Recorded(on_inputs, layouts, n_threads(), self.donated, shares=self.shares)
        except Unrecorded as error:
            return f"not recorded: {error}"
        is_native = all(native for native, _ in recorded.groups)
        return _Program(recorded, result_trees[0], None if is_native else recorded.explain())
