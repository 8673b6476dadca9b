"""Ops on arrays that are stored in two bytes, beside exact and float32 arithmetic: on the stand-in
and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from devices import SLACK, placed, repeated

from xformer import ops, reference_only
from xformer.backends import Backend
from xformer.backends.cupy.index_add import is_deterministic
from xformer.dispatch.shapes import STORED

ml_dtypes = pytest.importorskip("ml_dtypes", reason="there is no bfloat16: ml_dtypes is missing")

Host = np.ndarray
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("float16")}
# The largest share of a number that is lost in rounding, and the smallest step of all.
ROUNDING = {"bfloat16": (2.0**-8, 0.0), "float16": (2.0**-11, 2.0**-25)}
ROUNDING["float32"] = (0.0, 0.0)  # it is what all is computed in
in_both = pytest.mark.parametrize("precision", STORED)


def normal(seed: int, *shape: int) -> Host:
    return np.random.default_rng(seed).normal(size=shape)


def dtype_of(precision: str) -> Any:
    """Of a precision, or of float32."""
    return DTYPES.get(precision, np.dtype("float32"))


def rounded(x: Any, precision: str) -> Any:
    """Numbers of a precision, as float64."""
    real = isinstance(x, np.ndarray) and x.dtype.kind == "f"
    return x.astype(np.float32).astype(dtype_of(precision)).astype(np.float64) if real else x


def on(library: Backend, x: Any, dtype: Any) -> Any:
    """On the device, real numbers in that dtype."""
    if not isinstance(x, np.ndarray):
        return x
    return placed(library, x.astype(dtype)) if x.dtype.kind == "f" else library.asarray(x)


def outcome(op: Callable[..., Any], arrays: Any, options: Any, given: Any) -> list[Any]:
    """y and the gradients; given: what is made of each dy."""
    y, cache = op(*arrays, **options)
    dy = np.asarray(0.5 + np.cos(np.arange(y.size))).reshape(y.shape)
    dy = dy.astype(DTYPES["bfloat16"]).astype(np.float64)  # a number of float16 too
    grads = cache.backward(given(dy, y.dtype))
    return [y, *(grads if isinstance(grads, tuple) else (grads,))]


def of_numpy(op: Callable[..., Any], arrays: Any, options: Any, dtype: str) -> list[Any]:
    """The reference's."""

    def given(x: Any, dtype: Any = dtype) -> Any:
        return x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x

    with reference_only():
        options = {name: given(a) for name, a in options.items()}
        found = outcome(op, [given(a) for a in arrays], options, given)
    return [None if a is None else np.asarray(a, np.float64) for a in found]


def require_exact(
    library: Backend,
    precision: str,
    op: Callable[..., Any],
    *arrays: Any,
    kinds: str | None = None,
    roundings: int = 1,
    in_any_order: bool = False,
    run: Callable[..., Any] | None = None,
    **options: Any,
) -> None:
    """Within twice the error of float32 arithmetic on the rounded inputs, and a rounding of y.

    On a GPU within `SLACK` times as much, and twice the same bits unless it adds `in_any_order`.
    kinds: of y and each gradient, s where it is stored in the precision, f where it is float32.
    run: the kernel, in place of whichever takes these arguments. precision: or "float32".
    """
    arrays = tuple(rounded(a, precision) for a in arrays)
    exact, plain = (of_numpy(op, arrays, options, dtype) for dtype in ("float64", "float32"))
    stored = [on(library, a, dtype_of(precision)) for a in arrays]
    options = {name: on(library, a, np.float32) for name, a in options.items()}
    in_any_order |= op is ops.embedding and not is_deterministic()

    def made() -> list[Any]:
        return outcome(run or op, stored, options, lambda dy, dtype: on(library, dy, dtype))

    got = repeated(library, made, in_any_order=in_any_order)
    names = ["-" if a is None else "s" if a.dtype.name == precision else "f" for a in got]
    assert kinds is None or "".join(names) == kinds
    assert all(a.dtype.name == "float32" for a, kind in zip(got, names, strict=True) if kind == "f")
    share, least = ROUNDING[precision]
    for i, (a, p, wanted) in enumerate(zip(got, plain, exact, strict=True)):
        if a is None:
            continue
        values = library.to_numpy(a).astype(np.float64)
        assert values.shape == wanted.shape
        size = np.max(np.abs(wanted), initial=0)
        allowed = 2 * np.max(np.abs(p - wanted), initial=0) + 8 * np.finfo(np.float32).eps * size
        allowed = SLACK[library.name] * allowed
        if names[i] == "s" or roundings > 1:
            allowed = allowed + roundings * np.maximum(share * (np.abs(wanted) + allowed), least)
        if roundings > 1:  # of numbers before they cancel
            allowed = allowed + roundings * share * size
        off = np.abs(values - wanted)
        assert np.all(off <= allowed), f"{'y' if i == 0 else f'gradient {i}'}: {np.max(off):.1e}"
