"""A repeated step as a CUDA graph: one launch for all its kernels.

    call = Captured(step, backend)
    state, results = call(state, inputs)  # the same as step; the second call records the graph

The graph fixes shapes, Python's numbers and the order of the kernels. Only the contents of the
arrays of the state and of the inputs may change; the kernels read these arrays at fixed addresses.

    step(state, inputs) -> (state, results)

state: a dict of arrays
inputs: a dict of numbers, and of arrays on the host or the device
results: a tuple of trees; the next launch overwrites the results and the state
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from xformer.backends.cupy.constant import Constants, keeping
from xformer.backends.cupy.module import driver_of
from xformer.backends.cupy.runtimes import holding
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.backend import Backend

Step = Callable[[dict[str, Array], Any], tuple[dict[str, Array], tuple[Any, ...]]]


class Graph(Protocol):
    """Recorded work and its memory. CuPy's class is in `driver`; tests have another one."""

    def apart(self) -> AbstractContextManager[None]:
        """Return a context that uses the graph's memory pool and stream, and waits at its end."""

    def recording(self) -> AbstractContextManager[None]:
        """Return a context that records work for the graph's pool and stream, and runs nothing.

        An error ends the recording, and restores the stream and the memory pool.
        """

    def launch(self) -> None:
        """Run the recorded work on the current stream. If it raises, nothing has run."""


class Captured:
    """`step` on arrays with fixed addresses. The first call runs it, the second records the graph.

    - The arrays of the first state hold the state of all later calls.
    - An input on the device is read in place while it is the same array. If another array is
      passed, the work is recorded again, with a buffer that later inputs are copied to.
    - If a call has arrays of other shapes, or recording fails, `step` runs without a graph. A
      warning says so once.
    """

    def __init__(self, step: Step, backend: Backend) -> None:
        self._step, self._backend = step, backend
        self._kind: Any = None  # shapes and dtypes of the first call's state and inputs
        self._results: tuple[Any, ...] | None = None  # the graph writes to these arrays
        self.is_launched = False  # whether the last call launched the graph
        self._moving: set[str] = set()  # inputs on the device that changed to another array
        self._said: set[str] = set()  # causes that `say` reported
        self._constants: Constants = {}
        self._held: dict[int, Any] = {}  # objects that the launches need, see `runtimes.hold`
        self._graph: Graph | None = None  # deleted last: then its memory is no longer in use

    def __call__(
        self, state: dict[str, Array], inputs: Any
    ) -> tuple[dict[str, Array], tuple[Any, ...]]:
        """Return the state after the step, in the arrays of the first call, and the results."""
        self.is_launched = False
        kinds = _kind(state), _kind(inputs)
        if self._kind is None:
            self._kind = kinds
            return self._first(state, inputs)
        if self._graph is not None and kinds != self._kind:
            self.say("another shape of its arrays than at first; such a step is made call by call")
        elif self._graph is not None:
            if replaced := self._replaced(inputs):
                self._moving |= replaced
                self._forget()
                return self._first(state, inputs)
            self._fill(state, inputs)
            if self._launched(self._graph):
                return self._state, self._results  # type: ignore[return-value]  # not None
            state = self._state
            self._forget()
        moved = {n: self._of_device(x) if hasattr(x, "dtype") else x for n, x in inputs.items()}
        return self._step(state, moved)

    def again(self, state: dict[str, Array], n: int) -> int:
        """Repeat the last call on its results up to n times; return how many times.

        Each is only a launch of the graph. 0 if the last call did not launch it, or if an array of
        `state` is not the graph's.
        """
        graph = self._graph if self.is_launched else None
        if graph is None or any(
            state[name] is not captured for name, captured in self._state.items()
        ):
            return 0
        for done in range(n):
            if not self._launched(graph):
                self._forget()
                return done
        return n

    def _first(self, state: dict[str, Array], inputs: Any) -> Any:
        """Run the step. It compiles kernels and allocates the memory that recording needs."""
        self._state = dict(state)
        self._inputs = {name: self._buffer(name, x) for name, x in inputs.items()}
        if len({id(x) for x in state.values()}) < len(state):
            self.say("an array is in the state twice; steps are made call by call")
            return self._step(self._state, self._inputs)
        arrays = *self._state.values(), *self._inputs.values()
        self._graph = driver_of(next(type(x) for x in arrays if is_of_device(x))).Graph()
        try:
            with self._graph.apart():
                return self._state, self._run()
        except BaseException:
            self._kind = None  # the next call, if any, is a first call again
            self._forget()
            raise

    def _fill(self, state: dict[str, Array], inputs: Any) -> None:
        """Copy the arrays of a call to the graph's arrays, if they are others."""
        others = {name: x for name, x in state.items() if x is not self._state[name]}
        captured_ids = {id(x) for x in self._state.values()}
        for name, x in others.items():
            if id(x) in captured_ids:  # another array of the state, which is written below
                others[name] = array_namespace(x).asarray(x, copy=True)
        for name, x in others.items():
            self._state[name][...] = x
        for name, captured in self._inputs.items():
            if captured is not inputs[name]:
                captured[...] = self._of_device(inputs[name])

    def _launched(self, graph: Graph) -> bool:
        """Record the graph if it is not recorded, and launch it; return whether this succeeded."""
        try:
            if self._results is None:
                with graph.recording():
                    self._results = self._run()
            graph.launch()
        except Exception as error:
            # CuPy raises CUDARuntimeError, CompileException, OutOfMemoryError,
            # NotImplementedError, TypeError, ... Nothing has run. The step now runs call by call,
            # and raises again if the step is wrong (bad shapes), or there is too little memory.
            text = str(error) or type(error).__name__
            self.say(f"{_origin_of(error)}{text}; steps are made call by call")
            return False
        self.is_launched = True
        return True

    def _forget(self) -> None:
        """Delete the graph and free its memory."""
        self._graph = self._results = None
        self.is_launched = False
        self._constants.clear()
        self._held.clear()

    def _run(self) -> tuple[Any, ...]:
        with keeping(self._constants), holding(self._held):
            new, results = self._step(self._state, self._inputs)
        for name, buffer in self._state.items():
            if new[name] is not buffer:
                buffer[...] = new[name]
        return results

    def _replaced(self, inputs: dict[str, Any]) -> set[str]:
        """Return the names of the inputs read in place that are another array in this call."""
        fixed = {name for name, x in inputs.items() if is_of_device(x)} - self._moving
        return {name for name in fixed if self._inputs[name] is not inputs[name]}

    def _buffer(self, name: str, value: Any) -> Array:
        """Return the array that the graph reads for an input: the input itself, or a copy."""
        buffer = self._of_device(value)
        if buffer is value and name in self._moving:
            buffer = array_namespace(value).asarray(value, copy=True)
        return buffer

    def _of_device(self, value: Any) -> Array:
        return value if is_of_device(value) else self._backend.asarray(value)

    def explain(self) -> str:
        """Return a sentence: whether there is a graph, and the causes that `say` reported."""
        what = "a graph is launched" if self._graph is not None else "there is no graph"
        return "; ".join([f"backend {self._backend.name}: {what}", *sorted(self._said)])

    def say(self, why: str) -> None:
        """Give a RuntimeWarning about why there is no graph, once for each cause."""
        if why not in self._said:
            self._said.add(why)
            message = f"backend {self._backend.name}: no graph: {why}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def is_of_device(x: Any) -> bool:
    """Return whether x is an array on the device."""
    return hasattr(x, "dtype") and not isinstance(x, np.ndarray | np.generic)


def _kind(values: Any) -> Any:
    """Return the name, shape and dtype of each array or number in the tree `values`."""
    leaves = tree.flatten(values).items()
    arrays = ((name, x if hasattr(x, "dtype") else np.asarray(x)) for name, x in leaves)
    return tuple((name, x.shape, x.dtype) for name, x in arrays)


def _origin_of(error: BaseException) -> str:
    """Return the innermost function of this library in the traceback, as "module.name: ", or ""."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [(f.f_globals.get("__name__", ""), f.f_code.co_qualname) for f in frames]
    ours = [f"{m}.{name}" for m, name in names if m.startswith("xformer.") and m != __name__]
    return f"{ours[-1]}: " if ours else ""
