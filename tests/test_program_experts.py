"""Experts in programs: grouped products whose counts are read in a run, and their router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs extra numba")

from programs import THREADS, judged, names, record

from xformer import backends, layers, ops, reference_only, tree
from xformer.backends.numba.kernels import grouped
from xformer.backends.numba.kernels.gemm import Pair
from xformer.ops.activation import ACTIVATIONS


def normal(*shape: int, seed: int = 0, by_columns: bool = False) -> np.ndarray:
    """by_columns: each matrix lies transposed."""
    rng = np.random.default_rng([seed, *shape])
    x = rng.normal(size=shape, scale=max(shape[-1], 1) ** -0.5).astype(np.float32)
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) if by_columns else x


def chosen(n: int, c: int, experts: Sequence[int]) -> np.ndarray:
    """c of these for each of n rows, each row's distinct."""
    rng = np.random.default_rng([n, c, *experts])
    return np.stack([rng.permutation(experts)[:c] for _ in range(n)]).astype(np.int64)


def inputs(
    ids: np.ndarray, e: int, d: int, f: int, *, by_columns: bool = False
) -> list[np.ndarray]:
    """x, gate, up, down, weights, ids, dy."""
    n, c = ids.shape
    lies = {"by_columns": by_columns}
    gate, up, down = normal(e, d, f, **lies), normal(e, d, f, seed=1, **lies), normal(e, f, d)
    return [normal(n, d), gate, up, down, normal(n, c), ids, normal(n, d, seed=2)]


def with_gradients(**options: Any) -> Callable[..., list[Any]]:
    def fn(x: Any, gate: Any, up: Any, down: Any, weights: Any, ids: Any, dy: Any) -> list[Any]:
        y, cache = ops.experts(x, gate, up, down, weights, ids=ids, **options)
        return [y, *(grad for grad in cache.backward(dy) if grad is not None)]

    return fn


@pytest.mark.parametrize("threads", [*THREADS, 2])
@pytest.mark.parametrize("by_columns", [False, True])
def test_experts(threads: int, by_columns: bool) -> None:
    """Sizes that are no multiple of a block, more rows than columns; some experts have none."""
    arrays = inputs(chosen(301, 2, [0, 2, 3, 6]), 7, 67, 45, by_columns=by_columns)
    run = judged(with_gradients(), arrays, threads)
    assert "experts gate" in names(run)


@pytest.mark.parametrize(
    ("ids", "d", "f"),
    [
        (chosen(67, 1, [2]), 33, 300),  # one has all rows
        (chosen(131, 3, [0, 1, 2]), 17, 29),  # every row goes to every expert
        (chosen(1, 2, [0, 1, 2]), 64, 515),  # a token
        (chosen(3, 2, [0, 1, 2]), 515, 1),
        (chosen(5, 2, [0, 1]), 1, 3),
        (np.array([[1, 1], [0, 0], [2, 1]]), 8, 9),  # an expert twice has both weights
    ],
    ids=["one expert", "all experts", "one row", "three rows", "width 1", "twice"],
)
@pytest.mark.parametrize("threads", [*THREADS, 2])
def test_counts(ids: np.ndarray, d: int, f: int, threads: int) -> None:
    arrays = inputs(ids, 3, d, f)
    judged(with_gradients(), arrays, threads)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    """Of rows longer than a block."""
    arrays = inputs(chosen(7, 2, range(3)), 3, 5, 2100)
    judged(with_gradients(activation=activation), arrays)


@pytest.mark.parametrize(("n", "c"), [(0, 2), (4, 0)])
def test_nothing_is_chosen(n: int, c: int) -> None:
    arrays = inputs(np.zeros((n, c), np.int64), 3, 5, 7)
    for x in judged(with_gradients(), arrays)(*arrays):
        assert not x.any()


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("threads", [*THREADS, 2])
def test_biases(activation: str, trainable: bool, threads: int) -> None:
    """Of inputs so large that some are clamped; one expert has no rows."""
    *arrays, dy = inputs(chosen(67, 2, [0, 2, 3]), 4, 19, 45)
    arrays[0] *= 40
    biases = [normal(4, 45), normal(4, 45, seed=1), normal(4, 19)]

    def fn(x: Any, gate: Any, up: Any, down: Any, weights: Any, ids: Any, *more: Any) -> list[Any]:
        *bs, dy = more
        args = x, gate, up, down, weights, *bs
        y, cache = ops.experts(*args, ids=ids, activation=activation, trainable=trainable)
        return [y, *(grad for grad in cache.backward(dy) if grad is not None)]

    arrays = [*arrays, *biases, dy]
    gate = arrays[0] @ arrays[1][0]
    assert 0.02 < np.mean(gate > 7) < 0.5
    run = judged(fn, arrays, threads)
    assert len(run.results) == (9 if trainable else 3) and "experts gate" in names(run)


def test_experts_that_are_not_trained() -> None:
    arrays = inputs(chosen(31, 2, range(3)), 3, 8, 9)
    run = judged(with_gradients(trainable=False), arrays)
    assert len(run.results) == 3 and "experts dw" not in names(run)


def test_other_counts_in_each_run() -> None:
    """One program; no memory of the counts of its recording."""
    first, *others = (inputs(chosen(64, 2, own), 5, 12, 9) for own in ([0, 1], [4, 2], range(5)))
    run = record(with_gradients(), first)
    for arrays in (first, *others):
        with reference_only():
            wanted = with_gradients()(*arrays)
        for got, own in zip(run(*arrays), wanted, strict=True):
            np.testing.assert_allclose(got, own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spoilt", [0, 6], ids=["x", "dy"])
def test_what_was_not_chosen_does_not_matter(spoilt: int) -> None:
    """An infinity in row 0 stays in that row and in its experts, 0 and 1."""
    ids = np.array([[0, 1], [3, 0], [3, 1], [1, 3], [0, 3], [1, 0], [3, 0]])
    arrays = inputs(ids, 5, 3, 11)
    run = record(with_gradients(), arrays)
    good = run(*arrays)
    arrays[spoilt][0] = np.inf
    found = run(*arrays)
    assert not all(np.isfinite(x).all() for x in found)
    for i, (got, wanted) in enumerate(zip(found, good, strict=True)):  # y, dx, dw_gate, dw_up, ...
        first = 2 if 2 <= i <= 4 else 1
        np.testing.assert_array_equal(got[first:], wanted[first:])


def test_ids_that_are_none() -> None:
    arrays = inputs(chosen(5, 2, range(3)), 3, 4, 6)
    run = record(with_gradients(), arrays)
    for wrong in (-1, 3, 2**40):
        arrays[5][2, 1] = wrong
        with pytest.raises(ValueError, match="ids must lie in"):
            run(*arrays)


@pytest.mark.parametrize("wrong", [(-5, 2**40, 3, -1), (9, 2, 2**62, 1), (0, -(2**40), 40, 90)])
def test_ends_beyond_the_rows(wrong: tuple[int, ...]) -> None:
    """Where memory was spoilt kernels read and write rows that exist."""

    def fn(x: Any, w: Any, ends: Any) -> list[Any]:
        order = grouped.Order(ends, ends, ends, ends)
        y = grouped.emit_grouped("y", [Pair(x, w)], order)
        return [y, grouped.emit_gradient("dw", x, w, y, order)]

    arrays = [normal(40, 6), normal(3, 6, 7), np.array(wrong)]
    for threads in THREADS:
        y, dw = record(fn, arrays, threads)(*arrays)
        assert y.shape == (40, 7) and dw.shape == (3, 6, 7)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("threads", [*THREADS, 2])
def test_a_layer_with_its_router(normalise: bool, threads: int) -> None:
    options: dict[str, Any] = {} if normalise else {"d_shared": 13, "shared_gate": True}
    config = layers.ExpertsConfig(5, 2, 44, normalise, **options)
    params = config.init(backends.get("numpy").generator(0), 24)

    def fn(x: Any, dy: Any, dlogits: Any, *leaves: Any) -> list[Any]:
        given = tree.unflatten(params, dict(zip(tree.flatten(params), leaves, strict=True)))
        y, cache = layers.mixture(x, given, config=config)
        dx, grads = cache.backward(dy, dlogits)
        return [y, dx, *tree.flatten(grads).values()]

    drawn = (normal(*leaf.shape, seed=i) for i, leaf in enumerate(tree.flatten(params).values()))
    arrays = [normal(3, 47, 24), normal(3, 47, 24, seed=1), normal(141, 5), *drawn]
    judged(fn, arrays, threads)
