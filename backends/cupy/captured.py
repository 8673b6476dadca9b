"""Work that is the same each time but for numbers, as one launch: a CUDA graph.

    call = Captured(step, place)
    state, results = call(state, inputs)  # as step, whose work is captured in the second call

What follows from shapes, Python's numbers and the order of calls is then fixed; what changes lies
in arrays of their own, the state's and the inputs', which kernels read where they lie.

    step(state, inputs) -> (state, results)

state: a dict of arrays   inputs: a dict of numbers and arrays, of the host or the device
results: a tuple of trees, which the next launch writes over, as it does the state.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from array_api_compat import array_namespace

from xformer import tree
from xformer.backends.base import Backend
from xformer.backends.cupy.constant import Constants, keeping
from xformer.backends.cupy.runtimes import holding
from xformer.typing import Array

Step = Callable[[dict[str, Array], Any], tuple[dict[str, Array], tuple[Any, ...]]]


class Graph(Protocol):
    """Work that was recorded, and its memory. CuPy's is in `driver`; tests bring their own."""

    def apart(self) -> AbstractContextManager[None]:
        """Within it memory is the graph's own, and so is the stream, which is waited for."""

    def recording(self) -> AbstractContextManager[None]:
        """The same, and nothing is done: it is recorded. An error ends it, and leaves stream and
        memory as they were before."""

    def launch(self) -> None:
        """Do what was recorded, on the current stream; behind an error nothing was done."""


GRAPHS: dict[type, Callable[[], Graph]] = {}  # type of the arrays -> a new graph


class Captured:
    """`step` on arrays that stay where they are; the first call does the work, the second records.

    The arrays of the first state are the state from then on. An input on the device is read in
    place while it is the same array. When another array is passed, the work is recorded again, with
    a buffer that each further input is copied to. A call with arrays of other shapes, and every
    call where recording fails, is made as it is, which is said once.
    """

    def __init__(self, step: Step, place: Backend) -> None:
        self._step, self._place = step, place
        self._kind: Any = None  # of the state and the inputs of the first call
        self._results: tuple[Any, ...] | None = None  # what the graph writes to
        self._moving: set[str] = set()  # inputs on the device that were another array before
        self._said: set[str] = set()
        self._constants: Constants = {}
        self._held: dict[int, Any] = {}  # what the graph's launches need, by `runtimes.hold`
        self._graph: Graph | None = None  # the last one to go: its memory is free by then

    def __call__(
        self, state: dict[str, Array], inputs: Any
    ) -> tuple[dict[str, Array], tuple[Any, ...]]:
        """The state after the step, in the arrays of the first call, and the results."""
        kind = _kind(state), _kind(inputs)
        if self._kind is None:
            self._kind = kind
            return self._first(state, inputs)
        if self._graph is not None and kind != self._kind:
            self.say("another shape of its arrays than at first; such a step is made call by call")
        elif self._graph is not None:
            if others := self._others(inputs):
                self._moving |= others
                self._forget()
                return self._first(state, inputs)
            for name, own in self._state.items():
                if state[name] is not own:  # after a step that was made as it is
                    own[...] = state[name]
            for name, own in self._inputs.items():
                if own is not inputs[name]:
                    own[...] = self._of_device(inputs[name])
            if self._launched(self._graph):
                return self._state, self._results  # type: ignore[return-value]  # not None
            state = self._state
            self._forget()
        return self._step(state, {name: self._of_device(x) for name, x in inputs.items()})

    def _first(self, state: dict[str, Array], inputs: Any) -> Any:
        """The work itself, which compiles kernels and asks for the memory that recording needs."""
        self._state = dict(state)
        self._inputs = {name: self._kept(name, x) for name, x in inputs.items()}
        if len({id(own) for own in state.values()}) < len(state):
            self.say("an array is in the state twice; steps are made call by call")
            return self._step(self._state, self._inputs)
        arrays = *self._state.values(), *self._inputs.values()
        self._graph = _graph_for(next(type(x) for x in arrays if is_of_device(x)))
        try:
            with self._graph.apart():
                return self._state, self._run()
        except BaseException:
            self._kind = None  # a call that comes after all begins anew
            self._forget()
            raise

    def _launched(self, graph: Graph) -> bool:
        """Whether the graph was launched, in the first such call recorded before."""
        try:
            if self._results is None:
                with graph.recording():
                    self._results = self._run()
            graph.launch()
        except Exception as error:
            # Whatever it is: CuPy raises CUDARuntimeError, CompileException, OutOfMemoryError,
            # NotImplementedError, TypeError, ... Nothing was done. The step is now made call by
            # call, and raises again what is its own: bad shapes, or too little memory.
            text = str(error) or type(error).__name__
            self.say(f"{_place_of(error)}{text}; steps are made call by call")
            return False
        return True

    def _forget(self) -> None:
        """The graph, and the memory that was its own."""
        self._graph = self._results = None
        self._constants.clear()
        self._held.clear()

    def _run(self) -> tuple[Any, ...]:
        with keeping(self._constants), holding(self._held):
            new, results = self._step(self._state, self._inputs)
        for name, own in self._state.items():
            if new[name] is not own:
                own[...] = new[name]
        return results

    def _others(self, inputs: dict[str, Any]) -> set[str]:
        """Those on the device that are read where they lie, and are now another array."""
        fixed = {name for name, x in inputs.items() if is_of_device(x)} - self._moving
        return {name for name in fixed if self._inputs[name] is not inputs[name]}

    def _kept(self, name: str, value: Any) -> Array:
        """What the graph reads of an input."""
        own = self._of_device(value)
        if own is value and name in self._moving:
            own = array_namespace(value).asarray(value, copy=True)
        return own

    def _of_device(self, value: Any) -> Array:
        return value if is_of_device(value) else self._place.asarray(value)

    def explain(self) -> str:
        """Whether there is a graph, and what was said of it."""
        what = "a graph is launched" if self._graph is not None else "there is no graph"
        return "; ".join([f"backend {self._place.name}: {what}", *sorted(self._said)])

    def say(self, why: str) -> None:
        """Why there is no graph: a RuntimeWarning, once for each cause."""
        if why not in self._said:
            self._said.add(why)
            message = f"backend {self._place.name}: no graph: {why}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def is_of_device(x: Any) -> bool:
    """Whether it is an array, and none of the host."""
    return hasattr(x, "dtype") and not isinstance(x, np.ndarray | np.generic)


def _graph_for(array_type: type) -> Graph:
    if array_type not in GRAPHS:
        from xformer.backends.cupy import driver

        GRAPHS[array_type] = GRAPHS[driver.ARRAY]
    return GRAPHS[array_type]()


def _kind(values: Any) -> Any:
    """Shapes and dtypes, of arrays and of numbers."""
    leaves = tree.flatten(values).items()
    arrays = ((name, x if hasattr(x, "dtype") else np.asarray(x)) for name, x in leaves)
    return tuple((name, x.shape, x.dtype) for name, x in arrays)


def _place_of(error: BaseException) -> str:
    """The function of this library that an error comes from."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [(f.f_globals.get("__name__", ""), f.f_code.co_qualname) for f in frames]
    own = [f"{m}.{name}" for m, name in names if m.startswith("xformer.") and m != __name__]
    return f"{own[-1]}: " if own else ""
