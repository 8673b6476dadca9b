"""The array API for `xformer.arrays.onnx.Array`: a function records nodes of an ONNX graph.

It has the functions that the library calls, with NumPy's dtypes and rules. Functions of constants
are computed by NumPy at once. ONNX Runtime computes every node; where it lacks a dtype or differs
from NumPy, a comment says so.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from array_api_compat import numpy

from xformer.arrays.onnx import Array, Graph, NotExported, Size

known: Any = numpy  # computes functions of constants
inf, pi = known.inf, known.pi
bool, float32, float64 = map(np.dtype, ("bool", "float32", "float64"))
int8, int16, int32, int64 = map(np.dtype, ("int8", "int16", "int32", "int64"))
uint8, uint16, uint32, uint64 = map(np.dtype, ("uint8", "uint16", "uint32", "uint64"))
finfo, iinfo, isdtype = known.finfo, known.iinfo, known.isdtype
__array_namespace_info__ = known.__array_namespace_info__

Axis = int | tuple[int, ...] | None


def __getattr__(name: str) -> Any:
    if hasattr(known, name) and not name.startswith("_"):
        raise NotExported(f"onnx: {name} of the array API is not exported")
    raise AttributeError(f"module {__name__} has no attribute {name}")


def _graph(*arguments: Any) -> Graph | None:
    """The graph of arrays and sizes; None if all are constants."""
    for x in arguments:
        if isinstance(x, Array) and x.graph is not None:
            return x.graph
        if isinstance(x, Size):
            return x.graph
    return None


def _need(*arguments: Any) -> Graph:
    graph = _graph(*arguments)
    if graph is None:
        raise ValueError("onnx: no array belongs to a graph")
    return graph


def _folded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, but NumPy's function of the same name for arguments that are all constants."""

    @functools.wraps(fn)
    def call(*args: Any, **options: Any) -> Any:
        flat = [x for a in args for x in (a if isinstance(a, list | tuple) else (a,))]
        if _graph(*flat, *options.values()) is not None:
            return fn(*args, **options)
        plain = [tuple(map(_value, a)) if isinstance(a, list | tuple) else _value(a) for a in args]
        with np.errstate(all="ignore"):
            return Array.constant(getattr(known, fn.__name__)(*plain, **options))

    return call


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Array) else x


def _typed(x: Any, dtype: Any) -> Array:
    """An array, a number or a size as an array of this dtype."""
    if isinstance(x, Size):
        x = squeeze(x.array, axis=0)
    if not isinstance(x, Array):
        return Array.constant(np.asarray(x, dtype))
    return astype(x, dtype)


def _dtype_of(*arguments: Any) -> np.dtype:
    """The common dtype. Numbers and sizes take that of the arrays, as in NumPy."""
    plain = [
        x.dtype if isinstance(x, Array) else int(x) if isinstance(x, Size) else x for x in arguments
    ]
    return np.result_type(*plain)


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape. Of equal sizes a plain one is kept: it says more."""
    rank = builtins.max(map(len, shapes))
    result: list[int] = []
    for sizes in zip(*((1,) * (rank - len(s)) + tuple(s) for s in shapes), strict=True):
        wide = [n for n in sizes if isinstance(n, Size) or n != 1]
        if builtins.any(n != wide[0] for n in wide[1:]):
            raise ValueError(f"onnx: shapes {shapes} do not fit together")
        plain = [n for n in wide if not isinstance(n, Size)]
        result.append((plain or wide or [1])[0])
    return tuple(result)


# Elementwise


def _unary(name: str, node: str, *, dtype: Any = None) -> Callable[[Array], Array]:
    def function(x: Array, /) -> Array:
        return _need(x).emit(node, [x], dtype or x.dtype, x.shape)

    function.__name__ = name
    return _folded(function)


def _emitted(node: str, x: Any, y: Any, common: Any, dtype: Any = None) -> Array:
    """The node of two operands of the dtype `common`. dtype: of the result; None: the same."""
    x, y = _typed(x, common), _typed(y, common)
    return _need(x, y).emit(node, [x, y], dtype or common, _broadcast(x.shape, y.shape))


def _binary(
    name: str, node: str, *, of_bools: str = "", dtype: Any = None
) -> Callable[[Any, Any], Array]:
    """A function of two operands. of_bools: its node for bools, if that is another one."""

    def function(x: Any, y: Any, /) -> Array:
        common = _dtype_of(x, y)
        return _emitted(of_bools if of_bools and common == bool else node, x, y, common, dtype)

    function.__name__ = name
    return _folded(function)


exp, log, tanh = _unary("exp", "Exp"), _unary("log", "Log"), _unary("tanh", "Tanh")
sqrt, sin, negative = _unary("sqrt", "Sqrt"), _unary("sin", "Sin"), _unary("negative", "Neg")
abs, floor = _unary("abs", "Abs"), _unary("floor", "Floor")
logical_not = _unary("logical_not", "Not", dtype=bool)
add, subtract = _binary("add", "Add"), _binary("subtract", "Sub")
multiply = _binary("multiply", "Mul")
equal = _binary("equal", "Equal", dtype=bool)
less, greater = _binary("less", "Less", dtype=bool), _binary("greater", "Greater", dtype=bool)
less_equal = _binary("less_equal", "LessOrEqual", dtype=bool)
greater_equal = _binary("greater_equal", "GreaterOrEqual", dtype=bool)
remainder = _binary("remainder", "Mod")  # of integers, with the sign of y


@_folded
def log1p(x: Array, /) -> Array:
    """log(u) x / (u - 1) with u = 1 + x, which is rounded: its error cancels. x where u is 1."""
    v: Any = x
    u = 1 + v
    is_one, log_u = equal(u, 1), log(u)
    return where(is_one, x, multiply(log_u, v / where(is_one, 1.0, u - 1)))


@_folded
def cos(x: Array, /) -> Array:
    """By the sine: ONNX Runtime has no cosine of float64."""
    return sin(x + pi / 2) if x.dtype == float64 else _need(x).emit("Cos", [x], x.dtype, x.shape)


@_folded
def divide(x: Any, y: Any, /) -> Array:
    common = _dtype_of(x, y)
    return _emitted("Div", x, y, common if isdtype(common, "real floating") else float64)


@_folded
def floor_divide(x: Any, y: Any, /) -> Array:
    common = _dtype_of(x, y)
    if isdtype(common, "real floating"):
        return floor(divide(x, y))
    x, y = _typed(x, common), _typed(y, common)
    return _emitted("Div", x - x % y, y, common)  # Div rounds integers towards 0


@_folded
def pow(x: Any, y: Any, /) -> Array:
    common = _dtype_of(x, y)
    if isinstance(y, float) and not isdtype(common, "real floating"):
        common = float64
    return _emitted("Pow", x, y, common)


@_folded
def maximum(x: Any, y: Any, /) -> Array:
    return _larger("Max", "Greater", x, y)


@_folded
def minimum(x: Any, y: Any, /) -> Array:
    return _larger("Min", "Less", x, y)


def _larger(node: str, first: str, x: Any, y: Any) -> Array:
    common = _dtype_of(x, y)
    x, y = _typed(x, common), _typed(y, common)
    shape, graph = _broadcast(x.shape, y.shape), _need(x, y)
    if isdtype(common, "integral"):  # ONNX Runtime's Max rounds large integers
        return where(graph.emit(first, [x, y], bool, shape), x, y)
    return graph.emit(node, [x, y], common, shape)


@_folded
def not_equal(x: Any, y: Any, /) -> Array:
    return logical_not(equal(x, y))


@_folded
def isfinite(x: Array, /) -> Array:
    return less(abs(x), inf)


bitwise_and = _binary("bitwise_and", "BitwiseAnd", of_bools="And")
bitwise_or = _binary("bitwise_or", "BitwiseOr", of_bools="Or")
bitwise_xor = _binary("bitwise_xor", "BitwiseXor", of_bools="Xor")


@_folded
def bitwise_invert(x: Array, /) -> Array:
    return logical_not(x) if x.dtype == bool else _need(x).emit("BitwiseNot", [x], x.dtype, x.shape)


@_folded
def bitwise_left_shift(x: Any, n: Any, /) -> Array:
    """By a product: ONNX shifts only unsigned integers."""
    return x * 2 ** _shift(n)


@_folded
def bitwise_right_shift(x: Any, n: Any, /) -> Array:
    return x // 2 ** _shift(n)


def _shift(n: Any) -> int:
    n = _value(n)
    if n is None:
        raise NotExported("onnx: a shift by an array is not exported")
    return int(n)


@_folded
def where(condition: Array, x: Any, y: Any, /) -> Array:
    common = _dtype_of(x, y)
    x, y = _typed(x, common), _typed(y, common)
    shape = _broadcast(condition.shape, x.shape, y.shape)
    return _need(condition, x, y).emit("Where", [condition, x, y], common, shape)


def astype(x: Array, dtype: Any, /, *, copy: Any = True, device: Any = None) -> Array:
    """The conversion to a dtype. Floating numbers are cut to integers."""
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if x.value is not None:
        with np.errstate(all="ignore"):
            return Array.constant(x.value.astype(dtype))
    return _need(x).emit("Cast", [x], dtype, x.shape, to=dtype.name)


# Creation


def asarray(x: Any, /, *, dtype: Any = None, device: Any = None, copy: Any = None) -> Array:
    if isinstance(x, Array):
        return x if dtype is None else astype(x, dtype)
    if isinstance(x, Size):
        return _typed(x, dtype or int64)
    return Array.constant(np.asarray(x, dtype))


def arange(
    start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None
) -> Array:
    if stop is None:
        start, stop = 0, start
    graph = _graph(start, stop, step)
    if graph is None:
        return Array.constant(known.arange(start, stop, step, dtype=dtype))
    if step != 1:
        raise NotExported("onnx: arange of a dynamic size and another step than 1")
    dtype = np.dtype(dtype or int64)
    parts = [_typed(x, dtype) for x in (start, stop, step)]
    return graph.emit("Range", parts, dtype, (stop - start,))


def full(shape: Any, value: Any, *, dtype: Any = None, device: Any = None) -> Array:
    shape = shape if isinstance(shape, tuple | list) else (shape,)
    number = value if isinstance(value, Array) else Array.constant(np.asarray(value, dtype))
    return broadcast_to(number if dtype is None else astype(number, dtype), tuple(shape))


def zeros(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    return full(shape, 0, dtype=dtype or float64)


def ones(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    return full(shape, 1, dtype=dtype or float64)


def full_like(x: Array, /, value: Any, *, dtype: Any = None, device: Any = None) -> Array:
    return full(x.shape, value, dtype=dtype or x.dtype)


def zeros_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    return full_like(x, 0, dtype=dtype)


def ones_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    return full_like(x, 1, dtype=dtype)


def eye(n: int, m: int | None = None, /, *, dtype: Any = None, device: Any = None) -> Array:
    rows, columns = arange(n)[:, None], arange(n if m is None else m)[None, :]
    return astype(equal(rows, columns), dtype or float64)


# Shapes and indices


def broadcast_to(x: Array, /, shape: tuple[int, ...]) -> Array:
    _broadcast(x.shape, shape)
    graph = _graph(x, *shape)
    if graph is None:
        return Array.constant(np.broadcast_to(x.value, shape))  # type: ignore[arg-type]
    if tuple(map(_key, x.shape)) == tuple(map(_key, shape)):
        return x
    return graph.emit("Expand", [x, graph.shape_vector(shape)], x.dtype, shape)


def _key(n: int) -> Any:
    return n.key if isinstance(n, Size) else n


def reshape(x: Array, /, shape: Any, *, copy: Any = None) -> Array:
    shape = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    if -1 in shape:
        rest = math.prod(n for n in shape if isinstance(n, Size) or n != -1)
        missing = math.prod(x.shape) // rest
        shape = tuple(n if isinstance(n, Size) or n != -1 else missing for n in shape)
    if math.prod(map(int, shape)) != math.prod(map(int, x.shape)):
        raise ValueError(f"onnx: an array of shape {x.shape} cannot be reshaped to {shape}")
    graph = _graph(x, *shape)
    if graph is None:
        return Array.constant(np.reshape(x.value, shape))  # type: ignore[arg-type]
    if tuple(map(_key, x.shape)) == tuple(map(_key, shape)):
        return x
    return graph.emit("Reshape", [x, graph.shape_vector(shape)], x.dtype, shape, allowzero=1)


@_folded
def permute_dims(x: Array, /, axes: tuple[int, ...]) -> Array:
    shape = tuple(x.shape[a] for a in axes)
    return _need(x).emit("Transpose", [x], x.dtype, shape, perm=tuple(axes))


@_folded
def matrix_transpose(x: Array, /) -> Array:
    axes = tuple(range(x.ndim))
    return permute_dims(x, (*axes[:-2], axes[-1], axes[-2]))


@_folded
def expand_dims(x: Array, /, *, axis: int | tuple[int, ...] = 0) -> Array:
    axes = (axis,) if isinstance(axis, int) else axis
    rank = x.ndim + len(axes)
    axes = tuple(a % rank for a in axes)
    sizes = iter(x.shape)
    shape = [1 if i in axes else next(sizes) for i in range(rank)]
    listed = Array.constant(np.asarray(axes, np.int64))
    return _need(x).emit("Unsqueeze", [x, listed], x.dtype, shape)


@_folded
def squeeze(x: Array, /, axis: int | tuple[int, ...]) -> Array:
    axes = _axes(x, axis)
    shape = [n for i, n in enumerate(x.shape) if i not in axes]
    listed = Array.constant(np.asarray(axes, np.int64))
    return _need(x).emit("Squeeze", [x, listed], x.dtype, shape)


def stack(arrays: Sequence[Array], /, *, axis: int = 0) -> Array:
    return concat([expand_dims(x, axis=axis) for x in arrays], axis=axis)


@_folded
def concat(arrays: Sequence[Array], /, *, axis: int | None = 0) -> Array:
    if axis is None:
        arrays, axis = [reshape(x, (-1,)) for x in arrays], 0
    common = _dtype_of(*arrays)
    arrays = [astype(x, common) for x in arrays]
    axis %= arrays[0].ndim
    shape = list(_without(axis, arrays[0].shape, *(x.shape for x in arrays[1:])))
    shape.insert(axis, functools.reduce(lambda a, b: a + b, (x.shape[axis] for x in arrays)))
    filled = [x for x in arrays if isinstance(x.shape[axis], Size) or x.shape[axis]]
    if len(filled) < len(arrays):
        return concat(filled, axis=axis) if filled else arrays[0]
    return _need(*arrays).emit("Concat", arrays, common, shape, axis=axis)


def _without(axis: int, *shapes: Sequence[int]) -> tuple[int, ...]:
    return _broadcast(*(tuple(s[:axis]) + tuple(s[axis + 1 :]) for s in shapes))


@_folded
def tile(x: Array, repetitions: tuple[int, ...], /) -> Array:
    rank = builtins.max(x.ndim, len(repetitions))
    times = (1,) * (rank - len(repetitions)) + tuple(repetitions)
    x = reshape(x, (1,) * (rank - x.ndim) + tuple(x.shape))
    graph = _need(x, *times)
    shape = [n * t for n, t in zip(x.shape, times, strict=True)]
    return graph.emit("Tile", [x, graph.shape_vector(times)], x.dtype, shape)


@_folded
def flip(x: Array, /, *, axis: Any = None) -> Array:
    axes = _axes(x, axis)
    return x[tuple(slice(None, None, -1 if i in axes else None) for i in range(x.ndim))]


@_folded
def roll(x: Array, /, shift: int, *, axis: int) -> Array:
    """The last `shift` elements of the axis become the first."""
    axis %= x.ndim
    if not shift:
        return x

    def part(start: int | None, stop: int | None) -> Array:
        keys = [slice(None)] * x.ndim
        keys[axis] = slice(start, stop)
        return x[tuple(keys)]

    return concat([part(-shift, None), part(None, -shift)], axis=axis)


def getitem(x: Array, key: Any) -> Array:
    """x[key], of ints, slices, None and an ellipsis."""
    keys = list(key) if isinstance(key, tuple) else [key]
    for k in keys:
        if not (k is None or k is Ellipsis or isinstance(k, int | slice)):
            raise NotExported("onnx: an index that is an array is not exported; take(x, ids) is")
    if x.value is not None and _graph(*_parts(keys)) is None:
        return Array.constant(x.value[tuple(keys)])
    n_given = builtins.sum(k is not None and k is not Ellipsis for k in keys)
    if Ellipsis not in keys:
        keys.append(Ellipsis)
    at = keys.index(Ellipsis)
    keys[at : at + 1] = [slice(None)] * (x.ndim - n_given)
    bounds: dict[int, tuple[int, int, int]] = {}  # axis -> start, stop, step
    shape = list(x.shape)
    for axis, k in enumerate(k for k in keys if k is not None):
        n = shape[axis]
        if isinstance(k, slice):
            start, stop, step, length = _sliced(k, n)
            if (start, step) != (0, 1) or _key(length) != _key(n):
                bounds[axis], shape[axis] = (start, stop, step), length
        else:
            first = k if k >= 0 else n + k
            if not 0 <= first < n:
                raise IndexError(f"onnx: index {k} is out of range for an axis of {n}")
            bounds[axis], shape[axis] = (first, first + 1, 1), 1
    if bounds:
        graph = _need(x, *_parts(keys))
        starts, stops, steps = (graph.shape_vector(c) for c in zip(*bounds.values(), strict=True))
        axes = Array.constant(np.asarray(list(bounds), np.int64))
        of_table = [a for a in bounds if isinstance(shape[a], Size) > isinstance(x.shape[a], Size)]
        x = graph.emit("Slice", [x, starts, stops, axes, steps], x.dtype, shape)
        if of_table:  # states the size for tools, which assume that the table may be too short
            sizes = graph.shape_vector(shape)
            x = graph.emit("Reshape", [x, sizes], x.dtype, shape, allowzero=1)
    of_x = [k for k in keys if k is not None]
    if taken := tuple(i for i, k in enumerate(of_x) if isinstance(k, int)):
        x = squeeze(x, axis=taken)
    left = [k for k in keys if not isinstance(k, int)]
    new = tuple(i for i, k in enumerate(left) if k is None)
    return expand_dims(x, axis=new) if new else x


def _parts(keys: Sequence[Any]) -> list[Any]:
    return [p for k in keys for p in ((k.start, k.stop) if isinstance(k, slice) else (k,))]


def _sliced(key: slice, n: int) -> tuple[int, int, int, int]:
    """(start, stop, step, length) of a slice of an axis of n elements."""
    step = 1 if key.step is None else int(key.step)
    if step == -1 and key.start is None and key.stop is None:
        return n - 1, int(iinfo(int64).min), -1, n
    if step < 1:
        raise NotExported(f"onnx: the slice {key} is not exported")
    start = _bound(0 if key.start is None else key.start, n)
    stop = _bound(n if key.stop is None else key.stop, n)
    length = stop - start if stop > start else 0
    return start, stop, step, length if step == 1 else (length + step - 1) // step


def _bound(at: int, n: int) -> int:
    at = n + at if at < 0 else at
    return 0 if at < 0 else n if at > n else at


@_folded
def take(x: Array, ids: Array, /, *, axis: int | None = None) -> Array:
    axis = (axis or 0) % x.ndim
    ids = _not_from_the_end(ids, x.shape[axis])
    shape = (*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :])
    return _need(x, ids).emit("Gather", [x, ids], x.dtype, shape, axis=axis)


@_folded
def take_along_axis(x: Array, ids: Array, /, *, axis: int = -1) -> Array:
    axis %= x.ndim
    ids = _not_from_the_end(ids, x.shape[axis])
    common = _without(axis, x.shape, ids.shape)
    x, ids = (broadcast_to(a, (*common[:axis], a.shape[axis], *common[axis:])) for a in (x, ids))
    return _need(x, ids).emit("GatherElements", [x, ids], x.dtype, ids.shape, axis=axis)


def _not_from_the_end(ids: Array, n: int) -> Array:
    """The ids, but n for negative ones: ONNX counts those from the end, and refuses n."""
    return ids if ids.value is not None else where(less(ids, 0), n, ids)


def index_add(x: Array, ids: Array, y: Array) -> Array:
    """x with the rows y (N, D) added at ids (N,), which may repeat. Not of the array API."""
    graph = _need(x, ids, y)
    rows = reshape(ids, (*ids.shape, 1))
    return graph.emit("ScatterND", [x, rows, y], x.dtype, x.shape, reduction="add")


def erf(x: Array) -> Array:
    """The error function of float32. Not of the array API."""
    return _need(x).emit("Erf", [x], x.dtype, x.shape)


# Reductions, sorting, products


def _axes(x: Array, axis: Axis) -> tuple[int, ...]:
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    return tuple(a % x.ndim for a in axes)


def _reduced(node: str, x: Array, axis: Axis, keepdims: Any) -> Array:
    axes = _axes(x, axis)
    if not axes:
        return x
    shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes]
    return _need(x).emit(node, [x], x.dtype, shape, axes=axes, keepdims=int(keepdims))


@_folded
def sum(x: Array, /, *, axis: Axis = None, dtype: Any = None, keepdims: Any = False) -> Array:
    return _reduced("ReduceSum", _to_add(x, dtype), axis, keepdims)


def _to_add(x: Array, dtype: Any) -> Array:
    """x in the dtype of its sums. ONNX Runtime has none of unsigned integers."""
    if dtype is None:
        return x if isdtype(x.dtype, "real floating") else astype(x, int64)
    return astype(x, dtype)


def _reduction(name: str, node: str, *, of_truths: Any = False) -> Callable[..., Array]:
    """A reduction by a node. of_truths: of the elements as bools, which ONNX cannot reduce."""

    def function(x: Array, /, *, axis: Axis = None, keepdims: Any = False) -> Array:
        if not of_truths:
            return _reduced(node, x, axis, keepdims)
        return astype(_reduced(node, astype(astype(x, bool), int32), axis, keepdims), bool)

    function.__name__ = name
    return _folded(function)


mean, max = _reduction("mean", "ReduceMean"), _reduction("max", "ReduceMax")
min, all = _reduction("min", "ReduceMin"), _reduction("all", "ReduceMin", of_truths=True)
any = _reduction("any", "ReduceMax", of_truths=True)


@_folded
def argmax(x: Array, /, *, axis: int | None = None, keepdims: Any = False) -> Array:
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    axis %= x.ndim
    shape = [1 if i == axis else n for i, n in enumerate(x.shape) if keepdims or i != axis]
    return _need(x).emit("ArgMax", [x], int64, shape, axis=axis, keepdims=int(keepdims))


@_folded
def argsort(x: Array, /, *, axis: int = -1, descending: Any = False, stable: Any = True) -> Array:
    """Of equal elements, the first one comes first."""
    axis %= x.ndim
    graph = _need(x)
    options = {"axis": axis, "largest": int(descending), "sorted": 1}
    k = graph.shape_vector([x.shape[axis]])
    return graph.emit("TopK", [x, k], int64, x.shape, output=1, **options)


@_folded
def cumulative_sum(x: Array, /, *, axis: int | None = None, dtype: Any = None) -> Array:
    x = _to_add(x, dtype)
    axis = 0 if axis is None else axis % x.ndim
    return _need(x).emit("CumSum", [x, Array.constant(np.int64(axis))], x.dtype, x.shape)


@_folded
def searchsorted(x: Array, y: Array, /, *, side: str = "left") -> Array:
    """The number of elements of x (N,) below (side "left") or up to each of y (M,)."""
    x, y = x[:, None], y[None, :]
    return sum(less(x, y) if side == "left" else less_equal(x, y), axis=0)


@_folded
def matmul(x: Array, y: Array, /) -> Array:
    common = _dtype_of(x, y)
    x, y = astype(x, common), astype(y, common)
    a = x.shape if x.ndim > 1 else (1, *x.shape)
    b = y.shape if y.ndim > 1 else (*y.shape, 1)
    if a[-1] != b[-2]:
        raise ValueError(f"onnx: matmul of shapes {x.shape} and {y.shape}")
    ends = (*a[-2:-1][: x.ndim > 1], *b[-1:][: y.ndim > 1])
    shape = (*_broadcast(a[:-2], b[:-2]), *ends) if len(a) > 2 or len(b) > 2 else ends
    return _need(x, y).emit("MatMul", [x, y], common, shape)
