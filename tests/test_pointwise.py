"""`clip` and `sign` of `ops._pointwise`, and that nothing in xformer/ calls what waits on CuPy."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_shim import Fault
from cuda_shim.waits import BOOLEAN, WAITS
from libraries import STAND_IN, only

import xformer
from xformer.backends import Backend
from xformer.ops._pointwise import clip, sign

NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 7.5, -7.5, 1e-40, -1e-40, np.inf, -np.inf, np.nan]
HOME = Path(xformer.__file__).parent
FLOATS = pytest.mark.parametrize("dtype", ["float32", "float64"])


def same(got: Any, wanted: np.ndarray, library: Backend) -> bool:
    """Bits and dtype, but for the sign of NaN, which no library promises."""
    host = library.to_numpy(got)
    if host.dtype != wanted.dtype or not np.array_equal(host, wanted, equal_nan=True):
        return False
    return bool(np.all((np.copysign(1, host) == np.copysign(1, wanted)) | np.isnan(wanted)))


@FLOATS
def test_they_are_numpys(library: Backend, dtype: str) -> None:
    if dtype not in library.dtypes:
        pytest.skip(f"{library.name} has no {dtype}")
    host = np.array(NUMBERS, dtype)
    if library.name == "jax":  # XLA takes numbers below the smallest normal one for 0 on a CPU
        host = host[np.abs(host) != np.float32(1e-40)]
    x = library.asarray(host)
    assert same(clip(x, -1.0, 1.0), np.clip(host, -1.0, 1.0), library)
    assert same(sign(x), np.sign(host), library)


def test_clip_of_integers(library: Backend) -> None:
    x = library.asarray(np.arange(-5, 6))
    host = library.to_numpy(x)  # int32 where a library has no int64
    assert same(clip(x, -2, 3), np.clip(host, -2, 3), library)
    assert same(clip(x[4], 0, 3), np.clip(host[4], 0, 3)[()], library)


# ---- What waits ----

only_stand_in = only(STAND_IN)


def calls(library: Backend) -> dict[str, Any]:
    """Each function that waits, as it would be called."""
    xp = library.xp
    x, ids = library.asarray(np.ones((3, 4), np.float32)), library.asarray(np.ones(3, np.int64))
    special = {
        "clip": lambda: xp.clip(x, 0.0, 1.0),
        "linspace": lambda: xp.linspace(x[0, :], x[1, :], 3),
        "arange": lambda: xp.arange(ids[0]),
        "repeat": lambda: xp.repeat(x, ids, axis=0),
        "compress": lambda: xp.compress(ids > 0, x, axis=0),
        "extract": lambda: xp.extract(x > 0, x),
        "bincount": lambda: xp.bincount(ids),
    }
    return {name: special.get(name, lambda name=name: getattr(xp, name)(x)) for name in WAITS}


@only_stand_in
@pytest.mark.parametrize("name", sorted(WAITS))
def test_the_stand_in_refuses_what_waits(library: Backend, name: str) -> None:
    with pytest.raises(Fault, match=f"the host would wait for the device: {name}: "):
        calls(library)[name]()


@only_stand_in
def test_the_stand_in_refuses_boolean_indices(library: Backend) -> None:
    x = library.asarray(np.ones((3, 4), np.float32))
    for index in (x > 0, (x[:, 0] > 0, slice(None)), (slice(None), x[0, :] > 0)):
        with pytest.raises(Fault, match=r"x\[boolean\]: the number of elements"):
            x[index]
        with pytest.raises(Fault, match=r"x\[boolean\]: the number of elements"):
            x[index] = 0.0
    assert BOOLEAN == "x[boolean]"


@only_stand_in
def test_what_does_not_wait_is_let_be(library: Backend) -> None:
    xp = library.xp
    x, ids = library.asarray(np.ones((3, 4), np.float32)), library.asarray(np.arange(3))
    assert xp.sign(ids).shape == xp.sort(ids).shape == xp.argsort(ids).shape == (3,)
    assert xp.searchsorted(ids, ids).shape == ids[ids].shape == (3,)
    assert xp.where(x > 0, x, 0.0).shape == (3, 4)
    assert xp.repeat(x, 2, axis=0).shape == (6, 4)
    assert xp.linspace(0.0, 1.0, 5).shape == xp.arange(5).shape == (5,)


def test_nothing_calls_what_waits() -> None:
    """Not even where a device has no part in it: by name. `repeat` of numbers, `where` of three
    and `arange` of numbers do not wait."""
    names = set(WAITS) - {"repeat", "where", "arange"}
    found = []
    for folder in ("ops", "layers", "models", "optim"):
        for path in sorted((HOME / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in names:
                    found.append(f"{path.relative_to(HOME)}:{node.lineno}: {node.attr}")
    assert not found, "on CuPy the host would wait; ops._pointwise has clip and sign"
