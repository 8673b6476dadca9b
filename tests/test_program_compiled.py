"""Compiled functions of trees: training steps as made call by call, and what they do to memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs extra numba")

from programs import without_native

from xformer import GPT, ops, optim, reference_only, tree
from xformer.backends.numba.program.compiled import KEPT, Compiled
from xformer.backends.numba.program.traced import address

# Without biases: the gradient of that of keys is 0, and of what rounding makes of it some
# optimisers take the sign.
MODEL = GPT(23, n_layers=2, d_model=12, n_heads=3, max_len=8, dropout=0.1, bias=False)
OPTIMISERS = optim.OPTIMISERS | {
    "muon": optim.grouped(optim.Rule("*.ffn.*", "muon", min_ndim=2), optim.Rule())
}


def parameters(seed: int = 0) -> Any:
    return tree.map(lambda p: p.astype(np.float32), MODEL.init(seed))


def batch(length: int = 7, rows: int = 3, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, 23, (rows, length + 1))
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def gradients(params: Any, tokens: Any, targets: Any, number: Any) -> tuple[Any, Any]:
    loss, cache = MODEL.loss(params, tokens, targets, dropout_key=ops.RandomKey(5, step=number))
    return loss, cache.backward()


def training(name: str) -> Callable[..., Any]:
    """A step of an optimiser, with clipping and a moving average, of two batches."""
    step = OPTIMISERS[name].step

    def one(trained: Any, state: Any, average: Any, rate: Any, number: Any, *batches: Any) -> Any:
        found = [gradients(trained, *own, 2 * number + i) for i, own in enumerate(batches)]
        grads = tree.map(lambda a, b: (a + b) / 2, *(grads for _, grads in found))
        grads, norm = optim.clip_by_global_norm(grads, max_norm=0.5)
        trained, state = step(trained, grads, state, lr=rate)
        average = optim.ema(average, trained, decay=0.9)
        return trained, state, average, found[0][0], norm

    return one


def require_close(found: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    a, b = tree.flatten({"": found}), tree.flatten({"": wanted})
    assert a.keys() == b.keys()
    for name, x in a.items():
        np.testing.assert_allclose(x, b[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_training(name: str) -> None:
    """Three steps: parameters, state, average, loss and norm as they are call by call."""
    fn, start = training(name), OPTIMISERS[name].init
    ours, own = parameters(), start(parameters())
    average = parameters(3)
    compiled = Compiled(fn, donated=(0, 1, 2))
    state = own, average
    other, other_state, other_average = parameters(), start(parameters()), parameters(3)
    ours, own, average = tree.map(np.array, (ours, *state))
    for number in range(3):
        given = 0.01 / (1 + number), number, batch(seed=number), batch(seed=10 + number)
        ours, own, average, loss, norm = compiled(ours, own, average, *given)
        other, other_state, other_average, loss2, norm2 = fn(
            other, other_state, other_average, *given
        )
        require_close((ours, average, loss, norm), (other, other_average, loss2, norm2))
        require_close(own, other_state)
    assert len(compiled.programs) == 1


def test_donated_arrays_are_written_over() -> None:
    params = parameters()
    compiled = Compiled(lambda p, x: tree.map(lambda w: w + x, p), donated=(0,))
    new = compiled(params, 1.0)
    for before, after in zip(
        tree.flatten(params).values(), tree.flatten(new).values(), strict=True
    ):
        assert after is before
    (recorded, _), *_ = compiled.programs.values()
    assert {one.name for one in recorded.code} == {"astype", "add"}  # and no copies


def test_what_is_read_later_is_copied_at_the_end() -> None:
    def swap(x: Any, y: Any) -> Any:
        return y * 2, x + 1

    x, y = np.arange(4.0), np.arange(4.0) + 10
    first, second = Compiled(swap, donated=(0, 1))(x, y)
    np.testing.assert_array_equal(first, 2 * (np.arange(4.0) + 10))
    np.testing.assert_array_equal(second, np.arange(4.0) + 1)
    assert first is x and second is y


@pytest.mark.parametrize("native", [True, False])
def test_trees_that_come_back_in_another_order(native: bool) -> None:
    """What is a parameter's may not be written where another one has still to be read."""
    rng, shape = np.random.default_rng(0), (70, 90)
    params = {name: rng.normal(size=shape).astype(np.float32) for name in "abc"}
    grads = {name: rng.normal(size=shape).astype(np.float32) for name in "abc"}
    state = optim.adamw_init(params)

    def step(params: Any, state: Any, grads: Any) -> Any:
        params, state = optim.adamw(params, grads, state, lr=0.1)
        return state.v, {name: params[name] for name in "cba"}, state.m

    wanted = step(params, state, grads)
    compiled = Compiled(step, donated=(0, 1))
    own = tree.map(np.array, (params, state))
    if native:
        require_close(compiled(*own, grads), wanted, 1e-6)
        return
    with reference_only():  # recorded as functions of the array API
        compiled(*tree.map(np.array, own), grads)
        (kind, (recorded, like)), *_ = compiled.programs.items()
        compiled.programs[kind] = without_native(recorded), like
        require_close(compiled(*own, grads), wanted, 1e-6)


def test_arguments_are_left_alone() -> None:
    x = np.arange(4.0)
    x.flags.writeable = False
    (y,) = Compiled(lambda x: (x + 1,), donated=(0,))(x)
    np.testing.assert_array_equal(y, np.arange(4.0) + 1)
    np.testing.assert_array_equal(x, np.arange(4.0))


def test_donated_arrays_share_nothing() -> None:
    x = np.arange(4.0)
    compiled = Compiled(lambda x, y: (x + y, y), donated=(0,))
    for other in (x, x[:], x.reshape(2, 2).reshape(4)):
        with pytest.raises(ValueError, match="share memory"):
            compiled(x, other)
    compiled(x, np.arange(4.0))
    np.testing.assert_array_equal(x, 2 * np.arange(4.0))


def test_replaced_resized_frozen_and_viewed_parameters() -> None:
    """Nothing is remembered of arrays but their layouts."""
    compiled = Compiled(lambda params, tokens, targets: gradients(params, tokens, targets, 3))
    tokens, targets = batch()
    params = parameters()
    for seed in range(3):
        params = parameters(seed)  # those of before are freed
        require_close(
            compiled(params, tokens, targets), gradients(params, tokens, targets, 3), 1e-5
        )
    assert len(compiled.programs) == 1
    for other in (
        tree.freeze(params, "*.attn.*"),
        tree.map(lambda w: np.array(w.T).T, params),
        tree.map(lambda w: np.stack([w, w], -1)[..., 0], params),
    ):
        require_close(compiled(other, tokens, targets), gradients(other, tokens, targets, 3), 1e-5)


def test_lengths_that_vary_keep_a_bounded_number_of_programs() -> None:
    compiled = Compiled(lambda x: (x * 2,))
    for n in range(1, KEPT + 5):
        (y,) = compiled(np.ones(n))
        np.testing.assert_array_equal(y, np.full(n, 2.0))
    assert len(compiled.programs) == KEPT
    assert compiled(np.ones(1))[0].shape == (1,)


def test_numbers_are_inputs_and_the_rest_is_not() -> None:
    calls = []

    def fn(x: Any, scale: Any, name: str, flag: bool) -> Any:
        calls.append(name)
        return {"name": name, "y": x * scale if flag else x}

    compiled = Compiled(fn)
    for scale in (2.0, 3.0):
        found = compiled(np.ones(2), scale, "a", True)
        assert found["name"] == "a" and found["y"].tolist() == [scale, scale]
    assert compiled(np.ones(2), 4.0, "b", False)["y"].tolist() == [1.0, 1.0]
    assert calls == ["a", "b"]


def test_donated_arrays_that_come_back_as_they_are() -> None:
    """In any order, twice, transposed: nothing is copied but what must be."""
    x, y = np.arange(4.0).reshape(2, 2), np.arange(4.0).reshape(2, 2) + 10
    compiled = Compiled(lambda x, y: (y, x, y, x.T, y + 1), donated=(0, 1))
    first, second, third, fourth, fifth = compiled(x, y)
    assert first is y and second is x
    np.testing.assert_array_equal(third, y)
    np.testing.assert_array_equal(fourth, x.T)
    np.testing.assert_array_equal(fifth, y + 1)
    np.testing.assert_array_equal(x, np.arange(4.0).reshape(2, 2))
    (recorded, _), *_ = compiled.programs.values()
    assert len(recorded.code) == 3


def test_what_is_lent() -> None:
    """It stays while somebody has it, and its memory is taken anew afterwards."""
    compiled = Compiled(lambda x: (x * 2, x + 1), lends=True)
    x = np.arange(1000.0)
    kept = [compiled(x + i) for i in range(3)]
    for i, (double, more) in enumerate(kept):
        np.testing.assert_array_equal(double, 2 * (x + i))
        np.testing.assert_array_equal(more, x + i + 1)
    begins = {address(compiled(x)[0]) for _ in range(5)}
    assert len(begins) == 1


def test_arrays_that_compute_otherwise_are_refused() -> None:
    """A program would read their data, and not their mask."""
    x = np.ones(3, np.float32)
    compiled = Compiled(lambda x, y: x + y)
    with pytest.raises(TypeError, match="must be of a library's own type, got MaskedArray"):
        compiled(x, np.ma.masked_array(x, mask=[True, False, False]))
    assert compiled(x, x).tolist() == [2, 2, 2]
