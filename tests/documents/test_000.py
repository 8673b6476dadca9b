"""Document 000, a notebook: one causal block, forward, and backward as far as it is right."""

from __future__ import annotations

import numpy as np
import pytest
from notebooks import B, D, F, H, T, attention_gradients, block, block_000
from printed import Printed, spread

from xformer import layers

PRINTED = Printed("000")
FORWARD = ["x", "x_rows", "keys", "probs", "ctx", "merged", "y", "y_norm", "hidden", "ffn", "out"]
BACKWARD = ["dout", "dffn_b_down", "dhidden_1", "dffn_b_up", "dv", "dw_v", "dx_v"]
# Printed figures that wrong formulas gave: reproduced, with those formulas, in test_errata.py.
WRONG = ["ln_sum", "ln_product", "ln_factor", "dln", "dy"]


def test_every_printed_array_has_its_test() -> None:
    assert sorted(PRINTED.names) == sorted(FORWARD + BACKWARD + WRONG)


@pytest.mark.parametrize("name", FORWARD)
def test_forward_by_ops(name: str) -> None:
    s = block_000()
    ours = s.x.reshape(B * T, D) if name == "x_rows" else getattr(s, name)
    PRINTED.check(name, ours)


def test_forward_by_layers() -> None:
    s = block_000()
    config, params = block(s, output="none")
    merged, _ = layers.attention(
        s.x,
        params.attn,
        config=layers.AttentionConfig(s.x.shape[-1], H),
        context=layers.Context(causal=True),
    )
    PRINTED.check("merged", merged)
    out, _ = layers.block(s.x, params, config=config, context=layers.Context(causal=True))
    PRINTED.check("out", out)


def test_backward_of_the_last_bias() -> None:
    s = block_000()
    _, _, db = s.down_cache.backward(PRINTED["dout"])
    PRINTED.check("dffn_b_down", db[None, None, :])


def test_backward_of_the_hidden_layer_but_for_one_element() -> None:
    """One hidden unit of one token is off; its gradient is printed as if ReLU had let it pass."""
    s = block_000()
    off = np.argwhere(s.pre <= 0)
    assert off.tolist() == [[1, 1, 9]]
    dhidden, _, _ = s.down_cache.backward(PRINTED["dout"])
    dpre = s.relu_cache.backward(dhidden)
    _, _, db_up = s.up_cache.backward(dpre)
    PRINTED.check("dhidden_1", dpre[1], wrong=(F + 9,))
    PRINTED.check("dffn_b_up", db_up[None, None, :], wrong=(9,))


def test_backward_to_the_value_projection() -> None:
    """The gradient that enters attention is itself known by its printed digits alone."""
    s = block_000()

    def backward(dmerged: np.ndarray) -> tuple[np.ndarray, ...]:
        grads = attention_gradients(s, dmerged)
        return grads["dv"], grads["dw_v"][None, :, :], grads["dx_v"]

    error = PRINTED.half_units("dy").max()
    ours, slack = backward(PRINTED["dy"]), spread(backward, (B, T, D), error)
    for name, gradient, most in zip(("dv", "dw_v", "dx_v"), ours, slack, strict=True):
        PRINTED.check(name, gradient, most)
