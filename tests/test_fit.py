"""Parameters of another configuration are refused, with the name of the part, before they run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from block_configs import block_config, changed

from xformer import backends, layers, models, tree
from xformer.layers import BlockConfig, ExpertsConfig

EMBED = layers.EmbedConfig(11, 8, 8, positions="none")
IDS = np.zeros((2, 3), dtype=np.int64)


PLAIN = block_config(8, 2, 12)
UNBIASED = changed(PLAIN, qkv_bias=False)


def misfits() -> Iterator[tuple[BlockConfig, BlockConfig, str]]:
    """(a configuration, the configuration of the parameters, the part and what is said of it)."""
    gated = changed(PLAIN, activation="silu", gated=True)
    experts = changed(PLAIN, experts=ExpertsConfig(3, 2, 12))
    shared = changed(PLAIN, experts=ExpertsConfig(3, 2, 12, d_shared=5, shared_gate=True))
    rms, xl = changed(PLAIN, norm="rms"), changed(PLAIN, xl=True)
    bare, scaled = changed(PLAIN, attn_norm=False), changed(PLAIN, residual_scale=0.0)
    yield UNBIASED, PLAIN, "attn.q.b must be None by config, got (8,)"
    yield PLAIN, UNBIASED, "attn.q.b must be (8,) by config, got None"
    yield (
        changed(PLAIN, output="bias"),
        PLAIN,
        "attn.o must be BiasParams by config, got LinearParams",
    )
    yield changed(PLAIN, output="none"), PLAIN, "attn.o must be None by config, got LinearParams"
    yield PLAIN, gated, "ffn.gate must be None by config, got LinearParams"
    yield gated, PLAIN, "ffn.gate must be LinearParams by config, got None"
    yield (
        changed(PLAIN, d_ff=13),
        PLAIN,
        "ffn.up.w must be (8, 13) by config, got (8, 12)",
    )
    yield PLAIN, experts, "ffn must be FeedForwardParams by config, got ExpertsParams"
    yield experts, PLAIN, "ffn must be ExpertsParams by config, got FeedForwardParams"
    yield experts, shared, "ffn.shared must be None by config, got FeedForwardParams"
    yield shared, experts, "ffn.shared must be FeedForwardParams by config, got None"
    yield rms, PLAIN, "attn_norm.b must be None by config, got (8,)"
    yield PLAIN, rms, "attn_norm.b must be (8,) by config, got None"
    yield PLAIN, bare, "attn_norm must be NormParams by config, got None"
    yield bare, PLAIN, "attn_norm must be None by config, got NormParams"
    yield scaled, PLAIN, "attn_scale must be (1,) by config, got None"
    yield PLAIN, scaled, "attn_scale must be None by config, got (1,)"
    yield xl, PLAIN, "attn.xl must be XLParams by config, got None"
    yield PLAIN, xl, "attn.xl must be None by config, got XLParams"
    yield (
        changed(PLAIN, qk_norm="head"),
        PLAIN,
        "attn.kv.k_norm must be NormParams by config, got None",
    )
    yield changed(PLAIN, sinks=True), PLAIN, "attn.sinks must be (2,) by config, got None"


def with_block(params: Any, stack: str, other: BlockConfig, **options: Any) -> Any:
    """params with block 1 of a stack from another configuration."""
    rng = backends.get("numpy").generator(0, "float64")
    first, _ = getattr(params, stack).blocks
    blocks = first, other.init(rng, **options)
    return params._replace(**{stack: getattr(params, stack)._replace(blocks=blocks)})


def refused(message: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(("one", "other", "message"), list(misfits()))
def test_each_part(one: BlockConfig, other: BlockConfig, message: str) -> None:
    model = models.LanguageModel(EMBED, (one, one))
    params = model.init(dtype="float64")
    model.forward(params, IDS)
    with refused(f"LanguageModel: params.stack.blocks.1.{message}"):
        model.forward(with_block(params, "stack", other), IDS)


def test_a_window_may_be_a_list() -> None:
    """A configuration must be hashable."""
    listed, paired = (changed(PLAIN, window=window) for window in ([1, 0], (1, 0)))
    assert listed == paired and hash(listed) == hash(paired)
    model = models.LanguageModel(EMBED, (listed, listed))
    model.forward(model.init(), IDS)


def test_each_call() -> None:
    model = models.LanguageModel(EMBED, (PLAIN, PLAIN))
    wrong = with_block(model.init(dtype="float64"), "stack", UNBIASED)
    message = "LanguageModel: params.stack.blocks.1.attn.q.b must be (8,) by config, got None"
    for call in (
        lambda: model.forward(wrong, IDS),
        lambda: model.loss(wrong, IDS, IDS),
        lambda: model.decode(wrong, IDS, model.init_state()),
    ):
        with refused(message):
            call()


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("shared", [False, True])
def test_encoder_and_decoder(stack: str, shared: bool) -> None:
    model = models.EncoderDecoder(
        (PLAIN,) * 2, (PLAIN,) * 2, EMBED, shared_embed=True, shared_memory=shared
    )
    params = model.init(dtype="float64")
    model.forward(params, IDS, IDS)
    cross = {"cross": True, "shared_memory": shared} if stack == "decoder" else {}
    wrong = with_block(params, stack, UNBIASED, **cross)
    message = f"{stack}: params.{stack}.blocks.1.attn.q.b must be (8,) by config, got None"
    with refused(message):
        model.forward(wrong, IDS, IDS)
    with refused(message):
        model.init_state(wrong, IDS)
    if stack == "decoder":
        with refused(
            "decoder: params.decoder.blocks.1.cross_norm must be NormParams by config, got None"
        ):
            model.forward(with_block(params, stack, PLAIN), IDS, IDS)


def test_frozen_parameters_and_adapters_fit() -> None:
    model = models.LanguageModel(EMBED, (PLAIN, PLAIN), n_shared_layer_groups=2)
    params = model.init(dtype="float64")
    frozen = tree.freeze(params, "stack.*.w")
    block = frozen.stack.blocks[1]
    q = layers.LoRAParams(block.attn.q, np.zeros((8, 1)), np.zeros((1, 8)), tree.Constant(1.0))
    adapted = block._replace(attn=block.attn._replace(q=q))

    def with_second(second: Any) -> Any:
        blocks = frozen.stack.blocks[0], second
        return frozen._replace(stack=frozen.stack._replace(blocks=blocks))

    wanted, _ = model.forward(params, IDS)
    for same in (frozen, with_second(adapted)):
        assert np.array_equal(model.forward(same, IDS)[0], wanted)
    with refused(
        "LanguageModel: params.stack.blocks.1.ffn.up.w must be (8, 12) by config, got (12, 8)"
    ):
        up = block.ffn.down._replace(b=block.ffn.up.b)
        model.forward(with_second(adapted._replace(ffn=block.ffn._replace(up=up))), IDS)
