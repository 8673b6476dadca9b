"""What tests on a GPU read of NVIDIA's libraries, here over the stand-in's.

`calling` and `calling_cudnn` of the stand-in take the place of the libraries that a GPU has.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from cuda_shim import CublasLt, Cudnn, calling, calling_cudnn
from cuda_shim.array import Array
from cuda_shim.cublaslt_parts import Epilogue, cuBLASLtError
from libraries import STAND_IN, only
from nvidia import (
    LEFT_OUT,
    _missing,
    _watched_cudnn,
    _watched_lt,
    asked,
    require_algorithm,
    several,
)
from stored import DTYPES, normal, on

from xformer import explain, layers, ops, tree
from xformer.backends import Backend
from xformer.backends.cupy import cublaslt, cudnn, sdpa_cudnn
from xformer.dispatch import inference
from xformer.layers import LinearParams

pytestmark = only(STAND_IN)

INVALID_VALUE = 7
THREE = ["BIAS", "DEFAULT", "BGRADA"]


def linear(library: Backend, rows: int = 40) -> list[Any]:
    x, w, b = (on(library, normal(i, *s), "f4") for i, s in enumerate(((rows, 6), (6, 5), (5,))))
    y, cache = ops.linear(x, w, b)
    return [y.host, *(a.host for a in cache.backward(y))]


@pytest.fixture
def attention(library: Backend) -> Iterator[list[Any]]:
    with calling_cudnn(Cudnn()):
        yield [on(library, normal(i, 1, 1, 64, 8), DTYPES["bfloat16"]) for i in range(3)]


# ---- cuBLASLt ----


def test_products_are_watched(library: Backend) -> None:
    with calling(CublasLt()) as called, _watched_lt(()) as lt:
        linear(library)
        assert [p.epilogue.name for p in called.products] == THREE
        assert several(lt) == [1, 1, 1] and asked(lt) == THREE
        x, w, b = (on(library, normal(1, *s), "f4") for s in ((3, 4), (4, 5), (5,)))
        y, _ = ops.linear(x, w, b)
        cublaslt.multiply(x, w, y, add=True)
        assert asked(lt) == ["BIAS", "DEFAULT+"] and not lt.lacking
        require_algorithm(lt)


def test_several_products_at_once_are_watched(library: Backend) -> None:
    params = tuple(LinearParams(normal(i, 8, 8), normal(i, 8)) for i in range(3))
    own = tree.map(lambda p: library.asarray(p, "float32"), params)
    x = on(library, normal(4, 5, 8), DTYPES["bfloat16"])
    with calling(CublasLt()), _watched_lt(()) as lt, inference():
        layers.linear_many(x, library.cast_params(own, "bfloat16"))
        assert several(lt) == [3] and asked(lt) == ["BIAS"]


def test_what_has_no_algorithm_is_named(library: Backend) -> None:
    """And counted, but not what is made in its place."""
    wanted = linear(library)
    with calling(CublasLt([Epilogue.BIAS])), _watched_lt(()) as lt:
        assert np.allclose(linear(library)[0], wanted[0], rtol=1e-5, atol=1e-5)
        assert asked(lt) == THREE
        assert lt.lacking == ["BIAS of 5 x 6, 6 x 40, 5 x 40, types [0, 0, 0]"]
        with pytest.raises(pytest.skip.Exception, match="no algorithm for BIAS of 5 x 6"):
            require_algorithm(lt)


def test_what_a_test_takes_away_is_not_counted(library: Backend) -> None:
    with calling(CublasLt()), _watched_lt([Epilogue.BIAS]) as lt:
        linear(library)
        assert asked(lt) == ["DEFAULT", *THREE[1:]] and not lt.lacking


def test_a_failure_before_is_forgotten(library: Backend) -> None:
    """Of kinds of products, and of the whole library; the state before comes back."""
    with calling(CublasLt()) as called:
        right, called.matmul = called.matmul, lambda *_: 1 / 0  # type: ignore[assignment,method-assign]
        with pytest.warns(RuntimeWarning, match="cuBLASLt failed"):
            linear(library)
        called.matmul = right
        before = cublaslt._state
        assert before.failure and set(before.plans.values()) == {None}
        with _watched_lt(()) as lt:
            linear(library)
            assert asked(lt) == THREE and not lt.lacking
        assert len(called.products) == 3 and cublaslt._state is before


@pytest.mark.parametrize("name", ["create", "matmul_algo_get_heuristic", "matmul"])
def test_a_failure_within_fails_the_test(library: Backend, name: str) -> None:
    """Also where it is caught, as in a capture."""
    for error in (cuBLASLtError(INVALID_VALUE), TypeError("takes 3 arguments")):
        said = f"cuBLASLt has failed: {type(error).__name__}: "
        with calling(CublasLt(raises={name: error})):
            with pytest.raises(AssertionError, match=said), _watched_lt(()):
                linear(library)
            caught = pytest.raises(AssertionError, match="cuBLASLt has failed")
            with caught, _watched_lt(()), suppress(AssertionError):
                linear(library)


def test_who_is_not_asked_fails_the_test(library: Backend) -> None:
    with calling(CublasLt()), _watched_lt(()):
        x, w, y = (on(library, normal(1, *s), "f4") for s in ((3, 4), (4, 5), (3, 5)))
        cublaslt._state.failure = "it is not asked any more"
        with pytest.raises(AssertionError, match="cuBLASLt was not asked"):
            cublaslt.multiply(x, w, y)


# ---- cuDNN ----


def test_attention_is_watched(library: Backend, attention: list[Any]) -> None:
    with _watched_cudnn() as watched:
        ctx, cache = ops.sdpa(*attention)
        cache.backward(ctx)
        assert [call.name for call in watched.calls] == ["sdpa", "sdpa_backward"]


def test_attention_that_failed_before_is_asked_for_again(
    library: Backend, attention: list[Any]
) -> None:
    ops.sdpa(*attention)
    before = cudnn._state
    kept = dict(before.plans)
    before.plans |= dict.fromkeys(kept, "attention by cuDNN failed")
    with _watched_cudnn() as watched:
        ops.sdpa(*attention)
        assert [call.name for call in watched.calls] == ["sdpa"]
    assert cudnn._state is before and set(before.plans.values()) == {"attention by cuDNN failed"}


def test_attention_that_fails_within_fails_the_test(library: Backend) -> None:
    with calling_cudnn(Cudnn(raises={"execute": RuntimeError("no")})), _watched_cudnn():
        q, k, v = (on(library, normal(i, 1, 1, 64, 8), DTYPES["bfloat16"]) for i in range(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(AssertionError, match="cuDNN has failed"):
                sdpa_cudnn.sdpa(q, k, v)


# ---- What is left out ----


def test_a_library_that_a_test_leaves_out(library: Backend, attention: list[Any]) -> None:
    x, w = (on(library, normal(i, 8, 8), "f4") for i in range(2))
    with calling(CublasLt()) as called, _missing("CUBLASLT", Array), _missing("CUDNN", Array):
        ops.linear(x, w)
        assert not called.products
        assert f"linear_lt.linear: {LEFT_OUT}" in explain(ops.linear, x, w)
        assert f"sdpa_cudnn.sdpa: {LEFT_OUT}" in explain(ops.sdpa, *attention)
    assert LEFT_OUT not in explain(ops.sdpa, *attention)
