"""What is frozen is not trained: its gradient is None, and all others are what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from judges import douts, gradients, one_of_each

from xformer import backends, layers, ops, optim, tree
from xformer.base.tree import Constant, Frozen
from xformer.proofs.catalogue import Case

NUMPY = backends.get("numpy")


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("case", one_of_each("layers", "models"))
def test_other_gradients_stay(case: Case, every: int) -> None:
    """Every second or third parameter, of all layers and models, is frozen."""
    fn, args = case.build(NUMPY)
    wanted = run(fn, args)
    count = iter(range(1_000_000))

    def some(arg: Any) -> Any:
        names = [name for name in tree.flatten(arg) if next(count) % every == 0]
        return tree.freeze(arg, *names) if names and are_params(arg) else arg

    frozen = tuple(some(arg) for arg in args)
    got = run(fn, frozen)
    trained = tree.flatten({"grad": [tree.trained(arg) for arg in frozen]})
    assert got.keys() - {"y"} == {n for n in trained if n.startswith("grad")} & wanted.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-12, atol=1e-13)


def are_params(arg: Any) -> bool:
    """Not arrays, nor side inputs, nor a memory or a tuple of them."""
    if not isinstance(arg, tuple) or isinstance(arg, layers.SideInputs):
        return False
    return not any(isinstance(x, layers.KeyValue) for x in (arg, *arg))


def run(fn: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    y, cache = fn(*args)
    grads = gradients(args, cache.backward(*douts(NUMPY, y)))
    return tree.flatten({"y": y if not isinstance(y, tuple) else y[0], "grad": list(grads)})


def test_freeze_trained_join() -> None:
    params = {"a": np.ones(2), "b": {"c": np.zeros(3), "d": None}, "e": Constant(2.0)}
    frozen = tree.freeze(params, "b.*")
    assert isinstance(frozen["b"]["c"], Frozen) and not isinstance(frozen["a"], Frozen)
    assert tree.frozen(frozen)["b.c"] is params["b"]["c"] and not tree.frozen(params)
    trained = tree.trained(frozen)
    assert trained["b"]["c"] is None and trained["a"] is params["a"]
    new = tree.join(frozen, tree.map(lambda a: a + 1, trained))
    assert isinstance(new["b"]["c"], Frozen) and (new["a"] == 2).all()
    assert new["e"] == Constant(2.0)
    thawed = tree.thaw(new)
    assert thawed["b"]["c"] is params["b"]["c"]
    assert tree.nbytes(frozen) == tree.nbytes(params) == 5 * 8
    doubled = tree.map(lambda a: 2 * a, frozen)
    assert isinstance(doubled["b"]["c"], Frozen) and (doubled["a"] == 2).all()
    everything = tree.freeze(params)
    assert tree.flatten(tree.trained(everything)) == {}
    some = tree.thaw(everything, "b.*")
    assert list(tree.flatten(tree.trained(some))) == ["b.c"] and some["b"]["c"] is params["b"]["c"]


def test_bad_patterns() -> None:
    params = layers.LinearParams(np.ones((2, 2)), None)
    with pytest.raises(ValueError, match="freeze: 'x' matches none of 1 parameters"):
        tree.freeze(params, "w", "x")
    with pytest.raises(ValueError, match="thaw: 'x' matches none of 1 parameters"):
        tree.thaw(params, "x")
    with pytest.raises(ValueError, match="join: no parameters of these names: b"):
        tree.join(params, {"b": 1})


def test_what_takes_no_frozen_parameters_says_what_does() -> None:
    params = {"w": np.ones((2, 2)), "b": np.ones(2)}
    frozen, state = tree.freeze(params, "w"), optim.adamw_init(params)
    said = r": (x|w) must be an array, got a frozen one: xf\.tree\.value .*, xf\.tree\.trained"
    with pytest.raises(TypeError, match="sigmoid" + said):
        ops.sigmoid(frozen["w"])
    for grad in (params["w"], None):
        with pytest.raises(TypeError, match="adamw" + said):
            optim.adamw(frozen, params | {"w": grad}, state, lr=1e-3)
