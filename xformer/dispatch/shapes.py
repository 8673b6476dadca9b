"""Checks of array arguments, with one wording for all ops.

    @shapes("x (..., I)  w (I, O)  b (O)")

- Capitals are sizes that must agree between arguments. `...` is any number of leading axes, the
  same for all arguments.
- Positional arguments must be arrays of one library, on one device and of one dtype. None is
  allowed if it is the default.
- The dtype is float32 or float64. A storage dtype (`STORED`) is allowed if a kernel of the library
  is registered for it.
- Keyword-only arguments (ids, targets) are checked for shape only; the op checks the rest.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from array_api_compat import is_array_api_obj

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.dispatch import Overridable, Refused, library_of, refusal

FLOATING = ("float32", "float64")
STORED = ("bfloat16", "float16")  # kernels may read and write them; arithmetic is in float32
REMEMBERED = 4096  # combinations of types, dtypes and shapes that an op remembers as valid
# NumPy has one device; JAX places arrays itself and has its own message for mixed devices.
PLACED_BY_LIBRARY = ("numpy", "jax")


F = TypeVar("F", bound=Callable[..., Any])


def shapes(spec: str) -> Callable[[F], F]:
    """A decorator that attaches `check(args, kwargs, overridable)` to an op.

    The check raises ValueError for shapes and devices, TypeError for libraries and dtypes.
    """
    wanted = {name: _dims(dims) for name, dims in re.findall(r"(\w+) \(([^)]*)\)", spec)}

    def decorate(op: F) -> F:
        parameters = inspect.signature(op).parameters.values()
        arrays = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        required = {p.name for p in arrays if p.default is p.empty}
        names = [p.name for p in arrays]
        also = [name for name in wanted if name not in names]
        op_name = op.__name__
        rest = [tuple(names[n:] + also) for n in range(len(names) + 1)]  # after n arguments
        passed: dict[Any, bool] = {}  # valid kinds of call -> whether devices may differ

        def check(
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            overridable: Overridable[..., Any] | None = None,
        ) -> None:
            if kwargs:
                args = args[: len(names)]
                args += tuple([kwargs.get(name) for name in rest[len(args)]])
            try:
                kind = tuple([a if a is None else (type(a), a.dtype, a.shape) for a in args])
            except AttributeError:  # one is not an array; the op may have its own message for it
                kind = None
            placed = passed.get(kind)  # the checks depend on nothing else
            if placed is None:
                by_name = dict(zip(names + also, args, strict=False))
                arrays = {name: by_name.get(name) for name in names}
                _check_arrays(op_name, arrays, required, overridable)
                _check_shapes(op_name, by_name, wanted)
                if len(passed) == REMEMBERED:
                    passed.clear()
                placed = len(args) > 1 and library_of(type(args[0])) not in PLACED_BY_LIBRARY
                if kind is not None:
                    passed[kind] = placed
            if placed:
                device = args[0].device  # once, as it is slow
                for name, array in zip(names[1:], args[1:], strict=False):
                    if array is not None and array.device != device:
                        require_same_device(op_name, name, array, args[0])

        op.check = check  # type: ignore[attr-defined]
        return op

    return decorate


def require_array(op: str, name: str, array: Any, what: str = "an array") -> None:
    """TypeError unless `array` is an array of a supported library.

    Subclasses with other semantics, such as masked arrays, are refused.
    """
    if type(array) in _arrays:
        return
    got = refusal(type(array))
    if got is None and is_array_api_obj(array):
        _arrays.add(type(array))
        return
    if isinstance(array, tree.Frozen):
        got = "a frozen one: xf.tree.value is its array, xf.tree.trained are the others"
    got = got or ("None" if array is None else type(array).__name__)
    raise TypeError(f"{op}: {name} must be {what}, got {got}")


_arrays: set[type] = set()


def require_same_library(op: str, name: str, array: Any, like: Any) -> None:
    """TypeError unless both arrays come from one library."""
    got, wanted = library_of(type(array)), library_of(type(like))
    if got != wanted:
        raise TypeError(f"{op}: {name} must be an array of {wanted}, got one of {got}")


def require_same_device(op: str, name: str, array: Any, like: Any) -> None:
    """ValueError unless both arrays, which must be of one library, are on the same device."""
    if library_of(type(like)) not in PLACED_BY_LIBRARY and array.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device}, got it on {array.device}")


def alike(array: Any, like: Any) -> bool:
    """Whether `array` has the type, device and dtype of `like`."""
    if type(array) is not type(like) or array.dtype != like.dtype:
        return False
    try:
        library = library_of(type(like))
    except Refused:  # `require_array` raises it with the argument's name
        return False
    return library in PLACED_BY_LIBRARY or array.device == like.device


def require_like(op: str, name: str, array: Any, like: Any, *, working: bool = False) -> None:
    """Raise unless `array` has the library, device and dtype of `like`.

    working: compare with the working dtype of `like` instead of its dtype.

    TypeError for another library or dtype, ValueError for another device.
    """
    if not working and alike(array, like):
        return
    require_array(op, name, array)
    require_same_library(op, name, array, like)
    require_same_device(op, name, array, like)
    if array.dtype != (working_dtype(like) if working else like.dtype):
        wanted = "float32" if working and dtype_name(like) in STORED else dtype_name(like)
        raise TypeError(f"{op}: {name} must be {wanted}, got {dtype_name(array)}")


def dtype_name(array: Any) -> str:
    """The name of an array's dtype in the array API standard, such as "float32"."""
    dtype = array.dtype
    name = _names.get(type(dtype))
    if name is not None and dtype.isnative:
        return name
    name = str(dtype).rpartition(".")[2]
    # str(dtype) is slow in NumPy. Each number type of NumPy and of ml_dtypes has its own class.
    numbers = dtype.kind in "biufc" if type(dtype).__module__ == "numpy.dtypes" else name in STORED
    if numbers and getattr(dtype, "isnative", False):
        _names[type(dtype)] = name
    return name


_names: dict[type, str] = {}  # class of a NumPy dtype -> name


def working_dtype(like: Any) -> Any:
    """The dtype to compute in for `like`: float32 if its dtype is in `STORED`, else its dtype."""
    if dtype_name(like) not in STORED:
        return like.dtype
    kind = type(like)
    if kind not in _float32:
        _float32[kind] = array_namespace(like).float32
    return _float32[kind]


_float32: dict[type, Any] = {}  # array type -> float32 of its library


def _dims(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check_arrays(
    op: str, arrays: dict[str, Any], required: set[str], overridable: Overridable[..., Any] | None
) -> None:
    """TypeError unless all are arrays of one library and one dtype that its kernels support."""
    first = None
    for name, array in arrays.items():
        if array is None and name not in required:
            continue
        require_array(op, name, array)
        dtype = dtype_name(array)
        if first is None:
            first, first_array, first_dtype = name, array, dtype
            stored = overridable.stored_by(library_of(type(array))) if overridable else ()
            if dtype not in (*FLOATING, *stored):
                what = f"{op}: {name} must be float32 or float64, got {dtype}"
                raise TypeError(what + (_advice(op, array) if dtype in STORED else ""))
        require_same_library(op, name, array, first_array)
        if dtype != first_dtype:
            raise TypeError(f"{op}: {name} must be {first_dtype} like {first}, got {dtype}")


def _advice(op: str, array: Any) -> str:
    """The end of the message about an array in a storage dtype."""
    library = library_of(type(array))
    return (
        f", which no kernel of {op} for {library} reads; convert it to float32, or run the model "
        "without a precision"
    )


def _check_shapes(op: str, arrays: dict[str, Any], wanted: dict[str, tuple[str, ...]]) -> None:
    sizes: dict[str, tuple[Any, str]] = {}
    for name, dims in wanted.items():
        if hasattr(arrays.get(name), "shape"):  # not for None; the op refuses other objects
            _check_shape(op, name, arrays[name], dims, sizes)


def _check_shape(
    op: str, name: str, array: Any, dims: tuple[str, ...], sizes: dict[str, tuple[Any, str]]
) -> None:
    shape = tuple(array.shape)
    n_fixed = len(dims) - (dims[:1] == ("...",))
    if len(shape) < n_fixed or (len(shape) > n_fixed and n_fixed == len(dims)):
        raise ValueError(_message(op, name, shape, dims, sizes))
    lead = len(shape) - n_fixed
    actual: list[Any] = list(shape[lead:])
    if n_fixed != len(dims):
        actual.insert(0, shape[:lead])
    for dim, size in zip(dims, actual, strict=True):
        if sizes.setdefault(dim, (size, name))[0] != size:
            raise ValueError(_message(op, name, shape, dims, sizes))


def _message(op: str, name: str, shape: Any, dims: Any, sizes: dict[str, tuple[Any, str]]) -> str:
    known = [f"{d} = {sizes[d][0]} (from {sizes[d][1]})" for d in dims if d in sizes]
    known = [k for k in known if not k.endswith(f"(from {name})")]
    wanted = f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"
    where = f" with {', '.join(known)}" if known else ""
    return f"{op}: {name} must be {wanted}{where}, got shape {shape}"
