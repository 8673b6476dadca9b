"""Groups: each parameter by its own optimiser, as if it were alone."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from xformer import GPT, backends, optim, tree
from xformer.backends import Backend
from xformer.optim import Rule, decay_matrices, grouped

MODEL = GPT(vocab_size=11, n_layers=2, d_model=8, n_heads=2, max_len=6)


def named(params: Any, names: set[str]) -> dict[str, Any]:
    return {name: leaf for name, leaf in tree.flatten(params).items() if name in names}


def test_each_group_steps_as_if_alone() -> None:
    params = MODEL.init(seed=1, dtype="float64")
    leaves = tree.flatten(params)
    matrices = {n for n, p in leaves.items() if n.startswith("stack.blocks.") and p.ndim == 2}
    norms = {n for n in leaves if "norm" in n}
    rest = leaves.keys() - matrices - norms
    rules = (
        Rule("stack.blocks.*", "muon", lr=2.0, options={"momentum": 0.8}, min_ndim=2),
        Rule(("*norm.w", "*norm.b"), "sgd", lr=0.5),
        Rule("*", options={"weight_decay": 0.2}),
    )
    alone: list[tuple[set[str], Any, dict[str, Any]]] = [
        (matrices, optim.OPTIMISERS["muon"], {"lr": 0.02, "momentum": 0.8}),
        (norms, optim.OPTIMISERS["sgd"], {"lr": 0.005}),
        (rest, optim.OPTIMISERS["adamw"], {"lr": 0.01, "weight_decay": 0.2}),
    ]
    optimiser = grouped(*rules)
    state = optimiser.init(params)
    own = [(named(params, names), one.init(named(params, names))) for names, one, _ in alone]
    for _ in range(3):
        grads = tree.map(lambda p: p**3 - 1, params)
        params, state = optimiser.step(params, grads, state, lr=0.01)
        for i, (names, one, options) in enumerate(alone):
            own[i] = one.step(own[i][0], named(grads, names), own[i][1], **options)
    assert matrices and norms and rest
    got = tree.flatten(params)
    for part, _ in own:
        for name, p in part.items():
            assert np.array_equal(got.pop(name), p), name
    assert not got
    assert type(params) is type(MODEL.init())


def test_on_every_library(library: Backend) -> None:
    def stepped(place: Backend) -> dict[str, np.ndarray]:
        params = MODEL.init(seed=1, dtype="float64")
        params = tree.map(place.asarray, params)
        one = grouped(*decay_matrices("adamw", 0.5), Rule("*", "lion"))
        new, _ = one.step(params, params, one.init(params), lr=0.1)
        return {name: place.to_numpy(p) for name, p in tree.flatten(new).items()}

    wanted = stepped(backends.get())
    for name, p in stepped(library).items():
        assert np.allclose(p, wanted[name], rtol=1e-13), name


def test_matrices_decay_and_vectors_do_not() -> None:
    params = MODEL.init(seed=1, dtype="float64")
    still = tree.map(np.zeros_like, params)
    optimiser = grouped(*decay_matrices("adamw", 0.5, betas=(0.8, 0.9)))
    new, state = optimiser.step(params, still, optimiser.init(params), lr=0.1)
    for (name, p), q in zip(tree.flatten(params).items(), tree.flatten(new).values(), strict=True):
        assert np.array_equal(q, 0.95 * p if p.ndim >= 2 else p), name
    assert [rule.options["betas"] for rule in decay_matrices(betas=(0.8, 0.9))] == [(0.8, 0.9)] * 2
    assert state.keys() == {"0", "1"}


def test_a_state_is_a_tree_of_one_structure() -> None:
    params = MODEL.init(seed=1)
    optimiser = grouped(Rule("*", "sgd", options={"momentum": 0.9}, min_ndim=2), Rule("*", "lion"))
    first = optimiser.init(params)
    _, second = optimiser.step(params, params, first, lr=0.1)
    names = tree.flatten(first).keys()
    assert names == tree.flatten(second).keys()
    assert "0.velocity.stack.blocks.1.attn.q.w" in names and "1.m.stack.blocks.1.attn.q.b" in names
    assert tree.nbytes(first) == tree.nbytes(params)


def test_frozen_parameters_have_no_group() -> None:
    params = tree.freeze(MODEL.init(seed=1), "embed.*", "stack.blocks.0.*")
    trained = tree.trained(params)
    optimiser = grouped(*decay_matrices("adamw", 0.5))
    new, _ = optimiser.step(trained, trained, optimiser.init(trained), lr=0.1)
    assert tree.flatten(new).keys() == tree.flatten(trained).keys()
    assert tree.join(params, new).embed.table is params.embed.table


def test_under_jit() -> None:
    """JAX sorts the keys of dicts, and traces the number of steps."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    place = backends.get("jax")
    params = tree.map(place.asarray, {"w": np.eye(3), "b": np.ones(3), "a": np.ones((2, 3))})
    rules = (Rule("w", "muon"), Rule("a", "adafactor"), Rule("*", "adamw"))
    optimiser = grouped(*rules)

    def step(params: Any, state: Any) -> Any:
        return optimiser.step(params, tree.map(lambda p: p**3 - 2, params), state, lr=0.1)

    eager = params, optimiser.init(params)
    compiled: Any = eager
    for _ in range(3):
        eager, compiled = step(*eager), jax.jit(step)(*compiled)
    for name, p in tree.flatten(eager[0]).items():
        assert np.allclose(p, tree.flatten(compiled[0])[name], rtol=1e-12), name


# ---- Bad arguments ----

W = {"w": np.ones((2, 3)), "b": np.ones(3)}


def test_bad_rules() -> None:
    for bad, message in (
        (
            {"optimiser": "adamv"},
            "Rule: optimiser must be one of sgd, adam, adamw, lion, adafactor",
        ),
        ({"lr": -1.0}, "Rule: lr must lie in [0, inf], got -1.0"),
        ({"min_ndim": 1.5}, "Rule: min_ndim must be an int of at least 0, got 1.5"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            Rule("*", **bad)
    with pytest.raises(ValueError, match=r"^grouped: there must be at least one Rule, got none"):
        grouped()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((Rule("w"),), "grouped: no rule is for b of shape (3,)"),
        ((Rule("*", min_ndim=2),), "grouped: no rule is for b of shape (3,)"),
        ((Rule("v"), Rule()), "grouped: 'v' matches none of 2 parameters"),
        ((Rule("*", "muon"),), "muon: b must be (..., I, O), got shape (3,)"),
    ],
)
def test_rules_that_do_not_fit(rules: tuple[Rule, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        grouped(*rules).init(W)


def test_bad_steps() -> None:
    optimiser = grouped(*decay_matrices())
    state = optimiser.init(W)
    with pytest.raises(ValueError, match=r"^grouped: the gradient of b is missing$"):
        optimiser.step(W, {"w": W["w"]}, state, lr=0.1)
    with pytest.raises(TypeError, match=r"^grouped: lr must be a number, got str$"):
        optimiser.step(W, W, state, lr="0.1")
    for bad in (optim.adamw_init(W), {"0": state["0"]}, {**state, "2": None}):
        with pytest.raises(ValueError, match=r"^grouped: state must be a dict by rule, 0 to 1, "):
            optimiser.step(W, W, bad, lr=0.1)
    with pytest.raises(TypeError, match="momentun"):
        bad_option = grouped(Rule("*", "sgd", options={"momentun": 0.9}))
        bad_option.step(W, W, bad_option.init(W), lr=0.1)


def test_an_optimiser_of_ones_own_that_loses_a_parameter() -> None:
    def step(params: Any, grads: Any, state: Any, **options: Any) -> tuple[Any, Any]:
        return dict(list(params.items())[1:]), state

    params = {"a": np.ones(2), "b": np.ones(3)}
    lossy = optim.grouped(optim.Rule("*", optim.Optimiser(lambda params: None, step)))
    with pytest.raises(ValueError, match="unflatten: missing a; unexpected nothing"):
        lossy.step(params, params, lossy.init(params), lr=0.1)
