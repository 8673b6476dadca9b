"""Losses in programs: of logits, and of the linear map below them, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs extra numba")

from programs import THREADS, judged, names, record

from xformer import inference, ops
from xformer.backends.numba.kernels import linear_cross_entropy as head

OTHERS = "in_range 65", "in_range 4099", "not_equal", "where", "multiply"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"ignore_index": 3},
    {"ignore_index": -100, "label_smoothing": 0.1},
    {"label_smoothing": 1.0, "z_loss": 1e-3},
    {"reduction": "sum", "z_loss": 1e-2, "ignore_index": 0},
]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return rng.normal(size=shape).astype(np.float32)


def targets_of(n: int, n_classes: int, ignored: int | None = None) -> np.ndarray:
    targets = np.random.default_rng(n).integers(0, n_classes, n)
    if ignored is not None:
        targets[::3] = ignored
    return targets


def losses(options: dict[str, Any]) -> Callable[..., list[Any]]:
    def fn(x: Any, targets: Any, dloss: Any) -> list[Any]:
        loss, cache = ops.cross_entropy(x, targets=targets, **options)
        return [loss, cache.backward(dloss)]

    return fn


def losses_of_map(options: dict[str, Any], *, bias: bool = True) -> Callable[..., list[Any]]:
    def fn(x: Any, w: Any, b: Any, targets: Any, dloss: Any) -> list[Any]:
        b = b if bias else None
        loss, cache = ops.linear_cross_entropy(x, w, b, targets=targets, **options)
        return [loss, *(grad for grad in cache.backward(dloss) if grad is not None)]

    return fn


@pytest.mark.parametrize("options", [*OPTIONS, {"reduction": "none", "ignore_index": 7}], ids=str)
def test_cross_entropy(options: dict[str, Any]) -> None:
    n = 301
    dloss = normal(n) if options.get("reduction") == "none" else np.float32(0.7).reshape(())
    arrays = [10 * normal(n, 65), targets_of(n, 65, options.get("ignore_index")), dloss]
    for threads in THREADS:
        judged(losses(options), arrays, threads, others=OTHERS)


def map_arrays(n: int, d: int, v: int, ignored: int | None, layout: str = "rows") -> list[Any]:
    w = normal(d, v) if layout == "rows" else np.asfortranarray(normal(d, v))
    return [normal(n, d), w, normal(v), targets_of(n, v, ignored), np.float32(0.7).reshape(())]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_linear_cross_entropy(layout: str, options: dict[str, Any]) -> None:
    arrays = map_arrays(301, 48, 65, options.get("ignore_index"), layout)
    for threads in THREADS:
        judged(losses_of_map(options), arrays, threads, others=OTHERS)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_chunks(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many classes: gradients add up over chunks, and memory does not grow with the logits."""
    arrays = map_arrays(150, 24, 4099, None, layout)
    whole = record(losses_of_map({}), arrays)
    monkeypatch.setattr(head, "CHUNK", 1 << 17)
    run = judged(losses_of_map({}), arrays, others=OTHERS)
    assert names(run).count("linear loss") == 5
    assert run.plan.nbytes < 0.5 * whole.plan.nbytes
    for got, wanted in zip(run(*arrays), whole(*arrays), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6 * abs(wanted).max())


def test_frozen_weights_and_no_bias() -> None:
    arrays = map_arrays(90, 48, 65, None)
    run = judged(losses_of_map({"trainable": False}, bias=False), arrays, others=OTHERS)
    assert not {"linear dw", "linear db"} & set(names(run))


def test_inference_has_no_gradients() -> None:
    def fn(x: Any, w: Any, b: Any, targets: Any) -> list[Any]:
        with inference():
            return [ops.linear_cross_entropy(x, w, b, targets=targets)[0]]

    *arrays, _ = map_arrays(90, 48, 65, None)
    run = judged(fn, arrays, others=OTHERS)
    assert names(run) == ["in_range 65", "targets", "linear loss", "loss"]


def test_all_ignored_and_no_rows() -> None:
    for n in 40, 0:
        arrays = map_arrays(n, 48, 65, None)
        arrays[3] = np.full(n, 5)
        loss, *grads = record(losses_of_map({"ignore_index": 5}), arrays)(*arrays)
        assert loss == 0
        assert not any(grad.any() for grad in grads)


def test_what_an_ignored_token_holds_stays_there() -> None:
    arrays = map_arrays(90, 48, 65, 2)
    x, targets = arrays[0].copy(), arrays[3]
    logits = normal(90, 65)
    logits[0] = np.nan
    assert targets[0] == 2
    loss, dlogits = record(losses({"ignore_index": 2}), [logits, targets, arrays[4]])(
        logits, targets, arrays[4]
    )
    assert np.isfinite(loss) and not dlogits[0].any() and np.isfinite(dlogits).all()
    x[0] = np.inf
    loss, dx, *_ = record(losses_of_map({"ignore_index": 2}), arrays)(x, *arrays[1:])
    assert np.isfinite(loss) and not dx[0].any()


def test_large_logits_and_logits_of_minus_infinity() -> None:
    logits = 1000 * normal(33, 65)
    logits[:, 3] = -np.inf
    targets = targets_of(33, 65, None)
    targets[targets == 3] = 4
    arrays = [logits, targets, np.float32(1).reshape(())]
    loss, dlogits = record(losses({}), arrays)(*arrays)
    wanted, cache = ops.cross_entropy.reference(logits.astype(np.float64), targets=targets)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    np.testing.assert_allclose(dlogits, cache.backward(np.float64(1).reshape(())), atol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64"])
def test_targets_of_any_integers_are_checked(dtype: str) -> None:
    arrays = map_arrays(40, 48, 65, None)
    arrays[3] = arrays[3].astype(dtype)
    run = judged(losses_of_map({}), arrays, others=(*OTHERS, "astype"))
    arrays[3] = arrays[3].copy()
    arrays[3][7] = 65
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 65\)"):
        run(*arrays)
