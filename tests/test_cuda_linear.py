"""Linear maps by cuBLASLt: what it is asked for, what comes out, who runs and why.

Beside the reference they are tested in test_kernels.py, with every other kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import cuda_shim
import numpy as np
import pytest
from causal_models import causal
from cuda_shim.cublaslt_parts import Epilogue
from devices import is_stand_in, placed
from libraries import ON_DEVICE, only
from nvidia import (
    asked,
    asked_each_time,
    by_cublas,
    calling_cublaslt,
    require_algorithm,
    several,
    why_by_cublas,
)
from stored import DTYPES, in_both, normal, on, require_exact

from xformer import backends, explain, inference, layers, ops, tree
from xformer.backends import Backend
from xformer.backends.cupy import cublaslt, linear_cross_entropy, lt_plan
from xformer.layers import LinearParams

pytestmark = only(*ON_DEVICE)


@pytest.fixture
def lt(library: Backend) -> Iterator[Any]:
    with calling_cublaslt(library) as found:
        yield found


def read(library: Backend, array: Any) -> np.ndarray:
    return library.to_numpy(array).astype("f8")


# ---- What is asked for ----


@in_both
def test_linear_in_two_bytes(library: Backend, lt: Any, precision: str) -> None:
    """Each result is rounded once, the gradients of parameters not at all."""
    odd = is_stand_in(library)  # where cuBLASLt has no BIAS, which then is added to what is rounded
    n = 33 if odd else 40
    x, w, b = normal(1, 200, 24), normal(2, 24, n), normal(3, n)
    require_exact(library, precision, ops.linear, x, w, b, kinds="ssff")
    assert asked_each_time(library, lt) == ["BIAS", "DEFAULT", "BGRADA"]
    require_exact(library, precision, ops.linear, x, w, kinds="ssf-")
    require_exact(library, precision, ops.linear, x, w, kinds="ss--", trainable=False)
    assert asked(lt) == ["DEFAULT"] * (5 if is_stand_in(library) else 10)
    table = on(library, w.T.copy(), DTYPES[precision])
    y, cache = ops.linear(on(library, x, table.dtype), table.T, on(library, b, table.dtype))
    dw = cache.backward(y)[1]
    assert asked(lt) == ["BIAS", "DEFAULT", "BGRADB"]
    assert dw.T.flags.c_contiguous and dw.dtype.name == "float32"


def test_a_bias_with_gaps(library: Backend, lt: Any) -> None:
    x, w, b = (on(library, normal(i, *s), "f4") for i, s in enumerate(((3, 4), (4, 5), (10,))))
    y, _ = ops.linear(x, w, b[::2])
    exact = read(library, x) @ read(library, w) + read(library, b)[::2]
    assert np.allclose(read(library, y), exact, rtol=1e-5, atol=1e-5)


@in_both
def test_several_maps_in_two_bytes(library: Backend, lt: Any, precision: str) -> None:
    """dx is one array, to which each product is added."""
    x = on(library, normal(1, 2, 5, 24), DTYPES[precision])
    params = tuple(
        LinearParams(*(on(library, normal(i, *s), x.dtype) for s in ((24, 8), (8,))))
        for i in (2, 3)
    )
    ys, cache = layers.linear_many(x, params)
    dx, dparams = cache.backward(*ys)
    assert asked(lt) == ["BIAS", "BIAS", "DEFAULT", "DEFAULT+", "BGRADA", "BGRADA"]
    exact = sum(read(library, y) @ read(library, p.w).T for y, p in zip(ys, params, strict=True))
    assert dx.dtype == x.dtype
    assert np.allclose(read(library, dx), exact, rtol=2.0**-6, atol=2.0**-3)
    assert {p.dtype.name for p in tree.flatten(dparams).values()} == {"float32"}


# ---- Several maps at once, within inference() ----


def maps_of(library: Backend, precision: str, widths: Sequence[int], *, bias: bool) -> Any:
    """Packed, as `cast_params` does; the numbers as they are rounded."""
    params = tuple(
        LinearParams(*(on(library, normal(i, *s), "f4") for s in ((24, n), (n,))))
        for i, n in enumerate(widths, 2)
    )
    params = params if bias else tuple(p._replace(b=None) for p in params)
    return library.cast_params(params, precision)


def require_near(library: Backend, got: Any, wanted: Any) -> None:
    """The same bits; on a GPU, where several products may have another algorithm, near it."""
    got, wanted = read(library, got), read(library, wanted)
    if is_stand_in(library):
        assert np.array_equal(got, wanted)
    assert np.allclose(got, wanted, rtol=2.0**-6, atol=2.0**-5)


def of_all(library: Backend, lt: Any, x: Any, params: Any) -> list[str]:
    """What is asked for of several maps; their numbers are those of one product of each."""
    with inference():
        ys, _ = layers.linear_many(x, params)
    found = asked(lt)
    for y, own in zip(ys, params, strict=True):
        require_near(library, y, ops.linear(x, *own)[0])
    require_algorithm(lt)
    lt.products.clear()
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("widths", "counts"), [((16, 16, 16), [3]), ((32, 16, 16), [1, 2]), ((16, 24, 8), [1, 1, 1])]
)
@in_both
def test_queries_keys_and_values_at_once(
    library: Backend,
    lt: Any,
    precision: str,
    widths: tuple[int, ...],
    counts: list[int],
    bias: bool,
) -> None:
    """One product of maps that are alike; the same numbers as by one product of each."""
    params = maps_of(library, precision, widths, bias=bias)
    x = on(library, normal(1, 2, 5, 24), params[0].w.dtype)
    with inference():
        ys, _ = layers.linear_many(x, params)
    require_algorithm(lt)
    assert sorted(several(lt)) == counts
    assert asked(lt) == ["BIAS" if bias else "DEFAULT"] * len(counts)
    for y, own in zip(ys, params, strict=True):
        wanted, _ = ops.linear(x, *own)
        assert y.dtype == x.dtype
        require_near(library, y, wanted)
        exact = read(library, x) @ read(library, own.w)
        exact = exact + (read(library, own.b) if bias else 0)
        assert np.allclose(read(library, y), exact, rtol=2.0**-6, atol=2.0**-5)


@in_both
def test_of_one_row(library: Backend, lt: Any, precision: str) -> None:
    """A token of one text, whose results lie by rows and by columns."""
    params = maps_of(library, precision, (16, 16, 16), bias=True)
    x = on(library, normal(1, 1, 1, 24), params[0].w.dtype)
    assert of_all(library, lt, x, params) == ["BIAS"]


@in_both
def test_maps_that_are_not_at_once(library: Backend, lt: Any, precision: str) -> None:
    """For a backward that does not keep all, of weights that lie anywhere, without some bias."""
    q, k, v = maps_of(library, precision, (16, 16, 16), bias=True)
    x = on(library, normal(1, 5, 24), q.w.dtype)
    layers.linear_many(x, (q, k, v))
    assert asked(lt) == ["BIAS"] * 3
    layers.linear_many(x, (q, k, v), all_kept=True)
    assert asked(lt) == ["BIAS"]
    apart = placed(library, library.to_numpy(k.w).copy())
    for others in (
        (q, k._replace(w=apart), v),
        (v, k, q),
        (q, v, k),
        (q, q, q),
        (q, k._replace(b=None), v),
    ):
        assert len(of_all(library, lt, x, others)) == 3


@in_both
def test_maps_by_columns_at_once(library: Backend, lt: Any, precision: str) -> None:
    """As weights of `torch` lie."""
    sizes = (24, 16), (16,)
    params = tuple(
        LinearParams(
            placed(library, np.asfortranarray(normal(i, *sizes[0]).astype("f4"))),
            on(library, normal(-i % 7, *sizes[1]), "f4"),
        )
        for i in (2, 3)
    )
    params = library.cast_params(params, precision)
    assert all(p.w.flags.f_contiguous for p in params)
    x = on(library, normal(1, 5, 24), params[0].w.dtype)
    assert of_all(library, lt, x, params) == ["BIAS"]


@in_both
def test_at_once_without_such_an_algorithm(library: Backend, precision: str) -> None:
    with calling_cublaslt(library, (Epilogue.BIAS,)) as lt:
        params = maps_of(library, precision, (16, 16, 16), bias=True)
        x = on(library, normal(1, 5, 24), params[0].w.dtype)
        assert of_all(library, lt, x, params) == ["DEFAULT"] * 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("weights", "outside|aligned"),
        ("biases", "outside|aligned"),
        ("results", "write to one place"),
        ("alignment", "not aligned as the heuristics were told"),
    ],
)
def test_planted_distances(
    stand_in: Backend, lt: Any, wrong: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in sees what would be read and written in a wrong place."""
    params = maps_of(stand_in, "bfloat16", (16, 16, 16), bias=True)
    x = on(stand_in, normal(1, 5, 24), params[0].w.dtype)
    several, distance = lt_plan.Matrix.several, cublaslt.distance

    def planted(own: Any, batch: int, apart: int) -> Any:
        found = several(own, batch, apart)
        if wrong == "weights" and apart > 80:
            found = found._replace(apart=apart - 8)
        if wrong == "results" and apart == 80:
            found = found._replace(apart=72)
        return found._replace(alignment=256) if wrong == "alignment" else found

    def further(arrays: Any) -> Any:
        return distance(arrays) - 8 * (wrong == "biases" and arrays[0].ndim == 1)

    monkeypatch.setattr(lt_plan.Matrix, "several", planted)
    monkeypatch.setattr(cublaslt, "distance", further)
    with inference(), pytest.raises(cuda_shim.Fault, match=said):
        layers.linear_many(x, params)


def test_maps_in_float32_are_not_at_once(library: Backend, lt: Any) -> None:
    """Wherever they lie; nor are biases with gaps, which a product would read on end."""
    for dtype, step, wanted in (
        ("f4", 1, 3),
        (DTYPES["bfloat16"], 2, 3),
        (DTYPES["bfloat16"], 1, 1),
    ):
        held = np.zeros(3 * 64 * 64 + 3 * 128 + 256, dtype)
        start = -held.ctypes.data % 256 // held.itemsize
        held[start:] = normal(1, held.size - start)
        whole = placed(library, held)[start:]
        params = tuple(
            LinearParams(
                library.xp.reshape(whole[i * 4096 : (i + 1) * 4096], (64, 64)),
                whole[3 * 4096 + 128 * i :][: 64 * step : step],
            )
            for i in range(3)
        )
        x = on(library, normal(3, 5, 64), dtype)
        assert len(of_all(library, lt, x, params)) == wanted


@in_both
def test_packed(library: Backend, precision: str) -> None:
    """In one array, each where 16 bytes and more can be read at once; what it stood in stays."""
    tree_of = {
        "a": on(library, normal(1, 3, 5), "f4"),
        "b": tree.Frozen(placed(library, normal(2, 4, 6).astype("f4").T)),
        "c": (on(library, normal(3, 7), "f4"), tree.Constant(2.0), None),
        "d": on(library, np.empty((0, 3)), "f4"),
        "e": placed(library, normal(4, 6, 8).astype("f4")[::2, ::2]),
    }
    found = library.cast_params(tree_of, precision)
    assert isinstance(found["b"], tree.Frozen) and found["c"][1:] == tree_of["c"][1:]
    own = tree.flatten(tree.thaw(found))
    for name, leaf in tree.flatten(tree.thaw(tree_of)).items():
        assert own[name].dtype == DTYPES[precision] and own[name].shape == leaf.shape
        rounded = library.to_numpy(leaf).astype(DTYPES[precision])
        assert np.array_equal(library.to_numpy(own[name]), rounded)
    at = [leaf.data.ptr for leaf in own.values() if leaf.size]
    assert own["b"].flags.f_contiguous and at == sorted(at)
    assert all((b - a) % 256 == 0 for a, b in itertools.pairwise(at))
    assert library.cast_params({}, precision) == {}


@in_both
def test_head_in_two_bytes(library: Backend, lt: Any, precision: str) -> None:
    x, w, b = normal(1, 7, 16), normal(2, 16, 70) / 4, normal(3, 70)
    options: Any = {"targets": np.random.default_rng(1).integers(-1, 70, 7), "ignore_index": -1}
    options |= {"kinds": "fsff", "roundings": 4}
    require_exact(library, precision, ops.linear_cross_entropy, x, w, b, **options)


def test_head_adds_chunks_up(library: Backend, lt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """dw of each chunk to that of those before it, in place."""
    x, w, b = (on(library, normal(i, *s), "f4") for i, s in enumerate(((7, 6), (6, 4096), (4096,))))
    options: Any = {"targets": library.asarray(np.arange(7)), "reduction": "sum"}
    loss, cache = ops.linear_cross_entropy(x, w, b, **options)
    whole = cache.backward(library.asarray(np.float32(1)))
    assert asked(lt) == ["BIAS", "DEFAULT", "BGRADA"]
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", 4 * 3 * 4096)
    again, cache = ops.linear_cross_entropy(x, w, b, **options)
    assert asked(lt) == ["BIAS", "DEFAULT", "BGRADA", "BIAS", "DEFAULT", "BGRADA+"]
    assert np.allclose(read(library, loss), read(library, again), rtol=1e-6)
    for one, other in zip(whole, cache.backward(library.asarray(np.float32(1))), strict=True):
        assert np.allclose(read(library, one), read(library, other), rtol=1e-5, atol=1e-6)
    with inference():
        ops.linear_cross_entropy(x, w, b, **options)
    assert asked(lt) == ["BIAS"] * 2


def test_a_step_of_a_model(library: Backend, lt: Any) -> None:
    """Every product of a toy Llama but attention's, beside float64."""
    model, params = causal("llama")
    ids = np.random.default_rng(1).integers(0, 5, (2, 20))

    def step(place: Backend, dtype: str) -> dict[str, Any]:
        own = tree.map(lambda p: place.asarray(p, dtype), params)
        loss, cache = model.loss(own, place.asarray(ids), place.asarray(ids + 1))
        found = tree.flatten({"loss": loss, "grads": cache.backward()})
        return {name: place.to_numpy(a) for name, a in found.items()}

    exact = step(backends.get("numpy"), "float64")
    for name, found in step(library, "float32").items():
        assert np.max(np.abs(found - exact[name])) <= 5e-5 * np.max(np.abs(exact[name])), name
    assert {"DEFAULT", "DEFAULT+"} <= set(asked(lt))


# ---- Who runs, and why ----


def test_who_runs_and_why(library: Backend) -> None:
    x, w = library.asarray(np.ones((2, 3), "f4")), library.asarray(np.ones((3, 4), "f4"))
    with by_cublas(library):
        said = explain(ops.linear, x, w)
    assert said.startswith(f"linear on {library.name}: xformer.backends.cupy.linear.linear\n")
    assert f"linear_lt.linear: {why_by_cublas(library)}" in said
    lora = layers.LoRAParams(LinearParams(w, None), w, w, tree.Constant(1.0))
    with calling_cublaslt(library):
        assert explain(ops.linear, x, w).startswith(
            f"linear on {library.name}: xformer.backends.cupy.linear_lt.linear\n"
        )
        for why, found in (
            ("by cuBLASLt are products of", explain(ops.linear, *wide(library, x, w))),
            ("an array has no elements", explain(ops.linear, x[:0, :], w)),
            ("adapters or frozen", explain(layers.linear_many, x, (lora,))),
            ("there are fewer than 4096", explain(ops.linear_cross_entropy, x, w, targets=x[:, 0])),
        ):
            assert f": {why}" in found


def wide(library: Backend, *arrays: Any) -> list[Any]:
    return [library.xp.astype(a, library.xp.float64) for a in arrays]


@pytest.mark.parametrize("precision", ["float32", *DTYPES])
def test_without_a_fused_algorithm(library: Backend, precision: str) -> None:
    """Bias and sums are launches of their own; without any algorithm products are by cuBLAS."""
    dtype = DTYPES.get(precision, np.dtype("f4"))
    x, w, b = (on(library, normal(i, *s), dtype) for i, s in enumerate(((9, 6), (6, 5), (5,))))
    found = []
    for lacks in ((), (Epilogue.BIAS, Epilogue.BGRADA, Epilogue.BGRADB), [*Epilogue]):
        with calling_cublaslt(library, lacks):
            for way in (w, placed(library, library.to_numpy(w).T.copy()).T):
                y, cache = ops.linear(x, way, b)
                found.append([read(library, a) for a in (y, *cache.backward(x[:, :5]))])
    for i, others in enumerate((found[2:4], found[4:])):
        for fused, other in zip(found[:2], others, strict=True):
            for one, another in zip(fused, other, strict=True):
                assert np.allclose(one, another, rtol=2.0**-6, atol=2.0**-6), i
