"""Check array libraries: which functions are missing, and do the others compute what NumPy does?

    backend = foreign("mparray")
    print(missing(backend))
    for work in works():
        print(work.name, distance(work, backend))

`xformer gradcheck --arrays MODULE` does this. FUNCTIONS, ATTRIBUTES and OPERATORS are all that ops,
layers, models and optimisers use of arrays; tests compare them with what these call.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import is_array_api_obj

from xformer import backends, optim
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import reference_only
from xformer.dispatch.backend import Backend
from xformer.proofs.catalogue import Case, cases
from xformer.proofs.catalogue.case import FLOAT32
from xformer.proofs.gradcheck import SMALLEST

# Of the namespace. `__name__` is read by array-api-compat.
FUNCTIONS = (
    *("__array_namespace_info__", "__name__", "abs", "all", "any", "arange", "argmax", "argsort"),
    *("asarray", "astype", "broadcast_to", "concat", "cos", "cumulative_sum", "exp", "eye"),
    *(
        "flip",
        "full",
        "full_like",
        "inf",
        "int64",
        "isdtype",
        "isfinite",
        "log",
        "log1p",
        "matrix_transpose",
    ),
    *("max", "maximum", "mean", "minimum", "ones", "ones_like", "permute_dims", "reshape", "roll"),
    *("searchsorted", "sin", "sqrt", "stack", "sum", "take", "take_along_axis", "tanh", "tile"),
    *("uint8", "where", "zeros", "zeros_like"),
)
# Of arrays.
ATTRIBUTES = ("T", "device", "dtype", "mT", "ndim", "shape")
OPERATORS = (
    *("__add__", "__and__", "__bool__", "__eq__", "__floordiv__", "__ge__", "__getitem__"),
    *("__gt__", "__le__", "__lshift__", "__lt__", "__matmul__", "__mod__", "__mul__", "__ne__"),
    *("__neg__", "__or__", "__pow__", "__radd__", "__rmul__", "__rshift__", "__rsub__"),
    *("__rtruediv__", "__sub__", "__truediv__", "__xor__"),
)
RTOL = {"float64": 1e-10, "float32": FLOAT32}


def foreign(module: str) -> Backend:
    """The backend that makes arrays with `asarray` of a module, in float64 or else in float32.

    ValueError if the module cannot be imported, makes no arrays of the array API, or has neither
    dtype; the message says which.
    """
    try:
        asarray = getattr(importlib.import_module(module), "asarray", None)
        x = None if asarray is None else asarray([0.5])
        xp = array_namespace(x) if is_array_api_obj(x) else None
    except Exception as error:  # the module is any code
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"arrays: module {module} makes no arrays: {why}") from error
    if asarray is None:
        raise ValueError(f"arrays: module {module} has no asarray")
    kind = f"{module}.asarray makes {type(x).__name__}"
    if xp is None:
        raise ValueError(f"arrays: {kind}, which has no __array_namespace__")
    if not hasattr(x, "dtype"):
        raise ValueError(f"arrays: {kind}, which has no dtype")
    dtype = next((name for name in RTOL if _has(xp, name)), None)
    if dtype is None:
        raise ValueError(f"arrays: {kind}, whose namespace has neither float64 nor float32")
    version = getattr(sys.modules[module.partition(".")[0]], "__version__", "")
    return ForeignBackend(module, xp, None, (dtype,), str(version))


def _has(xp: Any, dtype: str) -> bool:
    """Whether arrays can have a dtype. JAX makes float32 arrays when asked for float64."""
    wanted = getattr(xp, dtype, None)
    try:
        return wanted is not None and bool(xp.asarray([0.5], dtype=wanted).dtype == wanted)
    except Exception:  # it is any code
        return False


def missing(backend: Backend) -> list[str]:
    """What is missing of FUNCTIONS, ATTRIBUTES and OPERATORS, as it would be written."""
    xp, x = backend.xp, backend.xp.asarray([[0.5]])  # a matrix has T and mT
    return [
        *(f"xp.{name}" for name in FUNCTIONS if not hasattr(xp, name)),
        *(f"x.{name}" for name in (*ATTRIBUTES, *OPERATORS) if not hasattr(x, name)),
    ]


@dataclass(frozen=True)
class ForeignBackend(Backend):
    """Arrays of any library, made by `asarray`, and read number by number if necessary."""

    def to_numpy(self, array: Array) -> np.ndarray:
        """Return `array` as a NumPy array on the host."""
        shape = tuple(map(int, array.shape))
        try:
            host = np.asarray(array)
            if host.shape == shape and host.dtype.kind in "biuf":
                return host
        except Exception:  # many libraries refuse
            pass
        read: Any = float if self.xp.isdtype(array.dtype, "real floating") else int
        indices = itertools.product(*map(range, shape))
        return np.asarray([read(array[index]) for index in indices]).reshape(shape)

    def _from_host(self, host: np.ndarray) -> Array:
        dtype = getattr(self.xp, host.dtype.name)
        try:
            return self.xp.asarray(host, dtype=dtype)
        except Exception:  # the standard has only Python's numbers and lists
            flat = self.xp.asarray(host.ravel().tolist(), dtype=dtype)
            return self.xp.reshape(flat, host.shape)


class Work(NamedTuple):
    """Something to compute on a backend: `run(backend, dtype)` returns a tree of arrays."""

    subject: str
    name: str
    run: Callable[[Backend, str], Any]


def works() -> Iterator[Work]:
    """Every case of the catalogue, forward and backward, then every optimiser."""
    for case in cases():
        yield Work(case.subject, case.name, partial(_both_ways, case))
    for name in optim.OPTIMISERS:
        yield Work(f"optim.{name}", name, partial(_steps, name))
    for name, run in _OTHERS.items():
        yield Work(f"optim.{name}", name, partial(_of_two, run))


def distance(work: Work, backend: Backend) -> float:
    """The largest distance from NumPy's result, relative to the largest number of each array.

    References run on both. It raises whatever the library raises.
    """
    (dtype,) = backend.dtypes
    with reference_only():
        wanted, got = (outcome(work, b, dtype) for b in (backends.get("numpy"), backend))
    if {name: x.shape for name, x in got.items()} != {name: x.shape for name, x in wanted.items()}:
        raise ValueError("the arrays have other shapes than NumPy's")
    sizes = (max(abs(x).max(initial=0), SMALLEST) for x in wanted.values())
    errors = (abs(got[name] - x).max(initial=0) for name, x in wanted.items())
    return float(max((e / size for e, size in zip(errors, sizes, strict=True)), key=_badness))


def _badness(error: float) -> float:
    return math.inf if math.isnan(error) else error


def outcome(work: Work, backend: Backend, dtype: str) -> dict[str, np.ndarray]:
    """The arrays that a work computes, on the host, by name."""
    found = tree.flatten({"": work.run(backend, dtype)})
    return {name: backend.to_numpy(x) for name, x in found.items() if is_array_api_obj(x)}


def _both_ways(case: Case, backend: Backend, dtype: str) -> Any:
    """Outputs and gradients of a case."""
    fn, args = case.build(backend, dtype)
    y, cache = fn(*args)
    outputs = tuple(y) if isinstance(y, tuple) else (y,)
    rng = backend.generator(1, dtype)
    return outputs, cache.backward(*tree.map(lambda x: rng.normal(tuple(x.shape)), outputs))


def _params(seed: int, backend: Backend, dtype: str) -> dict[str, Array]:
    """Parameters, or gradients, of three shapes."""
    rng = backend.generator(seed, dtype)
    return {"w": rng.normal((3, 5)), "b": rng.normal((5,)), "scale": rng.normal(())}


def _steps(name: str, backend: Backend, dtype: str) -> Any:
    """Parameters and state after two steps of an optimiser."""
    optimiser, params = optim.OPTIMISERS[name], _params(0, backend, dtype)
    if name == "muon":  # for matrices only
        params = {"w": params["w"]}
    state = optimiser.init(params)
    for seed in (1, 2):
        grads = {key: g for key, g in _params(seed, backend, dtype).items() if key in params}
        params, state = optimiser.step(params, grads, state, lr=0.1)
    return params, state


def _of_two(run: Callable[[Any, Any], Any], backend: Backend, dtype: str) -> Any:
    return run(_params(1, backend, dtype), _params(2, backend, dtype))


def _unscaled(params: Any, grads: Any) -> Any:
    return optim.LossScale(8.0).unscale(grads, params)[0]


# Of two trees of arrays.
_OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "clip_by_global_norm": lambda x, y: optim.clip_by_global_norm(x, max_norm=0.5),
    "ema": lambda x, y: optim.ema(x, y, decay=0.9),
    "reduced": lambda x, y: optim.reduced(x, lambda flat: flat / 2),
    "LossScale": _unscaled,
}
