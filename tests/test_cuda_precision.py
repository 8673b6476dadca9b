"""Kernels on arrays that are stored in two bytes, on the stand-in and on a GPU.

The numbers, and what is refused, are in test_cuda_storage.py; training is in test_precision.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from array_api_compat import array_namespace
from libraries import ON_DEVICE, only
from nvidia import by_cublas, without_cudnn
from stored import DTYPES, in_both, normal, on, require_exact, rounded

from xformer import RandomKey, layers, ops, tree
from xformer.backends import Backend
from xformer.backends.cupy import deterministic
from xformer.layers import NormConfig
from xformer.ops.sum_to import sum_to

pytestmark = only(*ON_DEVICE)


@pytest.fixture(autouse=True)
def without_libraries(library: Backend) -> Iterator[None]:
    """Products are cuBLAS's, attention is the library's own."""
    with by_cublas(library), without_cudnn(library):
        yield


# ---- Kernels: rows of one number, of packs of eight, of some more ----

WIDTHS = (1, 8, 13, 64, 264, 768)


@in_both
@pytest.mark.parametrize("width", WIDTHS)
def test_rows(library: Backend, precision: str, width: int) -> None:
    x, w, b = normal(1, 5, width), normal(2, width), normal(3, width)

    def require(op: Any, *arrays: Any, **options: Any) -> None:
        require_exact(library, precision, op, *arrays, **options)

    require(ops.layer_norm, x, w, b, kinds="ssff", eps=0.1)
    require(ops.layer_norm, x, w, kinds="ssf-", eps=0.1, eps_inside=False)
    require(ops.rms_norm, x, w, kinds="ssf", eps=0.1, offset=1.0)
    require(ops.rms_norm, x, kinds="ss-", eps=0.1)
    require(ops.glu, x, b + x, kinds="sss")


NORMS = {"layer": NormConfig(eps=0.1), "rms": NormConfig("rms", eps=0.1, offset=1.0)}


class Stacked(NamedTuple):
    """A cache of `add_norm` whose gradients are arrays, and whose dy is that of both results."""

    cache: Any

    def backward(self, dy: Any) -> tuple[Any, ...]:
        dx, dr, dparams = self.cache.backward(dy[0, ...], dy[1, ...])
        return dx, dr, *dparams


def sum_and_norm(x: Any, r: Any, w: Any, b: Any, *, config: NormConfig) -> tuple[Any, Stacked]:
    both, cache = layers.add_norm(x, r, layers.NormParams(w, b), config=config)
    return array_namespace(x).concat([a[None, ...] for a in both]), Stacked(cache)


@in_both
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_sums(library: Backend, precision: str, kind: str, width: int) -> None:
    """Gradients are rounded once, behind the sum of both; twice x is a number of the precision."""
    x, w, b = normal(1, 5, width), normal(2, width), normal(3, width)
    kinds, b = ("sssff", b) if kind == "layer" else ("sssf-", None)
    options: Any = {"config": NORMS[kind], "kinds": kinds}
    require_exact(library, precision, sum_and_norm, x, x, w, b, **options)


@in_both
@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_sums_are_of_what_is_stored(library: Backend, precision: str, kind: str) -> None:
    """The bits of a sum of arrays, and of a norm of it: statistics are those of the rounded sum."""
    x, r, dy = (on(library, 40 + normal(i, 5, 40), DTYPES[precision]) for i in (1, 2, 3))
    w, b = (on(library, normal(i, 40), DTYPES[precision]) for i in (4, 5))
    params = layers.NormParams(w, b if kind == "layer" else None)
    (s, y), cache = layers.add_norm(x, r, params, config=NORMS[kind])
    wanted_s = x + r
    wanted_y, alone = layers.norm(wanted_s, params, config=NORMS[kind])
    dx, _, dparams = cache.backward(None, dy)
    wanted_dx, wanted_dparams = alone.backward(dy)
    got, wanted = (s, y, dx, dparams), (wanted_s, wanted_y, wanted_dx, wanted_dparams)
    for a, b in zip(tree.flatten(got).values(), tree.flatten(wanted).values(), strict=True):
        assert a.dtype == b.dtype and np.array_equal(library.to_numpy(a), library.to_numpy(b))


@in_both
def test_more_rows_than_parts(library: Backend, precision: str) -> None:
    """Sums over rows are float32: 4,100 ones would be 256 in bfloat16."""
    x, w = normal(1, 4100, 3), normal(2, 3)
    require_exact(library, precision, ops.layer_norm, x, w, w, kinds="ssff")
    require_exact(library, precision, ops.rms_norm, x, w, kinds="ssf")
    options: Any = {"config": NORMS["layer"], "kinds": "sssff"}
    require_exact(library, precision, sum_and_norm, x, x, w, w, **options)


@in_both
@pytest.mark.parametrize("size", [5, 64])
@pytest.mark.parametrize(
    "name", ["relu", "silu", "tanh", "sigmoid", "erf", "relu_squared", "quick_gelu", "gelu"]
)
def test_activations(library: Backend, precision: str, name: str, size: int) -> None:
    require_exact(library, precision, getattr(ops, name), 3 * normal(1, size), kinds="ss")


@in_both
@pytest.mark.parametrize("size", [3, 64, 1032])
def test_dropout(library: Backend, precision: str, size: int) -> None:
    options: Any = {"rate": 0.3, "key": RandomKey(3, 1)}
    require_exact(library, precision, ops.dropout, normal(1, size), kinds="ss", **options)


@in_both
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(library: Backend, precision: str, interleaved: bool) -> None:
    """Its tables are float32."""
    angles = normal(2, 7, 3).astype(np.float32)
    tables: Any = {"cos": np.cos(angles), "sin": np.sin(angles), "interleaved": interleaved}
    require_exact(library, precision, ops.rope, normal(1, 2, 3, 7, 8), kinds="ss", **tables)
    x = on(library, normal(1, 2, 3, 7, 8), DTYPES[precision])
    with pytest.raises(TypeError, match=f"rope: cos must be float32, got {precision}"):
        ops.rope(x, cos=on(library, angles, x.dtype), sin=on(library, angles, x.dtype))


@in_both
@pytest.mark.parametrize("width", [5, 64])
def test_embedding(library: Backend, precision: str, width: int) -> None:
    """Rows are copied; the gradients of an id that comes often are summed in float32."""
    ids = np.concatenate([np.arange(9), np.zeros(600, np.int64)]).reshape(3, 203)
    require_exact(library, precision, ops.embedding, normal(1, 9, width), kinds="sf", ids=ids)
    with deterministic():
        require_exact(library, precision, ops.embedding, normal(1, 9, width), kinds="sf", ids=ids)


@in_both
def test_sum_to(library: Backend, precision: str) -> None:
    x = rounded(normal(1, 600, 2, 3), precision)
    total = sum_to(on(library, x, DTYPES[precision]), shape=(2, 3))
    assert total.dtype.name == "float32"
    assert np.allclose(library.to_numpy(total), x.sum(axis=0), rtol=1e-5, atol=1e-4)
    with pytest.raises(TypeError, match=rf"sum_to: no kernel runs in {precision}: it sums leading"):
        sum_to(on(library, x, DTYPES[precision]), shape=(600, 1, 3))


@in_both
@pytest.mark.parametrize("width", [5, 64])
def test_cross_entropy(library: Backend, precision: str, width: int) -> None:
    targets = np.random.default_rng(1).integers(-1, width, 7)
    options: Any = {"targets": targets, "ignore_index": -1, "label_smoothing": 0.1, "z_loss": 0.01}
    for reduction in ("mean", "sum", "none"):
        options["reduction"] = reduction
        require_exact(
            library, precision, ops.cross_entropy, 3 * normal(2, 7, width), kinds="fs", **options
        )


# ---- Products ----


@in_both
def test_linear(library: Backend, precision: str) -> None:
    """Sums are float32; dw is rounded once, y where a bias is added twice."""
    x, w, b = normal(1, 200, 24), normal(2, 24, 33), normal(3, 33)
    options: Any = {"roundings": 2}
    require_exact(library, precision, ops.linear, x, w, b, kinds="ssff", **options)
    require_exact(library, precision, ops.linear, x, w, kinds="ssf-", **options)
    require_exact(library, precision, ops.linear, x, w, kinds="ss--", trainable=False, **options)
    table = on(library, w.T.copy(), DTYPES[precision])
    _, cache = ops.linear(on(library, x, table.dtype), table.T)
    assert cache.backward(on(library, normal(4, 200, 33), table.dtype))[1].T.flags.c_contiguous


@in_both
def test_head(library: Backend, precision: str) -> None:
    """Also of few classes; logits are rounded, and so are the gradients of both factors."""
    x, w, b = normal(1, 7, 16), normal(2, 16, 70) / 4, normal(3, 70)
    options: Any = {"targets": np.random.default_rng(1).integers(-1, 70, 7), "ignore_index": -1}
    for reduction in ("mean", "sum"):
        options["reduction"] = reduction
        require_exact(
            library,
            precision,
            ops.linear_cross_entropy,
            x,
            w,
            b,
            kinds="fsff",
            roundings=4,
            **options,
        )


# ---- Attention ----


@in_both
@pytest.mark.parametrize(("queries", "keys", "width"), [(19, 19, 16), (40, 70, 40), (35, 35, 13)])
def test_sdpa(library: Backend, precision: str, queries: int, keys: int, width: int) -> None:
    """The gradients go by ctx as it is stored, which is one rounding more."""
    q, k, v = (
        normal(1, 1, 4, queries, width),
        normal(2, 1, 2, keys, width),
        normal(3, 1, 2, keys, width),
    )
    options: Any = {"kinds": "ssss--", "roundings": 2, "causal": True}
    require_exact(library, precision, ops.sdpa, q, k, v, **options)
    options |= {"softcap": 5.0, "window": (9, 0), "dropout_rate": 0.2, "dropout_key": RandomKey(5)}
    require_exact(library, precision, ops.sdpa, q, k, v, **options)


@in_both
@pytest.mark.parametrize("keys", [40, 300])
def test_few_queries(library: Backend, precision: str, keys: int) -> None:
    """Parts of split keys are float32, and what they give together is rounded."""
    q, k, v = normal(1, 2, 2, 3, 16), normal(2, 2, 2, keys, 16), normal(3, 2, 2, keys, 16)
    options: Any = {"kinds": "ssss-f", "roundings": 2}
    sinks = normal(4, 2)
    require_exact(library, precision, ops.sdpa, q, k, v, None, sinks, causal=True, **options)
