"""Trace: each op of a training step, forward and backward, with its formula, shapes and sizes.

    with xf.reference_only(), xf.trace() as steps:
        loss, cache = gpt.loss(params, tokens, targets)
        grads = cache.backward()
    print(steps)

A step is a call of an op or of the backward of its cache. Within `reference_only()` the references
run, which call each other: `feed_forward` calls `linear`. A kernel may compute them in one step.
Sums, reshapes and transposes between ops are array operations of the library; they are no steps.
"""

from __future__ import annotations

import inspect
import linecache
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple

from array_api_compat import is_array_api_obj

from xformer.base import tree
from xformer.base.choices import require_one_of
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import Overridable, observed, observer, registry
from xformer.dispatch.shapes import FLOATING, dtype_name
from xformer.hooks.node_names import with_methods

Op = Overridable[..., Any]
Run = Callable[..., Any]
WIDTH = 100


class TracedArray(NamedTuple):
    """An array of a step; rms, min and max if the step computed it and it is floating."""

    name: str  # of the argument or the gradient, or "y"; "params.w" in a NamedTuple
    shape: tuple[int, ...]
    dtype: str
    rms: float | None = None  # the root mean square of all elements
    min: float | None = None
    max: float | None = None


class Step(NamedTuple):
    """A call of an op, or of the backward of its cache."""

    op: str
    is_backward: bool
    call: int  # the same for an op and its backward
    depth: int  # the number of steps that this step runs within
    formula: str  # the first line of the docstring of the op, or of its cache's `backward`
    where: str  # file and line of the function that ran: xformer/ops/linear.py:21
    inputs: tuple[TracedArray, ...]  # without rms, min and max
    outputs: tuple[TracedArray, ...]


class Trace(list[Step]):
    """The steps so far, in the order in which they began. `print` shows two tables."""

    def __repr__(self) -> str:
        n_backward = sum(step.is_backward for step in self)
        return f"Trace({len(self) - n_backward} forward, {n_backward} backward)"

    def __str__(self) -> str:
        return self.table()

    def table(self, *, op: str | None = None, values: bool = False, width: int = WIDTH) -> str:
        """The steps as two tables: before the first backward, and from there on.

        A formula is shown once in each table. An op and its backward have the same number. An op
        that a backward calls is marked "(forward)". For a step with steps in it, the gradients in
        its parameters are left out.

        op: show only the steps of this op
        values: also show the least and the greatest element of each array that a step computed
        width: columns of the terminal

        ValueError if no step is of `op`.
        """
        names = list(dict.fromkeys(step.op for step in self))
        if op is not None and op not in names:
            if not names:
                raise ValueError(f"trace: no op was called, so there is none named {op!r}")
            require_one_of("trace: op", op, names)
        begins = next((i for i, step in enumerate(self) if step.is_backward), len(self))
        numbers: dict[int, int] = {}
        for step in self:
            numbers.setdefault(step.call, len(numbers) + 1)
        rows = []
        for i, step in enumerate(self):
            has_parts = i + 1 < len(self) and self[i + 1].depth > step.depth
            name, shown = step.op, step
            if not step.is_backward:
                name += " (forward)" * (i >= begins)
                shown = step._replace(inputs=_outside_trees(step.inputs))
            elif has_parts:
                shown = step._replace(outputs=_outside_trees(step.outputs))
            rows.append((numbers[step.call], "  " * step.depth * (op is None) + name, shown))
        parts = [
            _part(title, [row for row in part if op in (None, row[2].op)], values, width)
            for title, part in (("forward", rows[:begins]), ("backward", rows[begins:]))
            if part
        ]
        return "\n\n".join(parts)


@contextmanager
def trace() -> Iterator[Trace]:
    """A context that yields the list of the ops that are called in it, and of their backwards.

    Results and gradients are the same as without it. An op that returns its first argument, such as
    dropout at rate 0, is not recorded, nor is a check of arguments. Backwards of caches are
    recorded if their forward was; a cache must be a NamedTuple, as those of all ops of xformer are.

    Other threads and tasks are not recorded; within another `trace()` only the inner one records.
    Use it around a call, never across a yield: a generator would leave its caller in the context.
    A compiled function is not recorded; a function that its library cannot compile is. Under
    `jax.jit` arrays have no values, and JAX raises an error.
    """
    recorder = _Recorder(Trace(), count(), 0, threading.get_ident())
    with observed(recorder):
        yield recorder.steps


@dataclass(frozen=True)
class _Recorder:
    """The observer of a trace: wraps the implementation of each op, so that its calls are recorded.

    While an op runs, a recorder with depth + 1 is the observer: it records the ops within this op.
    """

    steps: Trace  # gets a Step for each call
    calls: Iterator[int]  # numbers of the calls, shared by all depths
    depth: int  # the number of ops that are running
    thread: int  # that the trace was opened in; others are not recorded

    def __call__(self, op: Op, run: Run) -> Run:
        """A function that calls `run`, an implementation of `op`, and records the call.

        The backward of the returned cache is recorded too.
        """
        if threading.get_ident() != self.thread:
            return run

        def recorded(*args: Any, **kwargs: Any) -> Any:
            call, begin = next(self.calls), len(self.steps)
            result = self.within(run, *args, **kwargs)
            y, cache = result if op.has_backward else (result, None)
            arguments = inspect.signature(op.reference).bind(*args, **kwargs).arguments
            if op.has_backward and y is next(iter(arguments.values()), None):
                return result
            arrays = _arrays(arguments), _arrays({"y": y}, with_sizes=True)
            if arrays[1]:  # else it is a check
                about = op.__name__, False, call, self.depth, _formula(op.reference), _where(run)
                self.steps.insert(begin, Step(*about, *arrays))
            return (y, _recording(cache, op, call)) if hasattr(cache, "_fields") else result

        return recorded

    def backward(self, op: Op, call: int, run: Run, *args: Any, **kwargs: Any) -> Any:
        """Call run(*args), the backward of the op's call number `call`, and record it.

        args: the cache, then the gradients of the op's results
        """
        begin = len(self.steps)
        result = self.within(run, *args, **kwargs)
        are_many = isinstance(result, tuple) and not hasattr(result, "_fields")
        names = [f"d{name}" for name in inspect.signature(op.reference).parameters]
        grads = dict(zip(names, result if are_many else (result,), strict=False))
        _, *dys = inspect.signature(run).bind(*args, **kwargs).arguments.items()
        about = op.__name__, True, call, self.depth, _formula(run), _where(run)
        arrays = _arrays(dict(dys)), _arrays(grads, with_sizes=True)
        self.steps.insert(begin, Step(*about, *arrays))
        return result

    def within(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        """run(*args, **kwargs), whose steps are one level deeper."""
        with observed(replace(self, depth=self.depth + 1)):
            return run(*args, **kwargs)


def _recording(cache: Any, op: Op, call: int) -> Any:
    """A copy of `cache`, of a subclass of its type, whose backward is recorded within a trace."""

    def backward(before: Run, self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = observer()
        if not isinstance(recorder, _Recorder) or recorder.thread != threading.get_ident():
            return before(self, *args, **kwargs)
        return recorder.backward(op, call, before, self, *args, **kwargs)

    return with_methods(cache, {"backward": backward})


def _arrays(nodes: dict[str, Any], *, with_sizes: bool = False) -> tuple[TracedArray, ...]:
    """The arrays in trees of these names."""
    traced = []
    for name, node in nodes.items():
        for path, leaf in tree.flatten(node).items():
            array = tree.value(leaf)
            if is_array_api_obj(array):
                about = _inside(name, path), tuple(array.shape), dtype_name(array)
                traced.append(TracedArray(*about, *(_sizes(array) if with_sizes else ())))
    return tuple(traced)


def _outside_trees(arrays: tuple[TracedArray, ...]) -> tuple[TracedArray, ...]:
    return tuple(array for array in arrays if "." not in array.name)


def _inside(name: str, path: str) -> str:
    return f"{name}.{path}" if name and path else name or path


def _sizes(array: Array) -> tuple[float, ...]:
    """rms, min and max of a floating array; () of another, and of an empty one."""
    backend = registry.backend_of(array)
    array = backend.upcast(array)
    if dtype_name(array) not in FLOATING or 0 in array.shape:
        return ()
    xp = array_namespace(array)
    sizes = xp.stack([xp.sqrt(xp.mean(array * array)), xp.min(array), xp.max(array)])
    return tuple(backend.to_numpy(sizes).tolist())


def _formula(function: Any) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _where(function: Any) -> str:
    """The file of its module and the line of its `def`; "" if it is not written in Python.

    Of a callable object that names another module than its class does: the file of that module.
    """
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__") and function.__module__ != type(function).__module__:
        return f"{function.__module__.replace('.', '/')}.py"
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return ""
    file, line = Path(code.co_filename), code.co_firstlineno
    for n in range(line, line + 20):  # after the decorators
        if linecache.getline(code.co_filename, n).lstrip().startswith("def "):
            line = n
            break
    root, parts = function.__module__.partition(".")[0], file.parts
    if root not in parts:
        return f"{file.name}:{line}"
    begin = len(parts) - 1 - parts[::-1].index(root)
    return f"{'/'.join(parts[begin:])}:{line}"


def _part(title: str, rows: list[tuple[int, str, Step]], values: bool, width: int) -> str:
    """A table. Sizes that do not fit beside the shapes have a line of their own."""
    shapes_title = "dy -> gradients" if title == "backward" else "in -> out"
    cells = [(name, _shapes(step), _rms(step)) for _, name, step in rows]
    first = max(map(len, [title, *(name for name, *_ in cells)]))
    rest = width - 7 - first
    one_line = [shapes for _, shapes, rms in cells if len(shapes) + 2 + len(rms) <= rest]
    second = max(map(len, [shapes_title, *one_line]))
    lines = [f"  n  {title:<{first}}  {shapes_title:<{second}}  rms"]
    indent, known = " " * (7 + first), set[str]()
    below: Any = {"subsequent_indent": indent}
    for (n, _, step), (name, shapes, rms) in zip(rows, cells, strict=True):
        line = f"{n:>3}  {name:<{first}}  {shapes:<{second}}"
        if len(line) + 2 + len(rms) <= width:
            lines.append(f"{line}  {rms}")
        else:
            lines += textwrap.wrap(line, width, **_WHOLE, **below)
            lines += textwrap.wrap(f"rms {rms}", width, **_WHOLE, **below, initial_indent=indent)
        about = f"{step.formula}  [{step.where}]".removesuffix("[]").strip()
        if about not in known:
            known.add(about)
            lines += textwrap.wrap(about, width, **_WHOLE, **_FORMULA)
        if values:
            lines += [f"{indent}{_values(array)}" for array in step.outputs]
    return "\n".join(lines)


_WHOLE: Any = {"break_on_hyphens": False, "break_long_words": False}
_FORMULA: Any = {"initial_indent": " " * 5, "subsequent_indent": " " * 5}


def _shapes(step: Step) -> str:
    """Inputs with their names -> outputs; arrays of one shape share it."""
    unnamed = [a._replace(name="") for a in (step.inputs if step.is_backward else step.outputs)]
    if step.is_backward:
        return f"{_listed(unnamed) or 1} -> {_listed(step.outputs)}"  # without a dy it is 1
    return f"{_listed(step.inputs)} -> {_listed(unnamed)}"


def _listed(arrays: Iterable[TracedArray]) -> str:
    texts = []
    for shape, group in groupby(arrays, lambda a: a.shape):
        alike = list(group)
        names = ", ".join(a.name for a in alike if a.name)
        size = "x".join(map(str, shape)) or "()"
        times = f"{len(alike)} of " if not names and len(alike) > 1 else ""
        texts.append(f"{names} {times}{size}".lstrip())
    return ", ".join(texts)


def _rms(step: Step) -> str:
    return ", ".join("-" if a.rms is None else f"{a.rms:.3g}" for a in step.outputs)


def _values(array: TracedArray) -> str:
    if array.rms is None:
        return f"{array.name}: {array.dtype}"
    return f"{array.name}: rms {array.rms:.3g}, from {array.min:.3g} to {array.max:.3g}"
