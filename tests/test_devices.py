"""What tests on a GPU go by: arrays that lie as NumPy's, memory, results made twice, the header."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from devices import placed, repeated
from libraries import ON_DEVICE, header, only

from xformer.backends import Backend


@only(*ON_DEVICE)
def test_arrays_lie_as_numpys_do(library: Backend) -> None:
    """Strides, values, what lies between them, and how an address is aligned."""
    x = np.arange(6 * 8 * 10, dtype=np.float32).reshape(6, 8, 10)
    views = (
        x[:, 1:, 3:-1],
        x[::-1, ::2],
        x.T,
        np.broadcast_to(x[:1], x.shape),
        x[:0],
        x[2, 3, 4, ...],
    )
    for host in views:
        array = placed(library, host)
        assert (array.shape, array.dtype) == (host.shape, host.dtype)
        assert np.array_equal(library.to_numpy(array), host)
        if host.size:
            assert array.strides == host.strides
            assert array.data.ptr % 256 == host.ctypes.data % 256


@only(*ON_DEVICE)
def test_memory_that_is_not_written_to_shows(library: Backend) -> None:
    """It holds NaN; tests would not see otherwise that a kernel leaves a place out."""
    for _ in range(3):
        x = library.xp.empty((3, 5), dtype=np.float32)
        assert np.isnan(library.to_numpy(x)).all()
        x[...] = 1.0


def test_other_bits_in_the_second_run() -> None:
    """Are an error on a GPU, unless sums may come in any order."""
    library: Any = SimpleNamespace(name="cupy", to_numpy=np.asarray)
    numbers = itertools.count()
    same = repeated(library, lambda: [np.zeros(3), None])
    assert same[1] is None
    with pytest.raises(AssertionError, match="gradient 1: other bits in the second run"):
        repeated(library, lambda: [np.zeros(3), np.array(next(numbers))])
    repeated(library, lambda: [np.array(next(numbers))], in_any_order=True)


def test_versions_are_in_the_header() -> None:
    """Of all backends, with --backend cupy."""
    said = {asked: header(asked) for asked in ((), ("numpy",), ("cupy",))}
    assert said[()] == said["numpy",] == []
    lines = said["cupy",]
    assert lines[0].startswith("xformer ") and any(line.startswith("cupy") for line in lines)
