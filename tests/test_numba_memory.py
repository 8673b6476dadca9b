"""Compiled kernels check addresses, strides and ids in the call that uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from numpy.lib.stride_tricks import as_strided
from test_kernels import require_exact
from test_numba_share import results
from test_numpy_kernels import drawn

from xformer import backends, inference, layers, ops, reference_only, tree
from xformer.dispatch import Kernel
from xformer.layers import BlockConfig
from xformer.typing import Array

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.numba import KERNELS, blocks, linear, share

NUMPY = backends.get("numpy")
COMPILED = {op: Kernel(run, "numpy", unsupported) for op, run, unsupported in KERNELS}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A row is enough for a kernel then."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


# ---- Strides ----

STRIDES = (0, -4, 8, 1 << 34)  # of `v[None]`, `x[::-1][:1]`, and of slices of other arrays


def restrided(x: Array, stride: int) -> Array:
    """The same array, where every axis of length 1 has this stride."""
    steps = [stride if n == 1 else own for n, own in zip(x.shape, x.strides, strict=True)]
    return as_strided(x, x.shape, steps)


HEADS = [((n, d), (d, v), (v,)) for n in (1, 3) for d in (1, 7) for v in (1, 11)]
ROWS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    *((ops.linear_cross_entropy, s, {"targets": np.zeros(s[0][0], int)}) for s in HEADS),
    (ops.sdpa, ((1, 1, 67, 1), (1, 1, 1, 1), (1, 1, 1, 5)), {}),
    (ops.sdpa, ((1, 2, 67, 3), (1, 1, 1, 3), (1, 1, 1, 1)), {}),
    (ops.sdpa, ((1, 1, 67, 3), (1, 1, 70, 3), (1, 1, 70, 1)), {"causal": True}),
    (ops.gelu, ((1, 7),), {}),
    (ops.glu, ((1, 7), (1, 7)), {}),
    (ops.layer_norm, ((1, 7), (7,), (7,)), {}),
    (ops.rms_norm, ((1, 7), (7,)), {}),
    (ops.embedding, ((5, 1),), {"ids": np.array([3])}),
    (ops.embedding, ((1, 7),), {"ids": np.array([0])}),
]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("case", ROWS, ids=lambda case: f"{case[0].__name__} {case[1]}")
def test_the_stride_of_an_axis_of_length_1(case: Any, stride: int) -> None:
    op, shapes, options = case
    args = tuple(restrided(x, stride) for x in drawn(shapes, "float32"))
    assert COMPILED[op].unsupported(*args, **options) is None
    require_exact(NUMPY, COMPILED[op], op, args, options, lambda x: restrided(x, stride))


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("sizes", [(1, 1, 7), (3, 7, 1), (5, 1, 1), (5, 7, 1)])
def test_that_stride_of_few_vectors(
    sizes: tuple[int, int, int], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, n_in, n_out = sizes
    monkeypatch.setattr(linear, "LARGE", 1)
    x, w = drawn(((n, n_in), (n_in, n_out)), "float32")
    backends.get("numba")
    for own in (w, np.asfortranarray(w), w[:, ::-1]):
        with inference():
            y, _ = ops.linear(restrided(x, stride), restrided(own, stride))
        np.testing.assert_allclose(y, x @ own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stride", STRIDES)
def test_that_stride_in_whole_layers(stride: int) -> None:
    backends.get("numba")
    config = BlockConfig(2, 2, 1, gated=True, activation="silu", n_kv_heads=1, norm_kind="rms")
    plain = layers.StackParams.init(NUMPY.generator(1, "float64"), (config,)).blocks
    params = tree.map(lambda p: restrided(p.astype(np.float32), stride), plain)
    (x,) = drawn(((2, 130, 2),), "float32")
    options: Any = {"configs": (config,), "causal": True}
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        assert share.outside(x, params, **options) is None
        got = results(x, params, **options)
    with reference_only():
        wanted = results(x, params, **options)
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-4, err_msg=name)
    one = restrided(x[:1], stride)
    with inference():
        assert blocks.outside(one, params, **options) is None
        y, _ = layers.blocks(one, params, **options)
    np.testing.assert_allclose(y, wanted["y"][:1], rtol=1e-5, atol=1e-6)
