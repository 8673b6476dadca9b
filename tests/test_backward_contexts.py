"""A backward that runs the forward again does so in the contexts of the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xformer as xf
from xformer import GPT, ops, tree
from xformer.layers import FeedForwardParams, LinearParams
from xformer.layers.feed_forward import chunked_feed_forward

IDS = np.random.default_rng(0).integers(0, 19, (3, 8))
Forward = Callable[[], tuple[Any, Callable[[Any], Any]]]


def checkpointed() -> tuple[Any, Callable[[Any], Any]]:
    model = GPT(19, n_layers=2, d_model=8, n_heads=2, max_len=8, activation_checkpointing=True)
    _, cache = model.loss(model.init(), IDS[:, :-1], IDS[:, 1:])
    return cache, lambda cache: cache.backward()


def reversible() -> tuple[Any, Callable[[Any], Any]]:
    model = GPT(19, n_layers=2, d_model=8, n_heads=2, max_len=8, reversible=True)
    _, cache = model.loss(model.init(), IDS[:, :-1], IDS[:, 1:])
    return cache, lambda cache: cache.backward()


def chunked() -> tuple[Any, Callable[[Any], Any]]:
    normal = np.random.default_rng(0).normal
    up, down = (LinearParams(normal(size=(n, m)), normal(size=m)) for n, m in ((4, 8), (8, 4)))
    y, cache = chunked_feed_forward(
        normal(size=(2, 6, 4)), FeedForwardParams(up, down), chunk_len=2
    )
    return cache, lambda cache: cache.backward(y)


@pytest.mark.parametrize("forward", [checkpointed, reversible, chunked])
def test_a_backward_within_inference(forward: Forward) -> None:
    cache, backward = forward()
    wanted = tree.flatten(backward(cache))
    with xf.inference():
        found = tree.flatten(backward(cache))
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        np.testing.assert_array_equal(grad, wanted[name], err_msg=name)


@pytest.mark.parametrize("forward", [checkpointed, reversible, chunked])
def test_the_functions_of_the_forward_run_again(forward: Forward) -> None:
    """References within `reference_only()`, also if the backward is outside."""
    ran = set[str]()

    def note(op: Any, run: Any) -> Any:
        if run is not op.reference:
            ran.add(op.__name__)
        return run

    from xformer.dispatch import observed

    with xf.reference_only():
        cache, backward = forward()
    with observed(note):
        backward(cache)
    assert not ran & {ops.linear.__name__, ops.sdpa.__name__, ops.gelu.__name__, "blocks"}


def test_per_example_outside_unfused() -> None:
    with xf.unfused():
        cache, _ = checkpointed()
        wanted = xf.per_example(cache)
    found = xf.per_example(cache)
    np.testing.assert_array_equal(found.squared_norms, wanted.squared_norms)
