"""The array API for `Traced` arrays: a function returns a view or records an instruction.

NumPy computes the layouts of views. Functions of constants are computed at once. Functions behave
as in array_api_compat's NumPy, so that a run gives the results of the references on NumPy.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Sequence
from typing import Any

import array_api_compat.numpy
import numpy as np

from xformer.backends.numba.kernels.matmul import emit_matmul
from xformer.backends.numba.program import indexed, reduce, typed
from xformer.backends.numba.program.copies import (
    as_array,
    astype,
    contiguous,
    copy_to,
    emit_elementwise,
    reshape,
)
from xformer.backends.numba.program.program import common_program, program_of, require_no_array
from xformer.backends.numba.program.traced import (
    Traced,
    TracedNumber,
    Unrecorded,
    constant,
    is_number,
)

Shape = tuple[int, ...]
xp: Any = array_api_compat.numpy

ELEMENTWISE = (
    *("abs", "acos", "add", "asin", "atan", "atan2", "bitwise_and", "bitwise_invert"),
    *("bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil", "cos"),
    *("cosh", "divide", "equal", "exp", "expm1", "floor", "floor_divide", "greater"),
    *("greater_equal", "isfinite", "isinf", "isnan", "less", "less_equal", "log", "log10"),
    *("log1p", "log2", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor"),
    *("maximum", "minimum", "multiply", "negative", "not_equal", "remainder", "round"),
    *("sign", "sin", "sinh", "sqrt", "square", "subtract", "tan", "tanh", "trunc"),
)
REDUCING = ("all", "any", "argmax", "argmin", "max", "mean", "min", "prod", "std", "sum", "var")
REDUCING_OPTIONS = {"axis", "keepdims", "dtype"}  # options that kernels of reductions support
CALLED = (  # functions that are called on zeros while recording, to learn the result's shape
    *("clip", "flip", "roll", "searchsorted", "sort", "tril", "triu"),
)
VIEWS = (
    *("broadcast_to", "expand_dims", "matrix_transpose", "moveaxis", "permute_dims", "squeeze"),
)
KNOWN = (  # constants, dtypes and functions without an array argument
    *("bool", "e", "empty", "eye", "finfo", "float32", "float64", "full", "iinfo", "inf", "int16"),
    *("int32", "int64", "int8", "isdtype", "linspace", "nan", "newaxis", "ones", "pi", "uint16"),
    *("uint32", "uint64", "uint8", "zeros", "arange", "__array_namespace_info__"),
)


def _dummy(x: Any) -> Any:
    """Return a NumPy array of one element with the dtype and number of axes of a `Traced` x.

    Return other values as they are.
    """
    return np.ones((1,) * x.ndim, x.dtype) if isinstance(x, Traced) else x


def _example(x: Any) -> Any:
    """Return a Python number of the type of a traced one, and other values as `_dummy` does."""
    return _EXAMPLES[x.dtype.kind] if type(x) is TracedNumber else _dummy(x)


def _layouts(arguments: Sequence[Any]) -> list[Any]:
    """Return arguments with the NumPy arrays of `Traced` ones: the values of constants."""
    return [x.layout if isinstance(x, Traced) else x for x in arguments]


def _numbers_cast(arrays: Sequence[Any]) -> list[Any]:
    """Return arrays with traced numbers cast to the dtype that a Python number would take here."""
    if builtins.all(map(is_number, arrays)):
        return list(arrays)
    dtype = np.result_type(*map(_example, arrays))
    cast = []
    for x in arrays:
        if type(x) is TracedNumber:
            if x.dtype.kind == "i" and dtype.kind in "iu" and dtype != np.int64:
                raise Unrecorded(f"a whole number may be out of bounds for {dtype.name}")
            x = astype(x, dtype)
        cast.append(x)
    return cast


_EXAMPLES = {"b": True, "i": 1, "f": 1.0}


def _elementwise(name: str) -> Callable[..., Traced]:
    """Return the elementwise function `name` for `Traced` arrays."""
    fn = getattr(xp, name)
    ufunc = isinstance(fn, np.ufunc)

    def run(out: Any, *arrays: Any) -> None:
        if ufunc:
            fn(*arrays, out=out)
        else:
            out[...] = fn(*arrays)

    def recorded(*arrays: Any) -> Traced:
        program = common_program(arrays)
        with np.errstate(all="ignore"):
            if program is None:
                return constant(fn(*_layouts(arrays)))
            cast = _numbers_cast(arrays)
            dtype = fn(*map(_dummy, cast)).dtype
        out = program.fresh(np.broadcast_shapes(*map(np.shape, cast)), dtype)
        emit_elementwise(program, name, run, out, cast)
        return out

    recorded.__name__ = name
    return recorded


def _reducing(name: str) -> Callable[..., Traced]:
    """Return the reduction `name` for `Traced` arrays."""
    fn = getattr(xp, name)

    def recorded(
        x: Traced, /, *, axis: Any = None, keepdims: bool = False, **options: Any
    ) -> Traced:
        options = {"axis": axis, "keepdims": keepdims} | options
        program = common_program([x])
        if program is None or not x.size:
            return constant(fn(x.layout, **options))
        axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
        reduced = {i % x.ndim for i in axes}
        sizes = [1 if i in reduced else n for i, n in enumerate(x.shape)]
        shape = [n for i, n in enumerate(sizes) if keepdims or i not in reduced]
        out = program.fresh(shape, fn(_dummy(x), **options).dtype)
        label = name if axis is None else f"{name} axis={axis}"
        supported = options.get("dtype", out.dtype) == out.dtype
        supported = supported and not set(options) - REDUCING_OPTIONS
        native = None
        if supported and reduce.is_known(name, out, x):
            native = reduce.find_native(program, name, out, x, reduced)
            if native is None:  # copy x with the reduced axes last
                outer = [i for i in range(x.ndim) if i not in reduced]
                x = contiguous(x.view(x.layout.transpose([*outer, *sorted(reduced)])))
                options = options | {"axis": tuple(range(len(outer), x.ndim)), "keepdims": False}
                native = reduce.find_native(program, name, out, x, set(options["axis"]))

        def run(out: Any, x: Any) -> None:
            out[...] = fn(x, **options).reshape(out.shape)

        program.emit(label, [out], [x], native, run=run)
        return out

    recorded.__name__ = name
    return recorded


def _called(name: str) -> Callable[..., Traced]:
    """Return the function `name` for `Traced` arrays; while recording it is called on zeros."""
    fn = getattr(xp, name)

    def recorded(*arguments: Any, **options: Any) -> Traced:
        indices = [i for i, x in enumerate(arguments) if isinstance(x, Traced)]
        names = [key for key, x in options.items() if isinstance(x, Traced)]
        arrays = [arguments[i] for i in indices] + [options[key] for key in names]

        def call(*values: Any) -> Any:
            positional, named = list(arguments), dict(options)
            for i, value in zip(indices, values, strict=False):
                positional[i] = value
            named.update(zip(names, values[len(indices) :], strict=True))
            return fn(*positional, **named)

        program = common_program(arrays)
        if program is None:
            return constant(call(*_layouts(arrays)))
        like = call(*(np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in arrays))
        out = program.fresh(like.shape, like.dtype)
        program.emit(name, [out], arrays, run=lambda out, *values: np.copyto(out, call(*values)))
        return out

    recorded.__name__ = name
    return recorded


def _view(name: str) -> Callable[..., Traced]:
    """Return the function `name`, which returns a view of its first argument."""
    fn = getattr(xp, name)

    def recorded(x: Traced, /, *arguments: Any, **options: Any) -> Traced:
        return x.view(fn(x.layout, *arguments, **options))

    recorded.__name__ = name
    return recorded


def _known(name: str) -> Any:
    """Return a name of `KNOWN`; functions that create arrays return constants."""
    value = getattr(xp, name)
    if name not in ("arange", "empty", "eye", "full", "linspace", "ones", "zeros"):
        return value
    return lambda *arguments, **options: constant(value(*arguments, **options))


_argsort, _take, _take_along_axis = map(_called, ("argsort", "take", "take_along_axis"))
_cumulative_sum, _broadcast_to = _called("cumulative_sum"), _view("broadcast_to")
_diff, _repeat = _called("diff"), _called("repeat")
_pow, _square = _elementwise("pow"), _elementwise("square")
for _names, _make in (
    (ELEMENTWISE, _elementwise),
    (REDUCING, _reducing),
    (CALLED, _called),
    (VIEWS, _view),
    (KNOWN, _known),
):
    globals().update({_name: _make(_name) for _name in _names})


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not hasattr(xp, name):
        raise AttributeError(name)
    raise Unrecorded(f"{name} of the array API is not recorded")


def asarray(values: Any, /, *, dtype: Any = None, device: Any = None, copy: Any = None) -> Traced:
    """Return a `Traced` array itself, or cast to `dtype`; other values as a constant."""
    if not isinstance(values, Traced):
        require_no_array([values])
        return constant(xp.asarray(values, dtype=dtype))
    return as_array(values) if dtype is None else astype(values, dtype)


def where(condition: Any, x1: Any, x2: Any, /) -> Traced:
    """Return x1 where the condition is True, else x2."""
    program = common_program([condition, x1, x2])
    if program is None:
        return constant(xp.where(*_layouts([condition, x1, x2])))
    x1, x2 = _numbers_cast([x1, x2])
    dtype = xp.where(*map(_dummy, (condition, x1, x2))).dtype
    out = program.fresh(np.broadcast_shapes(*map(np.shape, (condition, x1, x2))), dtype)

    def run(out: Any, condition: Any, x1: Any, x2: Any) -> None:
        np.copyto(out, np.where(condition, x1, x2))  # out may share memory with an input

    ins = [x.layout if isinstance(x, Traced) and x.is_constant else x for x in (condition, x1, x2)]
    native, arrays = typed.native_where(program, out, ins) or (None, ins)
    program.emit("where", [out], arrays, native, run=run, in_place=[range(3)])
    return out


def concat(arrays: Sequence[Traced], /, *, axis: int | None = 0) -> Traced:
    """Return the arrays joined along an axis; axis None flattens them first."""
    arrays = list(arrays)
    program = common_program(arrays)
    if program is None:
        return constant(xp.concat(_layouts(arrays), axis=axis))
    if axis is None:
        arrays, axis = [reshape(x, (-1,)) for x in arrays], 0
    like = xp.concat([_dummy(x) for x in arrays], axis=axis)
    shape = list(arrays[0].shape)
    shape[axis] = builtins.sum(x.shape[axis] for x in arrays)
    out, end = program.fresh(shape, like.dtype), 0
    for x in arrays:
        begin, end = end, end + x.shape[axis]
        key = (builtins.slice(None),) * (axis % out.ndim) + (builtins.slice(begin, end),)
        copy_to(program, out[key], x)
    return out


def stack(arrays: Sequence[Traced], /, *, axis: int = 0) -> Traced:
    """Return the arrays joined along a new axis."""
    at = axis % (arrays[0].ndim + 1)
    return concat([reshape(x, (*x.shape[:at], 1, *x.shape[at:])) for x in arrays], axis=at)


def matmul(x1: Traced, x2: Traced, /) -> Traced:
    """Return x1 @ x2: matmul over the last two axes, broadcast over the other axes."""
    program = common_program([x1, x2])
    if program is None:
        return constant(xp.matmul(*_layouts([x1, x2])))
    if x1.ndim < 2 or x2.ndim < 2:
        raise Unrecorded("matmul of vectors is not recorded")
    if x1.shape[-1] != x2.shape[-2]:
        raise ValueError(f"matmul: shapes {x1.shape} and {x2.shape} do not fit")
    lead = np.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    shape = (*lead, x1.shape[-2], x2.shape[-1])
    out = program.fresh(shape, np.result_type(x1.dtype, x2.dtype))
    if not emit_matmul(out, x1, x2):
        program.emit("matmul", [out], [x1, x2], run=lambda out, a, b: np.matmul(a, b, out=out))
    return out


def take(x: Traced, ids: Traced, /, *, axis: int | None = None) -> Traced:
    """Return the elements of x at the indices `ids` along an axis."""
    program = common_program([x, ids])
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    if program is None:
        return constant(xp.take(x.layout, ids.layout, axis=axis))
    at = axis % x.ndim
    out = program.fresh((*x.shape[:at], *ids.shape, *x.shape[at + 1 :]), x.dtype)
    native = indexed.native_take(program, out, x, ids, at)
    if native is None:
        return _take(x, ids, axis=at)
    ins, raises = [contiguous(x), contiguous(ids)], indexed.out_of_range(x.shape[at], at)
    program.emit("take", [out], ins, native, raises=raises)
    return out


def take_along_axis(x: Traced, ids: Traced, /, *, axis: int = -1) -> Traced:
    """Return the elements of each row of x along an axis at the indices in the same row of ids."""
    program = common_program([x, ids])
    if program is None or axis % x.ndim != x.ndim - 1:
        return _take_along_axis(x, ids, axis=axis)
    out = program.fresh((*x.shape[:-1], *ids.shape[-1:]), x.dtype)
    native = indexed.native_take_along(program, out, x, ids)
    if native is None:
        return _take_along_axis(x, ids, axis=axis)
    ins, raises = [contiguous(x), contiguous(ids)], indexed.out_of_range(x.shape[-1], x.ndim - 1)
    program.emit("take_along_axis", [out], ins, native, raises=raises)
    return out


def argsort(
    x: Traced, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> Traced:
    """Return the indices that sort x along an axis; equal elements keep their order."""
    options = {"axis": axis, "descending": descending, "stable": stable}
    native = None
    if not x.is_constant and axis % x.ndim == x.ndim - 1:
        native = indexed.native_argsort(program_of(x), x, descending=descending)
    if native is None:
        return _argsort(x, **options)
    out = program_of(x).fresh(x.shape, np.int64)
    program_of(x).emit("argsort", [out], [contiguous(x)], native)
    return out


def cumulative_sum(x: Traced, /, *, axis: int | None = None, **options: Any) -> Traced:
    """Return cumulative sums along an axis."""
    native, at = None, 0 if axis is None else axis % x.ndim
    if not x.is_constant and not options and (axis is not None or x.ndim == 1):
        out = program_of(x).fresh(x.shape, xp.cumulative_sum(_dummy(x), axis=at).dtype)
        native = indexed.native_cumulative_sum(program_of(x), out, x, at)
    if native is None:
        return _cumulative_sum(x, axis=axis, **options)
    program_of(x).emit("cumulative_sum", [out], [contiguous(x)], native)
    return out


def diff(x: Traced, /, *, n: int = 1, **options: Any) -> Traced:
    """Return differences of neighbours along an axis, n times. The shape depends on n."""
    return _diff(x, n=operator.index(n), **options)


def repeat(x: Traced, repeats: Any, /, *, axis: int | None = None) -> Traced:
    """Return x with its elements repeated. The shape depends on the values of `repeats`."""
    return _repeat(x, np.asarray(repeats), axis=axis)


def tile(x: Traced, repetitions: Sequence[int], /) -> Traced:
    """Return x repeated along each axis, repetitions[i] times along axis i."""
    repeats = (1,) * (x.ndim - len(repetitions)) + tuple(repetitions)
    sizes = (1,) * (len(repeats) - x.ndim) + x.shape
    with_ones = reshape(x, [n for size in sizes for n in (1, size)])
    pairs = list(zip(repeats, sizes, strict=True))
    broadcast = _broadcast_to(with_ones, [n for pair in pairs for n in pair])
    return reshape(broadcast, [times * size for times, size in pairs])


def pow(x1: Any, x2: Any, /) -> Traced:
    """Return x1 to the power of x2; the int 2 multiplies floats by themselves, as in NumPy."""
    if isinstance(x1, Traced) and x1.dtype.kind == "f" and type(x2) is int and x2 == 2:
        return _square(x1)
    return _pow(x1, x2)


def zeros_like(x: Traced, /, *, dtype: Any = None, device: Any = None) -> Traced:
    """Return a constant of zeros."""
    return full_like(x, 0, dtype=dtype)


def ones_like(x: Traced, /, *, dtype: Any = None, device: Any = None) -> Traced:
    """Return a constant of ones."""
    return full_like(x, 1, dtype=dtype)


def empty_like(x: Traced, /, *, dtype: Any = None, device: Any = None) -> Traced:
    """Return a constant of zeros."""
    return full_like(x, 0, dtype=dtype)


def full_like(x: Traced, value: Any, /, *, dtype: Any = None, device: Any = None) -> Traced:
    """Return a constant with the same value everywhere, which is stored once."""
    return constant(np.broadcast_to(np.asarray(value, dtype or x.dtype), x.shape))


def result_type(*arrays_and_dtypes: Any) -> Any:
    """Return the dtype that NumPy gives a result of these arrays and dtypes."""
    return xp.result_type(*map(_example, arrays_and_dtypes))


def can_cast(from_: Any, to: Any, /) -> bool:
    """Return whether NumPy casts from one dtype to the other safely."""
    return bool(xp.can_cast(from_.dtype if isinstance(from_, Traced) else from_, to))
