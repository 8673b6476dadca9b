"""Document 002, a notebook: 000 with a norm before attention and a bias after the merged heads."""

from __future__ import annotations

import numpy as np
import pytest
from notebooks import B, D, H, T, attention_gradients, block, block_002
from printed import Printed, spread

from xformer import layers, ops

PRINTED = Printed("002")
FORWARD = [
    "x",
    "x_norm",
    "x_rows",
    "keys",
    "probs",
    "ctx",
    "merge_bias",
    "merged",
    "y",
    "y_norm",
    "hidden",
    "ffn",
    "out",
]
BACKWARD = ["dout", "dffn_b_down", "dv", "dx_v", "dx_v_again", "dx_k", "dx_q", "dx"]
# Printed figures that wrong formulas gave: reproduced, with those formulas, in test_errata.py.
WRONG = ["dhidden_1", "dffn_b_up", "ln_sum", "ln_product", "ln_factor", "dln", "dy", "dw_v", "dw_k"]


def test_every_printed_array_has_its_test() -> None:
    assert sorted(PRINTED.names) == sorted(FORWARD + BACKWARD + WRONG)


@pytest.mark.parametrize("name", FORWARD)
def test_forward_by_ops(name: str) -> None:
    s = block_002()
    rows = {"x_rows": s.x.reshape(B * T, D), "merge_bias": s.merge_bias[None, None, :]}
    PRINTED.check(name, rows[name] if name in rows else getattr(s, name))


def test_forward_by_layers() -> None:
    """The document adds the attention to the normalised input: this block begins there."""
    s = block_002()
    config, params = block(s, output="bias")
    x_norm, _ = ops.layer_norm(s.x, s.attn_gamma, s.attn_beta)
    merged, _ = layers.attention(
        x_norm,
        params.attn,
        config=layers.AttentionConfig(x_norm.shape[-1], H),
        context=layers.Context(causal=True),
    )
    PRINTED.check("merged", merged)
    out, _ = layers.block(x_norm, params, config=config, context=layers.Context(causal=True))
    PRINTED.check("out", out)


def test_backward_of_the_last_bias() -> None:
    s = block_002()
    _, _, db = s.down_cache.backward(PRINTED["dout"])
    PRINTED.check("dffn_b_down", db[None, None, :])


def test_backward_through_attention_by_ops() -> None:
    """The gradient that enters attention is itself known by its printed digits alone."""
    s = block_002()

    def backward(dmerged: np.ndarray) -> tuple[np.ndarray, ...]:
        grads = attention_gradients(s, dmerged)
        return tuple(grads[name] for name in ("dv", "dx_v", "dx_k", "dx_q", "dx"))

    error = PRINTED.half_units("dy").max()
    ours, slack = backward(PRINTED["dy"]), spread(backward, (B, T, D), error)
    for name, gradient, most in zip(("dv", "dx_v", "dx_k", "dx_q", "dx"), ours, slack, strict=True):
        PRINTED.check(name, gradient, most)
    PRINTED.check("dx_v_again", ours[1], slack[1])


def test_backward_through_attention_by_the_layer() -> None:
    s = block_002()
    _, params = block(s, output="bias")
    _, cache = layers.attention(
        s.x_norm,
        params.attn,
        config=layers.AttentionConfig(s.x_norm.shape[-1], H),
        context=layers.Context(causal=True),
    )

    def backward(dmerged: np.ndarray) -> tuple[np.ndarray, ...]:
        return (cache.backward(dmerged)[0],)

    error = PRINTED.half_units("dy").max()
    (slack,) = spread(backward, (B, T, D), error)
    PRINTED.check("dx", backward(PRINTED["dy"])[0], slack)
