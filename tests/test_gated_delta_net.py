"""`gated_delta_net` against Qwen3.5's layer in transformers, and its state in decoding."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from block_configs import block_config

from xformer import backends, layers, tree
from xformer.layers import GatedDeltaNetConfig
from xformer.models import LanguageModel

CONFIG = GatedDeltaNetConfig(12, n_heads=4, n_key_heads=2, d_key=3, d_value=5, eps=1e-3)


def arrays(config: GatedDeltaNetConfig = CONFIG) -> tuple[np.ndarray, Any]:
    """x (2, 7, D) and parameters that are all random."""
    rng = backends.get("numpy").generator(0, "float64")
    params = config.init(rng, config.norm)
    return rng.normal((2, 7, 12)), tree.map(lambda a: a + rng.normal(a.shape, std=0.3), params)


def test_transformers() -> None:
    huggingface = pytest.importorskip("huggingface", exc_type=ImportError)
    torch, transformers = huggingface.torch, huggingface.transformers
    kind = transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"linear_key_head_dim": 3, "linear_value_head_dim": 5, "hidden_size": 12}
    config = transformers.Qwen3_5TextConfig(rms_norm_eps=1e-3, **sizes)
    x, params = arrays()
    mask = np.ones((2, 7), bool)
    mask[1, :3] = False
    with huggingface.double_precision():
        theirs = kind(config, 0).double()
        named = {
            "in_proj_qkv.weight": params.qkv.w.T,
            "conv1d.weight": params.conv.T[:, None],
            "in_proj_z.weight": params.gate.w.T,
            "in_proj_b.weight": params.beta.w.T,
            "in_proj_a.weight": params.decay.w.T,
            "dt_bias": params.decay.b,
            "A_log": params.log_rate,
            "norm.weight": params.norm.w,
            "out_proj.weight": params.o.w.T,
        }
        theirs.load_state_dict({name: torch.tensor(a) for name, a in named.items()})
        given = torch.tensor(x, requires_grad=True)
        wanted = theirs(given, attention_mask=torch.tensor(mask))
        dy = np.random.default_rng(1).normal(size=x.shape)
        wanted.backward(torch.tensor(dy))
    y, cache = layers.gated_delta_net(
        x, params, config=CONFIG, context=layers.Context(causal=True, mask=mask[:, None, None, :])
    )
    dx, dparams, _ = cache.backward(dy)
    np.testing.assert_allclose(y, wanted.detach(), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(dx, given.grad, rtol=1e-9, atol=1e-9)
    grads = dict(theirs.named_parameters())
    for name, grad in {
        "in_proj_qkv.weight": dparams.qkv.w.T,
        "conv1d.weight": dparams.conv.T[:, None],
        "in_proj_z.weight": dparams.gate.w.T,
        "in_proj_b.weight": dparams.beta.w.T,
        "in_proj_a.weight": dparams.decay.w.T,
        "dt_bias": dparams.decay.b,
        "A_log": dparams.log_rate,
        "norm.weight": dparams.norm.w,
        "out_proj.weight": dparams.o.w.T,
    }.items():
        np.testing.assert_allclose(grad, grads[name].grad, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("parts", [(7,), (1, 6), (4, 3), (1,) * 7])
def test_parts_with_a_state_are_the_whole(parts: tuple[int, ...]) -> None:
    x, params = arrays()
    y, _ = layers.gated_delta_net(x, params, config=CONFIG)
    state, start, rows = layers.RecurrentState(), 0, []
    for n in parts:
        part = x[:, start : start + n]
        row, cache = layers.gated_delta_net(
            part, params, config=CONFIG, context=layers.Context(causal=True, kv_cache=state)
        )
        rows.append(row)
        start, state = start + n, cache.kv_cache
    np.testing.assert_allclose(np.concatenate(rows, axis=1), y, rtol=0, atol=1e-13)


def test_padding_on_the_left_changes_nothing() -> None:
    x, params = arrays()
    mask = np.array([[False] * 3 + [True] * 7] * 2)
    padded = np.concatenate([x[:, :3] + 5, x], axis=1)
    y, _ = layers.gated_delta_net(
        padded,
        params,
        config=CONFIG,
        context=layers.Context(causal=True, mask=mask[:, None, None, :]),
    )
    wanted, _ = layers.gated_delta_net(x, params, config=CONFIG)
    np.testing.assert_allclose(y[:, 3:], wanted, rtol=0, atol=1e-13)


def test_a_static_state_of_recurrent_layers_alone() -> None:
    """No layer has slots; the mask has one for each token."""
    block = block_config(12, 3, 8)
    blocks = (replace(block, attn=CONFIG),) * 2
    model = LanguageModel(layers.EmbedConfig(11, 12, 12, positions="none"), blocks)
    params = model.init(dtype="float64")
    tokens = np.random.default_rng(0).integers(0, 11, (2, 6))
    mask = np.array([[False] * 2 + [True] * 4, [True] * 6])
    wanted, _ = model.forward(params, tokens, mask=mask)
    _, state = model.decode(params, tokens[:, :4], model.init_state(), mask=mask[:, :4])
    state = state.preallocate(9)
    assert state.capacity == 9
    got, _ = model.decode(params, tokens[:, 4:], state, all_logits=True)
    np.testing.assert_allclose(got, wanted[:, 4:], rtol=0, atol=1e-13)


def test_frozen_parameters_have_no_gradient() -> None:
    x, params = arrays()
    frozen = tree.map(tree.Frozen, params)
    y, cache = layers.gated_delta_net(x, frozen, config=CONFIG)
    wanted, other = layers.gated_delta_net(x, params, config=CONFIG)
    dx, dparams, _ = cache.backward(y)
    assert np.array_equal(y, wanted)
    np.testing.assert_allclose(dx, other.backward(y)[0], rtol=0, atol=1e-13)
    assert not tree.flatten(dparams)


def test_the_state_cannot_go_back() -> None:
    state = layers.RecurrentState()
    assert state.truncated(0, needs=0) is state
    message = "truncate: a recurrent layer (gated DeltaNet) cannot drop its last 2 tokens"
    with pytest.raises(ValueError, match=re.escape(message)):
        state.truncated(2, needs=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_key_heads": 3}, "gated_delta_net: n_key_heads = 3 must divide 4 heads"),
        ({"conv_len": 0}, "gated_delta_net: conv_len must be an int of at least 1, got 0"),
        ({"eps": -1.0}, "gated_delta_net: eps must lie in [0, inf], got -1.0"),
    ],
)
def test_bad_configurations(change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"n_heads": 4, "d_key": 3, "d_value": 5} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        GatedDeltaNetConfig(12, **options)


def test_bad_arguments() -> None:
    x, params = arrays()
    with pytest.raises(ValueError, match=re.escape("qkv.w must have 2 G K + H M = 26 columns")):
        config = GatedDeltaNetConfig(12, n_heads=2, n_key_heads=1, d_key=3, d_value=10)
        layers.gated_delta_net(x, params, config=config)
    with pytest.raises(
        ValueError, match=re.escape("mask must be of padding, (B, 1, 1, S), got shape (2, 7)")
    ):
        layers.gated_delta_net(
            x,
            params,
            config=CONFIG,
            context=layers.Context(causal=True, mask=np.ones((2, 7), bool)),
        )
    with pytest.raises(ValueError, match=re.escape("x must be (B, T, D) or (T, D)")):
        layers.gated_delta_net(x[0, 0], params, config=CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": False}, "LanguageModel: a gated DeltaNet needs causal = True"),
        ({"alibi": True}, "LanguageModel: a gated DeltaNet excludes alibi"),
        (
            {"relative_bias": layers.RelativeConfig(2)},
            "LanguageModel: a gated DeltaNet excludes relative_bias",
        ),
    ],
)
def test_models_that_it_does_not_fit(change: dict[str, Any], message: str) -> None:
    block = layers.BlockConfig(CONFIG, layers.FeedForwardConfig(16))
    with pytest.raises(ValueError, match=re.escape(message)):
        LanguageModel(layers.EmbedConfig(11, 12, 12, positions="none"), (block,), **change)
