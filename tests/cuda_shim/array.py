"""Arrays that lie, as far as a program can see, on a device: NumPy's, behind CuPy's manners."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import array_api_compat.numpy as host_xp
import numpy as np

from cuda_shim import waits
from cuda_shim.graph import UNWRITTEN, is_recording, keep, made, note, refuse
from xformer.backends.cupy.module import arithmetic
from xformer.dispatch.shapes import STORED


class Device(str):
    """A device, by its name. Like CuPy's it cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]


DEVICE = Device("cuda:0")
# What CuPy does to arrays that are only STORED in: it moves, rounds and widens them, and adds two.
MOVES = ("ascontiguousarray", "astype", "broadcast_to", "concat", "permute_dims", "reshape", "take")
PRODUCTS = ("matmul", "tensordot", "vecdot")  # which are cuBLAS's


class Fault(BaseException):
    """What a device would not have survived, or not have noticed: nothing may go on behind it."""


class Array:
    """An array of the stand-in. NumPy cannot read it unasked, nor mix it with its own."""

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, host: np.ndarray) -> None:
        self.host = host

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("implicit conversion of a device array to a NumPy array")

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return namespace

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "shape", "ndim", "size", "strides", "flags", "itemsize", "nbytes"):
            return getattr(self.host, name)
        if name in ("T", "mT"):
            return Array(getattr(self.host, name))
        raise AttributeError(name)

    @property
    def device(self) -> Device:
        return DEVICE

    @property
    def data(self) -> Any:
        """As CuPy's: its `ptr` is the address of the first element."""
        return SimpleNamespace(ptr=self.host.ctypes.data)

    @property
    def base(self) -> Array | None:
        """As CuPy's: the array that this one is a view of, which is none itself."""
        base = self.host.base
        return Array(base) if isinstance(base, np.ndarray) else None

    def copy(self) -> Array:
        return Array(made("copy", self.host.copy, self.host))

    def reshape(self, shape: tuple[int, ...]) -> Array:
        reshaped: Array = namespace.reshape(self, shape)
        return reshaped

    def dot(self, other: Array, out: Array | None = None) -> Array:
        """Of two dimensions; where CuPy would copy what it is given, Fault."""
        for factor in (self.host, other.host):
            if factor.ndim != 2 or not (factor.flags.c_contiguous or factor.flags.f_contiguous):
                raise Fault(
                    f"dot: a factor must be a matrix that lies as cuBLAS reads it or its "
                    f"transpose, got shape {factor.shape}, strides {factor.strides}"
                )
        require_no_recording()
        wide = np.dtype(arithmetic(self.dtype.name))  # cuBLAS sums in it, and rounds once
        with quietly(is_stored(self)):
            product = self.host.astype(wide, copy=False) @ other.host.astype(wide, copy=False)
        if out is None:
            with quietly(is_stored(self)):
                return Array(product.astype(self.dtype, copy=False))
        shared = any(np.may_share_memory(out.host, x) for x in (self.host, other.host))
        if not out.flags.c_contiguous or shared:
            raise Fault("dot: out must be contiguous, and no factor")
        with quietly(is_stored(self)):
            out.host[...] = product
        return out

    def __iadd__(self, other: Array) -> Array:
        if is_stored(self):
            require_addition("__iadd__", self, other)

        def run() -> None:
            with quietly(is_stored(self)):
                self.host.__iadd__(unwrap(other))

        if not note("__iadd__", addresses(self, other), run):
            run()
        return self

    def __getitem__(self, index: Any) -> Array:
        require_no_wait(waits.reason_of_index(index, _is_array))
        return wrap(made("__getitem__", lambda: self.host[unwrap(index)], self.host))

    def __setitem__(self, index: Any, values: Any) -> None:
        require_no_wait(waits.reason_of_index(index, _is_array))

        def run() -> None:
            self.host[unwrap(index)] = unwrap(values)

        if not note("__setitem__", addresses(self, values), run):
            run()

    def __bool__(self) -> bool:
        refuse("a value is looked at")
        return bool(self.host)

    def __int__(self) -> int:
        refuse("a value is looked at")
        return int(self.host)

    def __index__(self) -> int:
        refuse("a value is looked at")
        return operator.index(self.host[()])

    def __float__(self) -> float:
        refuse("a value is looked at")
        return float(self.host)

    def __len__(self) -> int:
        return len(self.host)

    def __repr__(self) -> str:
        return f"cuda_shim.{self.host!r}"


def require_no_recording() -> None:
    """As CuPy: products by cuBLAS are not captured."""
    if is_recording():
        raise NotImplementedError("cuBLAS while a graph is captured")


def require_no_wait(why: str | None) -> None:
    """Fault for what waits on CuPy: nothing in the library may, in a step or in none."""
    if why is not None:
        raise Fault(f"on CuPy the host would wait for the device: {why}")


def _is_array(value: Any) -> bool:
    return isinstance(value, Array)


def addresses(*values: Any) -> tuple[Any, ...]:
    """Where arrays lie; numbers as they are."""
    return tuple(x.data.ptr if isinstance(x, Array) else x for x in values)


def hosts(*values: Any) -> list[np.ndarray]:
    """The memory of arrays, of those in lists too."""
    every = [
        x for value in values for x in (value if isinstance(value, list | tuple) else (value,))
    ]
    return [x.host for x in every if isinstance(x, Array)]


def is_stored(value: Any) -> bool:
    """Whether an array is of a dtype that only kernels compute with."""
    return isinstance(value, Array) and value.dtype.name in STORED


def quietly(stored: bool) -> Any:
    """Rounding to two bytes overflows as on a device: without a warning."""
    return np.errstate(over="ignore", invalid="ignore") if stored else nullcontext()


def require_addition(name: str, *arrays: Any) -> None:
    """Fault for any other operation on what is only stored in a dtype."""
    alike = all(isinstance(a, Array) and a.dtype == arrays[0].dtype for a in arrays)
    if name not in ("__add__", "__iadd__") or not alike:
        kinds = ", ".join(str(getattr(a, "dtype", type(a).__name__)) for a in arrays)
        raise Fault(f"{name}: only kernels compute with what is stored in two bytes, got {kinds}")


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Array, *others: Any) -> Any:
        if any(isinstance(other, np.ndarray) for other in others):
            raise TypeError(f"{name}: device arrays do not mix with NumPy arrays")
        if "matmul" in name:
            require_no_recording()
        stored = any(map(is_stored, (self, *others)))
        if stored:
            require_addition(name, self, *others)

        def compute() -> Any:
            with quietly(stored):
                found = getattr(self.host, name)(*(unwrap(other) for other in others))
            # CuPy's results are by rows; NumPy's lie as what they are made from.
            return np.asarray(found, order="C") if isinstance(found, np.ndarray) else found

        result = made(name, compute, *hosts(self, *others))
        return result if result is NotImplemented else wrap(result)

    return apply


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
for _name in (*_BINARY, "lshift", "rshift"):
    for _side in ("", "r"):
        setattr(Array, f"__{_side}{_name}__", _operator(f"__{_side}{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"):
    setattr(Array, f"__{_name}__", _operator(f"__{_name}__"))


def wrap(value: Any) -> Any:
    """Arrays and NumPy's scalars as arrays of the stand-in, inside tuples too."""
    if isinstance(value, np.ndarray | np.generic):
        return Array(np.asarray(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(wrap, value))
    return type(value)(map(wrap, value)) if isinstance(value, tuple | list) else value


def unwrap(value: Any) -> Any:
    """The reverse."""
    if isinstance(value, Array):
        return value.host
    return type(value)(map(unwrap, value)) if type(value) in (tuple, list) else value


class Namespace:
    """array-api-compat's NumPy for these arrays."""

    __name__ = "cuda_shim"

    def __getattr__(self, name: str) -> Any:
        found = getattr(host_xp, name)
        if callable(found) and not isinstance(found, type):
            found = _function(found, name)
        setattr(self, name, found)
        return found

    def __array_namespace_info__(self) -> Any:
        info = host_xp.__array_namespace_info__()
        return SimpleNamespace(
            default_device=lambda: DEVICE,
            devices=lambda: [DEVICE],
            **{name: _function(getattr(info, name)) for name in ("dtypes", "default_dtypes")},
            capabilities=info.capabilities,
        )

    def empty(self, shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
        """As a device gives memory: with what was there, here NaN."""
        _require_device(device)
        host = np.empty(shape, dtype)
        host.view(np.uint8).fill(UNWRITTEN) if host.ndim else host.fill(np.nan)
        keep(host)
        return Array(host)


def _function(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        _require_device(options.pop("device", None))
        require_no_wait(waits.reason(name, args, options, _is_array))
        for value in (*args, *options.values()):
            if isinstance(value, np.ndarray) and function is not host_xp.asarray:
                raise TypeError(f"{function.__name__}: device arrays do not mix with NumPy arrays")
        if name not in MOVES:
            for value in (*args, *options.values()):
                if any(map(is_stored, value if isinstance(value, list | tuple) else (value,))):
                    require_addition(name, value)
        if name in PRODUCTS:
            require_no_recording()
        if name == "asarray" and not isinstance(args[0], Array):
            refuse("a value is brought from the host")
        named = {key: unwrap(value) for key, value in options.items()}

        def compute() -> Any:
            with quietly(name == "astype"):
                return function(*map(unwrap, args), **named)

        return wrap(made(name, compute, *hosts(*args, *options.values())))

    return call


def _require_device(device: Any) -> None:
    if device not in (None, DEVICE):
        raise ValueError(f"there is one device, {DEVICE}, got {device!r}")


namespace = Namespace()
