"""`feed_forward` by cuBLASLt: GELU within the products, and where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda_shim.cublaslt_parts import Epilogue
from devices import bits, is_stand_in, placed
from libraries import ON_DEVICE, only
from nvidia import asked, asked_each_time, calling_cublaslt
from stored import DTYPES, normal, on, require_exact

from xformer import RandomKey, explain, inference, layers, tree
from xformer.backends import Backend
from xformer.dispatch import reference_only
from xformer.layers import FeedForwardParams, LinearParams

pytestmark = only(*ON_DEVICE)

BF16, DTYPE = "bfloat16", DTYPES["bfloat16"]
FUSED = ["GELU_AUX_BIAS", "BIAS", "DGELU", "BGRADA", "BGRADA", "DEFAULT"]


@pytest.fixture
def lt(library: Backend) -> Iterator[Any]:
    with calling_cublaslt(library) as found:
        yield found


class Flat:
    """A cache whose gradients are no tree."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def backward(self, dy: Any) -> tuple[Any, ...]:
        dx, (up, down, _) = self.cache.backward(dy)
        return (dx, *up, *down)


def mlp(x: Any, w: Any, b: Any, w_down: Any, b_down: Any, **options: Any) -> Any:
    params = FeedForwardParams(LinearParams(w, b), LinearParams(w_down, b_down))
    y, cache = layers.feed_forward(x, params, **{"activation": "gelu_tanh"} | options)
    return y, Flat(cache)


def arrays(width: int = 16, n: int = 40) -> tuple[np.ndarray, ...]:
    shapes = (2, n, 6), (6, width), (width,), (width, 6), (6,)
    return tuple(normal(i, *shape) for i, shape in enumerate(shapes))


def test_gelu_is_made_with_the_products(library: Backend, lt: Any) -> None:
    require_exact(library, BF16, mlp, *arrays(), kinds="ssffff", roundings=4)
    assert asked_each_time(library, lt) == FUSED


def test_without_biases(library: Backend, lt: Any) -> None:
    x, w, _, w_down, _ = arrays()

    def plain(x: Any, w: Any, w_down: Any) -> Any:
        y, flat = mlp(x, w, None, w_down, None)
        dx, dw, db, dw_down, db_down = 5 * [None]

        class Own:
            def backward(self, dy: Any) -> Any:
                nonlocal dx, dw, db, dw_down, db_down
                dx, dw, db, dw_down, db_down = flat.backward(dy)
                assert db is db_down is None
                return dx, dw, dw_down

        return y, Own()

    require_exact(library, BF16, plain, x, w, w_down, kinds="ssff", roundings=4)
    assert asked_each_time(library, lt) == ["GELU_AUX", "DEFAULT", "DGELU", *3 * ["DEFAULT"]]


def test_weights_by_columns(library: Backend, lt: Any) -> None:
    """As they lie where they are another's transpose."""
    x, w, b, w_down, b_down = (on(library, a, DTYPE) for a in arrays())
    y, flat = mlp(x, w, b, w_down, b_down)
    wanted = [y, *flat.backward(y)]
    ways = (placed(library, library.to_numpy(a).T.copy()).T for a in (w, w_down))
    again, flat = mlp(x, next(ways), b, next(ways), b_down)
    for one, other in zip(wanted, [again, *flat.backward(y)], strict=True):
        pair = (library.to_numpy(a).astype("f4") for a in (one, other))
        assert np.allclose(*pair, rtol=1e-2, atol=1e-2)


def test_inference_keeps_nothing(library: Backend, lt: Any) -> None:
    own = [on(library, a, DTYPE) for a in arrays()]
    y, _ = mlp(*own)
    asked(lt)
    with inference():
        again, flat = mlp(*own)
        assert asked(lt) == ["GELU_BIAS", "BIAS"]
        mlp(own[0], own[1], None, own[3], None)
        assert asked(lt) == ["GELU", "DEFAULT"]
    if is_stand_in(library):
        assert bits(library, y) == bits(library, again)
    else:  # where the epilogue is another one, so may be the algorithm
        pair = (library.to_numpy(a).astype("f4") for a in (y, again))
        assert np.allclose(*pair, rtol=2.0**-6, atol=2.0**-6)
    with pytest.raises(RuntimeError, match="inference"):
        flat.backward(y)


@pytest.mark.parametrize("missing", ["algorithm", "width"])
def test_what_cannot_be_fused(library: Backend, missing: str) -> None:
    """GELU is a launch of its own; a hidden width that is no multiple of 8 has no array beside."""
    lacks = [e for e in Epilogue if "GELU" in e.name] if missing == "algorithm" else []
    with calling_cublaslt(library, lacks) as lt:
        given = arrays(16 if lacks else 12)
        require_exact(library, BF16, mlp, *given, kinds="ssffff", roundings=4)
        unfused = ["BIAS", "BIAS", "DEFAULT", "BGRADA", "BGRADA", "DEFAULT"]
        assert asked_each_time(library, lt) == unfused


def test_who_runs_and_why(library: Backend, lt: Any) -> None:
    x, w, b, w_down, b_down = (on(library, a, DTYPE) for a in arrays())
    params = FeedForwardParams(LinearParams(w, b), LinearParams(w_down, b_down))
    fused: dict[str, Any] = {"activation": "gelu_tanh"}

    def why(own: FeedForwardParams = params, x: Any = x, **options: Any) -> str:
        return explain(layers.feed_forward, x, own, **options)

    said = why(**fused)
    assert said.startswith(
        f"feed_forward on {library.name}: xformer.backends.cupy.feed_forward_lt.feed_forward"
    )
    gated = params._replace(gate=params.up)
    lora = layers.LoRAParams(params.up, w, w, tree.Constant(1.0))
    wide = tree.map(library.upcast, params)
    half = library.cast_params((wide, library.upcast(x)), "float16")
    for wanted, found in (
        ("only gelu_tanh, and no gate", why(activation="gelu")),
        ("only gelu_tanh, and no gate", why(gated, **fused)),
        ("no second linear layer", why(params._replace(down=None), **fused)),
        ("dropout of the hidden layer", why(dropout_rate=0.1, dropout_key=RandomKey(1), **fused)),
        ("dropout of the hidden layer", why(dropout_rate=2.0, **fused)),
        ("its GELU has too few digits for float32", why(wide, library.upcast(x), **fused)),
        ("its GELU has too few digits for float16", why(half[0], half[1], **fused)),
        ("adapters or frozen parameters", why(params._replace(up=lora), **fused)),
        ("an array has no elements", why(x=x[:, :0, :], **fused)),
    ):
        assert ": the reference" in found and f": {wanted}" in found


def test_bad_arguments_are_the_references(library: Backend, lt: Any) -> None:
    x, w, b, w_down, b_down = (on(library, a, DTYPE) for a in arrays())
    for wrong in ((x, w[:5, :], b, w_down, b_down), (x, w, b, w_down[:8, :], b_down)):
        said = []
        for way in (mlp, None):
            with pytest.raises(ValueError, match="linear: ") as caught:
                if way is None:
                    with reference_only():
                        mlp(*(library.upcast(a) for a in wrong))
                else:
                    way(*wrong)
            said.append(str(caught.value))
        assert said[0] == said[1]
    y, flat = mlp(x, w, b, w_down, b_down)
    with pytest.raises(ValueError, match="dy must have shape"):
        flat.backward(y[:, :1, :])
