"""Arrays without values: operations on them are recorded as the nodes of an ONNX graph.

    graph = Graph({"length": 8})
    x = graph.input("x", ("length", 4), "float32")
    y = ops.softmax(x)[0]  # records nodes; x has the shape (8, 4)

`xformer.export.onnx` is the way to use it. No package is needed to record.

- An array has a shape in which a dynamic size is a `Size`: an int that remembers how the graph
  computes it. So checks of shapes work as with other arrays, and reshapes stay dynamic.
- Arrays whose values are known, such as tables, are constants. Functions of constants are computed
  at once, by NumPy.
- A node that is already in the graph is not recorded again.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from xformer.dispatch import observed

COMPARED = 4096  # bytes of a constant up to which equal ones are stored once


class NotExported(ValueError):
    """A computation has no ONNX graph. The message names it, and says why.

    scope: the ops of xformer in which it was raised
    """

    def __init__(self, why: str, scope: str = "") -> None:
        super().__init__(why)
        self.scope = scope

    def __str__(self) -> str:
        return super().__str__() + (f" (in {self.scope})" if self.scope else "")


class Node(NamedTuple):
    """One node of a graph. Names of absent inputs and unused outputs are empty."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, Any], ...]
    scope: str  # the op of xformer that recorded it; empty outside of ops


class Graph:
    """A graph that is being recorded.

    Attributes: `inputs`, `nodes`, and `constants`, NumPy arrays by name.

    sizes: name of a dynamic size -> its value while recording. It should be the largest, because
        comparisons of sizes are decided by it.
    most: the largest value of any length, for tables that have a row for each position
    """

    def __init__(self, sizes: Mapping[str, int], most: int = 0) -> None:
        self.values, self.most = dict(sizes), most
        self.inputs: dict[str, Array] = {}
        self.nodes: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}
        self.sizes: dict[str, Size] = {}
        self._known: dict[Any, str] = {}
        self._scopes: list[str] = []

    def input(self, name: str, shape: Sequence[int | str], dtype: Any) -> Array:
        """A new input. shape: its sizes; a string is the name of a dynamic size."""
        plain = tuple(self.values[n] if isinstance(n, str) else n for n in shape)
        array = Array(self, name, plain, np.dtype(dtype))
        self.inputs[name] = array
        for axis, size in enumerate(shape):
            if isinstance(size, str) and size not in self.sizes:
                part = self.emit("Shape", [array], np.int64, (1,), start=axis, end=axis + 1)
                self.sizes[size] = Size(self.values[size], self, {(part.name,): 1})
        array.shape = tuple(self.sizes[n] if isinstance(n, str) else n for n in shape)
        return array

    def emit(
        self,
        op: str,
        inputs: Sequence[Array | None],
        dtype: Any,
        shape: Sequence[int],
        *,
        output: int = 0,
        **attributes: Any,
    ) -> Array:
        """Record a node, and return its output of the given dtype and shape.

        output: the index of this output among the node's outputs
        """
        names = tuple("" if x is None else self.name_of(x) for x in inputs)
        ordered = tuple(sorted(attributes.items()))
        key = op, names, ordered, output
        name = self._known.get(key)
        if name is None:
            name = self._known[key] = f"t{len(self.nodes)}"
            outputs = (*(f"{name}_{i}" for i in range(output)), name)
            self.nodes.append(Node(op, names, outputs, ordered, "/".join(self._scopes)))
        return Array(self, name, tuple(shape), np.dtype(dtype))

    def name_of(self, x: Array) -> str:
        """The name of an array in the graph. A constant is added to the graph."""
        if x.value is None:
            if x.graph is not self:
                raise ValueError("onnx: an array belongs to another graph")
            return x.name
        value = x.value
        if value.size > 1 and not any(value.strides):  # one number, repeated
            number = Array.constant(value[(0,) * value.ndim])
            sizes = Array.constant(np.asarray(value.shape, np.int64))
            return self.emit("Expand", [number, sizes], x.dtype, x.shape).name
        small = value.nbytes <= COMPARED
        key = (value.dtype.str, value.shape, value.tobytes() if small else id(value))
        if key not in self._known:
            self._known[key] = f"c{len(self.constants)}"
            self.constants[self._known[key]] = value  # which keeps its id in use
        return self._known[key]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which nodes get the names of the ops that record them."""

        def observe(op: Any, run: Callable[..., Any]) -> Callable[..., Any]:
            def named(*args: Any, **options: Any) -> Any:
                self._scopes.append(op.__name__)
                scope = "/".join(self._scopes)
                try:
                    return run(*args, **options)
                except NotExported as error:
                    error.scope = error.scope or scope
                    raise
                except MemoryError as error:
                    why = "onnx: a table for the largest size does not fit memory; give max_len"
                    raise NotExported(why, scope) from error
                finally:
                    self._scopes.pop()

            return named

        with observed(observe):
            yield

    def shape_vector(self, shape: Sequence[int]) -> Array:
        """The sizes as an integer array (n,)."""
        if not any(isinstance(n, Size) for n in shape):
            return Array.constant(np.asarray(shape, np.int64))
        parts: list[Array] = []
        run: list[int] = []
        for n in (*shape, None):
            if isinstance(n, int) and not isinstance(n, Size):
                run.append(n)
                continue
            if run:
                parts.append(Array.constant(np.asarray(run, np.int64)))
                run = []
            if isinstance(n, Size):
                parts.append(n.array)
        if len(parts) == 1:
            return parts[0]
        return self.emit("Concat", parts, np.int64, (len(shape),), axis=0)


Terms = dict[tuple[str, ...], int]  # product of arrays (1,), by name -> its factor


class Size(int):
    """A dynamic size: a polynomial of integer arrays (1,) of the graph.

    Sums, products and quotients of sizes are sizes; one whose dynamic terms cancel is an int. The
    value as an int is that for `Graph.sizes`. A size does not keep the graph alive: checks of
    shapes remember sizes.
    """

    terms: Terms
    _graph: Callable[[], Graph | None]

    def __new__(cls, value: int, graph: Graph, terms: Terms) -> Size:
        """A size with these terms, and its value."""
        size = super().__new__(cls, value)
        size.terms, size._graph = terms, weakref.ref(graph)
        return size

    @property
    def graph(self) -> Graph:
        """The graph. ValueError if it is gone."""
        graph = self._graph()
        if graph is None:
            raise ValueError("onnx: a size was used after its graph")
        return graph

    @property
    def key(self) -> Any:
        """A key that is equal for equal sizes only."""
        return tuple(sorted(self.terms.items()))

    @property
    def array(self) -> Array:
        """The size as an integer array (1,)."""
        graph = self.graph
        total: Array | None = None
        for names, factor in sorted(self.terms.items()):
            parts = [Array(graph, name, (1,), np.dtype(np.int64)) for name in names]
            if factor != 1 or not parts:
                parts.append(Array.constant(np.asarray([factor], np.int64)))
            term = functools.reduce(functools.partial(_both, graph, "Mul"), parts)
            total = term if total is None else _both(graph, "Add", total, term)
        assert total is not None
        return total

    def __neg__(self) -> int:
        return self * -1

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _both(graph: Graph, node: str, x: Array, y: Array) -> Array:
    return graph.emit(node, [x, y], np.int64, (1,))


def _terms(x: int) -> Terms:
    return x.terms if isinstance(x, Size) else {(): int(x)}


def _sum(x: int, y: int) -> Terms:
    total = dict(_terms(x))
    for names, factor in _terms(y).items():
        total[names] = total.get(names, 0) + factor
    return total


def _difference(x: int, y: int) -> Terms:
    return _sum(x, y * -1)


def _product(x: int, y: int) -> Terms:
    total: Terms = {}
    for (a, m), (b, n) in itertools.product(_terms(x).items(), _terms(y).items()):
        names = tuple(sorted(a + b))
        total[names] = total.get(names, 0) + m * n
    return total


def _quotient(x: int, y: int) -> Terms:
    """x // y: of the terms if y is one term that divides them all, else by nodes."""
    if len(_terms(y)) == 1:
        ((by, n),) = _terms(y).items()
        exact: Terms = {}
        for names, m in _terms(x).items():
            rest = Counter(names)
            rest.subtract(by)
            if m % n or min(rest.values(), default=0) < 0:
                break
            exact[tuple(sorted(rest.elements()))] = m // n
        else:
            return exact
    graph = (x if isinstance(x, Size) else y).graph  # type: ignore[attr-defined]
    parts = [graph.shape_vector([n]) for n in (x, y)]
    parts[0] = _both(graph, "Sub", parts[0], _both(graph, "Mod", *parts))  # Div rounds towards 0
    return {(_both(graph, "Div", *parts).name,): 1}


def _remainder(x: int, y: int) -> Terms:
    return _difference(x, x // y * y)


def _arithmetic(name: str, combine: Callable[[int, int], Terms]) -> None:
    """Give `Size` the operator `name`."""
    plain = getattr(int, f"__{name}__")

    def of(x: Any, y: Any) -> Any:
        if not (isinstance(x, int) and isinstance(y, int)):
            return NotImplemented
        terms = {names: factor for names, factor in combine(x, y).items() if factor}
        if not any(terms):  # a number alone
            return sum(terms.values())
        return Size(plain(int(x), int(y)), (x if isinstance(x, Size) else y).graph, terms)  # type: ignore[attr-defined]

    setattr(Size, f"__{name}__", lambda self, other: of(self, other))
    setattr(Size, f"__r{name}__", lambda self, other: of(other, self))


for _name, _combine in {
    "add": _sum,
    "sub": _difference,
    "mul": _product,
    "floordiv": _quotient,
    "mod": _remainder,
}.items():
    _arithmetic(_name, _combine)


class Array:
    """An array of a graph, or a constant, whose `value` is known and belongs to no graph."""

    __slots__ = ("dtype", "graph", "name", "shape", "value")
    __xformer_library__ = "onnx"
    __array_ufunc__ = None  # NumPy's arrays leave operators to this class
    __hash__ = object.__hash__

    def __init__(
        self,
        graph: Graph | None,
        name: str,
        shape: tuple[Any, ...],
        dtype: np.dtype,
        value: np.ndarray | None = None,
    ) -> None:
        self.graph, self.name, self.shape, self.dtype, self.value = graph, name, shape, dtype, value

    @classmethod
    def constant(cls, value: Any) -> Array:
        """A constant with these values, which are not copied."""
        value = np.asarray(value)
        return cls(None, "", value.shape, value.dtype, value)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return _functions()

    # Attributes of the array API.
    device = "cpu"
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    mT = property(lambda self: _functions().matrix_transpose(self))

    @property
    def T(self) -> Array:
        """The transposed matrix."""
        return _functions().permute_dims(self, tuple(range(self.ndim))[::-1])

    def __getitem__(self, key: Any) -> Array:
        return _functions().getitem(self, key)

    def __len__(self) -> int:
        return self.shape[0]

    def _known(self) -> np.ndarray:
        if self.value is None:
            raise NotExported("onnx: the value of an array decides, and is known only in a run")
        return self.value

    def __bool__(self) -> bool:
        return bool(self._known())

    def __int__(self) -> int:
        return int(self._known())

    def __float__(self) -> float:
        return float(self._known())

    def __index__(self) -> int:
        return int(self._known())

    def __repr__(self) -> str:
        return f"<onnx {self.dtype.name}{list(map(int, self.shape))}>"


def _functions() -> Any:
    from xformer.arrays import onnx_functions  # which imports this module

    return onnx_functions


def _operator(name: str, *, swapped: bool = False) -> Callable[[Array, Any], Any]:
    def method(self: Array, other: Any) -> Any:
        x, y = (other, self) if swapped else (self, other)
        return getattr(_functions(), name)(x, y)

    return method


for _name, _function in {
    **{"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "pow": "pow"},
    **{"floordiv": "floor_divide", "mod": "remainder", "matmul": "matmul"},
    **{"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"},
    **{"lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift"},
}.items():
    setattr(Array, f"__{_name}__", _operator(_function))
    setattr(Array, f"__r{_name}__", _operator(_function, swapped=True))
for _name, _function in {
    **{"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"},
    **{"gt": "greater", "ge": "greater_equal"},
}.items():
    setattr(Array, f"__{_name}__", _operator(_function))
for _name, _function in {"neg": "negative", "abs": "abs", "invert": "bitwise_invert"}.items():
    setattr(Array, f"__{_name}__", lambda self, f=_function: getattr(_functions(), f)(self))
