"""Optimisers whose state is shared out among processes: the bits of the whole, and its memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xformer import GPT, backends, optim, tree
from xformer.backends import Backend
from xformer.distributed.world import Alone, World, threads
from xformer.optim import OPTIMISERS, Optimiser, Rule, ShardedState, grouped
from xformer.optim.sharded import owners
from xformer.training import TrainConfig
from xformer.training.sharded_checkpoint import gathered, is_sharded, scattered

NUMPY = backends.get("numpy")
MODEL = GPT(vocab_size=16, n_layers=2, d_model=8, n_heads=2, max_len=8)


def chosen(name: str) -> Optimiser:
    """By itself for all leaves, or the groups of `train`: Muon is only for matrices."""
    alone, _, groups = name.partition(" ")
    return TrainConfig(5, optimiser=alone).chosen_optimiser() if groups else OPTIMISERS[alone]


NAMES = [*(name for name in OPTIMISERS if name != "muon"), *(f"{n} groups" for n in OPTIMISERS)]


def stepped(optimiser: Optimiser, library: Backend, *, donate: bool = False) -> tuple[Any, Any]:
    """Parameters and state after three steps with random gradients."""
    params = tree.map(library.asarray, MODEL.init(0))
    state = optimiser.init(params)
    for step in range(3):
        rng = np.random.default_rng(step)
        grads = tree.map(
            lambda p: library.asarray(rng.normal(size=p.shape).astype("float32")),  # noqa: B023
            params,
        )
        params, state = optimiser.step(params, grads, state, lr=1e-2, donate=donate)
    return tree.map(library.to_numpy, params), state


def without_own(state: Any) -> dict[str, Any]:
    """The leaves of a state by the names that they have without sharding."""
    return {
        ".".join(part for part in name.split(".") if part != "own"): np.asarray(leaf)
        for name, leaf in tree.flatten(state).items()
    }


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_the_whole(name: str, donate: bool) -> None:
    """Parameters on every process, and the states of all together."""
    wanted, whole = stepped(chosen(name), NUMPY)
    for n in (2, 3):
        results = threads.run(
            n, lambda world: stepped(optim.sharded(chosen(name), world), NUMPY, donate=donate)
        )
        found: dict[str, Any] = {}
        for params, state in results:
            assert type(params) is type(wanted)
            for leaf, p in tree.flatten(params).items():
                assert np.array_equal(p, tree.flatten(wanted)[leaf]), leaf
            own = without_own(state)
            assert not [x for x in own.keys() & found.keys() if own[x].shape]
            found |= own
        assert found.keys() == without_own(whole).keys()
        assert all(np.array_equal(found[x], a) for x, a in without_own(whole).items())
        sizes = [tree.nbytes(state) for _, state in results]
        assert sum(sizes) == tree.nbytes(whole) and min(sizes) > 0.7 * max(sizes)


def test_a_process_shares_the_arrays_that_it_overwrites_with_no_other() -> None:
    """Threads get what others send without a copy."""
    params = {"w": np.ones((3, 2), "float32"), "b": np.ones(5, "float32")}

    def work(world: World) -> Any:
        optimiser = optim.sharded(OPTIMISERS["adamw"], world)
        return optimiser.step(params, params, optimiser.init(params), lr=0.1)[0]

    found = threads.run(3, work)
    for name, owner in owners(params, 3).items():
        own = found[owner][name]
        assert not [r for r in range(3) if r != owner and np.shares_memory(found[r][name], own)]


def test_more_processes_than_leaves_and_two_dtypes(library: Backend) -> None:
    """Some processes have no leaf; arrays stay with their library."""
    params = {"w": library.asarray(np.ones((3, 2), "float32"))}
    if "float64" in library.dtypes:
        params["b"] = library.asarray(np.ones(5))
    grads = tree.map(lambda p: p * 0.5, params)

    def work(world: Any) -> Any:
        optimiser = optim.sharded(OPTIMISERS["adamw"], world)
        return optimiser.step(params, grads, optimiser.init(params), lr=0.1)

    plain = OPTIMISERS["adamw"]
    wanted, _ = plain.step(params, grads, plain.init(params), lr=0.1)
    for new, state in threads.run(4, work):
        assert isinstance(state, ShardedState) and new.keys() == params.keys()
        for name, p in new.items():
            assert type(p) is type(params[name]) and p.dtype == params[name].dtype
            assert np.array_equal(library.to_numpy(p), library.to_numpy(wanted[name]))


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("n", [2, 4])
def test_the_whole_state_and_back(name: str, n: int) -> None:
    """Also if some processes have no leaf, and so with lion no state at all."""
    params = {"w": np.ones((3, 2), "float32"), "v": np.full((2, 5), 3, "float32")}

    def work(world: World) -> Any:
        optimiser = optim.sharded(OPTIMISERS[name], world)
        _, state = optimiser.step(params, params, optimiser.init(params), lr=0.1)
        assert is_sharded(state, world)
        whole = gathered(state, world, NUMPY)
        back = scattered(whole, optimiser.init(params), world, NUMPY)
        assert type(back) is ShardedState
        assert_equal(tree.flatten(back), tree.flatten(state))
        return whole

    plain = OPTIMISERS[name]
    _, wanted = plain.step(params, params, plain.init(params), lr=0.1)
    assert_equal(threads.run(n, work)[0], tree.flatten(wanted))


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[x], a) for x, a in wanted.items())


def test_a_process_alone_gets_the_optimiser_itself() -> None:
    assert optim.sharded(OPTIMISERS["lion"], Alone()) is OPTIMISERS["lion"]


def test_owners() -> None:
    """Each leaf to the process with the least so far, the largest first, by name among equals."""
    sizes = {"a": 3, "b": 3, "c": 8, "d": 5}
    leaves = {name: np.empty(n) for name, n in sizes.items()}
    assert owners(leaves, 2) == {"c": 0, "d": 1, "a": 1, "b": 0}
    assert owners(dict(reversed(leaves.items())), 2) == owners(leaves, 2)


def test_wrong_arguments() -> None:
    params = {"w": np.ones((3, 2)), "b": np.ones(2)}

    def work(world: Any, grads: Any, state: Any = None) -> None:
        optimiser = optim.sharded(OPTIMISERS["adamw"], world)
        state = optimiser.init(params) if state is None else state
        optimiser.step(params, grads, state, lr=0.1)

    with pytest.raises(ValueError, match="sharded: the gradient of b is missing"):
        threads.run(2, work, {"w": params["w"]})
    with pytest.raises(TypeError, match="sharded: state must be ShardedState, got AdamState"):
        threads.run(2, work, params, optim.adamw_init(params))
    # A pattern that matches nothing stays an error, though each process has few of the leaves.
    rules = grouped(Rule("heads.*", "lion"), Rule("*"))
    with pytest.raises(ValueError, match=r"grouped: 'heads\.\*' matches none of 2 parameters"):
        threads.run(2, lambda world: optim.sharded(rules, world).init(params))
