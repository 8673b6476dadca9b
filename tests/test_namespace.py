"""The namespace of arrays: NumPy itself for NumPy's arrays, else as array-api-compat's."""

from __future__ import annotations

import sys
from typing import Any

import array_api_compat
import numpy as np
import pytest

from xformer import backends
from xformer.backends import Backend
from xformer.base.namespace import array_namespace, largest_first

KEYS = [[2.0, -1.0, 2.0, 0.5, -0.0, 0.0], [np.inf, 3.0, -np.inf, 3.0, np.inf, 1.0]]


@pytest.mark.parametrize("others", [(), (1, 2.0, None, 1j), (np.float32(1), np.ones(2, bool))])
@pytest.mark.parametrize("x", [np.ones(2), np.float64(1), np.ones(2).view(np.recarray)])
def test_of_numpy(x: Any, others: tuple[Any, ...]) -> None:
    assert array_namespace(*others, x) is np
    assert array_namespace(x, *others) is np


def test_equals_array_api_compat(library: Backend) -> None:
    x = library.asarray(np.ones(2, np.float32))
    expected = array_api_compat.array_namespace(x)
    if expected is not array_api_compat.array_namespace(np.ones(2)):
        assert array_namespace(1, x, None) is expected
        if isinstance(expected, type(np)):  # the CUDA stand-in's is an object, of NumPy's name
            with pytest.raises(TypeError, match="Multiple namespaces"):
                array_namespace(np.ones(2), x)


def test_gradients_of_integers_by_jax_are_jax() -> None:
    jax = pytest.importorskip("jax")
    zeros = np.zeros(2, jax.float0)
    assert array_namespace(zeros) is array_api_compat.array_namespace(zeros) is jax.numpy


@pytest.mark.parametrize("arrays", [(), (1, None), ([1.0],), (np.ones(2), "x")])
def test_refuses(arrays: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        array_namespace(*arrays)


def test_largest_first(library: Backend) -> None:
    keys = np.asarray(KEYS, np.float32)
    expected = [[0, 2, 3, 4, 5, 1], [0, 4, 1, 3, 5, 2]]
    assert library.to_numpy(largest_first(library.asarray(keys))).tolist() == expected


def test_largest_first_puts_nan_first_as_array_api_compat() -> None:
    """A NaN score must reach the result: its expert is chosen."""
    x = np.asarray([1.0, np.nan, 3.0, np.nan])
    xp = array_api_compat.array_namespace(x)
    assert xp.argsort(x, descending=True).tolist() == largest_first(x).tolist()
    assert largest_first(x)[:2].tolist() == [1, 3]


def test_backend_has_numpy_itself() -> None:
    assert backends.get("numpy").xp is sys.modules["numpy"]
