"""Configurations of published decoders: accepted, of the known size, refused where altered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hostile import refused_at_most
from hub_configs import HUB

from xformer import pretrained, tree
from xformer.initializers import Shapes
from xformer.layers import RopeConfig
from xformer.pretrained import PretrainedError


def described(name: str, **changes: Any) -> Any:
    return pretrained.model(HUB[name][0] | changes)


@pytest.mark.parametrize("name", HUB)
def test_number_of_parameters(name: str) -> None:
    shapes = tree.flatten(described(name).init_from(Shapes())).values()
    assert sum(math.prod(leaf.shape) for leaf in shapes) == HUB[name][1]


def test_what_they_describe() -> None:
    block = described("gpt2").blocks[0]
    assert (block.ffn.activation, block.norm.eps, block.attn.scale) == ("gelu_tanh", 1e-5, 0.125)
    assert described("llama-7b").rotary == RopeConfig(128)
    assert described("llama-7b").blocks[0].norm.eps == 1e-6
    assert described("Llama-3.1-8B").rotary == RopeConfig(
        128,
        500000.0,
        scaling="llama3",
        factor=8.0,
        original_max_len=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    assert described("SmolLM2-135M").rotary == RopeConfig(64, 100000.0)
    assert described("SmolLM2-135M").head.tied and not described("TinyLlama-1.1B").head.tied
    assert {block.attn.window for block in described("Mistral-7B-v0.1").blocks} == {(4095, None)}
    assert {block.attn.window for block in described("Mistral-7B-v0.3").blocks} == {None}
    mixtral = described("Mixtral-8x7B-v0.1")
    assert (mixtral.load_balancing_weight, mixtral.blocks[0].experts.top_k) == (0.0, 2)
    assert described("Mixtral-8x7B-v0.1", output_router_logits=True).load_balancing_weight == 0.02
    other = {"output_router_logits": True, "architectures": ["MixtralForSequenceClassification"]}
    assert (
        described("Mixtral-8x7B-v0.1", **other).load_balancing_weight == 0.0
    )  # as transformers has it
    for name in ("Qwen2-0.5B", "Qwen3-0.6B"):
        assert {block.attn.window for block in described(name).blocks} == {None}
    assert described("Qwen3-0.6B").blocks[0].attn.qk_norm == "head"
    gemma = described("gemma-2-2b")
    windows = [block.attn.window for block in gemma.blocks]
    assert windows == [(4095, None), None] * 13
    assert (gemma.head.tied, gemma.head.softcap, gemma.blocks[0].attn.softcap) == (True, 30.0, 50.0)
    assert (gemma.embed.scale, gemma.blocks[0].attn.scale) == (48.0, 0.0625)
    olmo = described("OLMo-2-0425-1B").blocks[0]
    assert (olmo.norm_placement, olmo.attn.qk_norm) == ("output", "all")
    granite = described("granite-3.1-2b-base")
    block = granite.blocks[0]
    assert (granite.embed.scale, granite.head.scale, block.attn.scale) == (12.0, 1 / 8, 1 / 64)
    assert block.residual_multiplier == 0.22 and block.residual_scale is None
    phi = described("Phi-4-mini-instruct").rotary
    assert (phi.width, phi.original_max_len, phi.stretch) == (96, 4096, 32.0)
    assert described("Phi-3-mini-4k-instruct").blocks[0].attn.window == (2046, None)
    command = described("c4ai-command-r-v01")
    assert (command.rotary.interleaved, command.head.scale) == (True, 0.0625)
    olmo3 = described("Olmo-3-1025-7B")
    windows = [block.attn.window for block in olmo3.blocks]
    assert windows == [*[(4095, None)] * 3, None] * 8
    assert [turned.scaling for turned in olmo3.rotary] == [*["none"] * 3, "yarn"] * 8
    r7b = described("c4ai-command-r7b-12-2024")
    assert [block.attn.window for block in r7b.blocks] == windows
    turned = RopeConfig(128, 50000.0, interleaved=True)
    assert r7b.rotary == (turned, turned, turned, None) * 8
    starcoder = described("starcoder2-3b")
    assert (starcoder.embed.dropout, starcoder.blocks[0].dropout) == (0.1, 0.1)
    assert starcoder.head.tied and starcoder.blocks[0].ffn.activation == "gelu_tanh"


def test_layers_with_experts() -> None:
    qwen, oss = described("Qwen1.5-MoE-A2.7B"), described("gpt-oss-20b, not quantised")
    mixture = qwen.blocks[0].experts
    assert (mixture.d_shared, mixture.shared_gate, mixture.normalise) == (5632, True, False)
    assert described("Qwen3-30B-A3B").blocks[0].experts.normalise
    sparse = described("Qwen3-30B-A3B", decoder_sparse_step=2, mlp_only_layers=[1]).blocks
    assert [block.experts is None for block in sparse[:4]] == [True, True, True, False]
    assert [block.attn.window for block in oss.blocks] == [(127, None), None] * 12
    assert oss.rotary.scaling == "yarn" and not oss.rotary.truncate
    assert oss.blocks[0].attn.sinks and oss.blocks[0].experts.bias


def test_layers_of_different_kinds() -> None:
    """RoPE or none, its base, and windows on one side of the query, or on both."""
    assert described("SmolLM3-3B").rotary == (*[RopeConfig(128, 5e6)] * 3, None) * 9
    local, whole = RopeConfig(256), RopeConfig(256, 1e6)
    gemma, encoder = described("gemma-3-1b"), described("embeddinggemma-300m")
    assert gemma.rotary == ((*[local] * 5, whole) * 5)[:26]
    assert encoder.rotary == (*[local] * 5, whole) * 4
    windows = [[block.attn.window for block in model.blocks] for model in (gemma, encoder)]
    assert windows[0] == ([*[(511, None)] * 5, None] * 5)[:26]
    assert windows[1] == [*[(256, 256)] * 5, None] * 4
    assert gemma.causal and not encoder.causal and encoder.embed.scale == 768**0.5


def test_deepseeks_scale_and_layers() -> None:
    """The scale of YaRN's mscale_all_dim; dense layers first; groups of experts."""
    lite, big = described("DeepSeek-V2-Lite"), described("DeepSeek-V3")
    for model, mscale in ((lite, 0.707), (big, 1.0)):
        scale = model.blocks[0].attn.scale
        assert math.isclose(scale, 192**-0.5 * (1 + 0.1 * mscale * math.log(40)) ** 2)
        assert model.rotary.interleaved and model.rotary.width == 64
    assert [block.experts is None for block in lite.blocks] == [True] + [False] * 26
    assert [block.experts is None for block in big.blocks] == [True] * 3 + [False] * 58
    experts = big.blocks[-1].experts
    assert (experts.n_groups, experts.top_groups, experts.group_top) == (8, 4, 2)
    assert lite.blocks[0].attn.q_rank is None and big.blocks[0].attn.cached_width == 576


def test_null_is_all_key_value_heads() -> None:
    for name in ("Llama-3.1-8B", "Mistral-7B-v0.1", "Qwen2-0.5B", "gemma-2-2b"):
        own = described(name, num_key_value_heads=None).blocks[0]
        assert own.attn.kv_heads == own.attn.n_heads


def test_null_is_no_window_and_no_cap() -> None:
    assert described("Mistral-7B-v0.1", sliding_window=None).blocks[0].attn.window is None
    assert described("gemma-2-2b", attn_logit_softcapping=None).blocks[0].attn.softcap is None
    assert described("gemma-2-2b", final_logit_softcapping=None).head.softcap is None


def scaled(**parameters: Any) -> dict[str, Any]:
    return {"rope_scaling": parameters}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # Not in the family
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention must be False"),
    ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads must be {}"),
    ("gpt2", {"is_decoder": True}, "is_decoder must be False"),
    ("gpt2", {"activation_function": "mish"}, "activation_function must be one of "),
    ("gpt2", {"model_type": "gpt_bigcode"}, "model_type must be one of "),
    ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "architectures must be one of "),
    ("gpt2", {"architectures": ["GPT2Model", "GPT2LMHeadModel"]}, "architectures must be one of "),
    ("gpt2", {"architectures": None}, "architectures must be one of "),
    ("Llama-2-7b-hf", {"sliding_window": 4096}, "not supported: 'sliding_window'"),
    ("Llama-2-7b-hf", {"quantization_config": {"bits": 4}}, "not supported: 'quantization_config'"),
    ("Llama-2-7b-hf", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 in this"),
    ("Llama-2-7b-hf", {"layer_types": ["sliding_attention"] * 32}, "not supported: 'layer_types'"),
    ("Llama-2-7b-hf", {"architectures": ["MistralForCausalLM"]}, "architectures must be one of "),
    ("Mistral-7B-v0.1", {"layer_types": "full"}, "not supported: 'layer_types'"),
    ("Mixtral-8x7B-v0.1", {"router_jitter_noise": 0.1}, "router_jitter_noise must be 0.0"),
    ("Mixtral-8x7B-v0.1", {"num_experts": 9}, "num_experts must be 8, got 9"),
    ("DeepSeek-V3", {"quantization_config": {"quant_method": "fp8"}}, "'quantization_config'"),
    ("DeepSeek-V3", {"num_key_value_heads": 8}, "num_key_value_heads must be 128"),
    ("DeepSeek-V3", {"head_dim": 56}, "head_dim must be 64, got 56"),
    ("DeepSeek-V3", {"topk_group": 9}, "top_groups must be at most 8 with n_groups = 8, got 9"),
    ("DeepSeek-V3", {"n_group": 7}, "n_groups must divide n_experts = 256, got 7"),
    ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob must be False"),
    ("DeepSeek-V2-Lite", {"mlp_bias": True}, "mlp_bias must be False"),
    ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method must be one of greedy"),
    (
        "DeepSeek-V2-Lite",
        {"topk_method": "group_limited_greedy", "n_group": None},
        "n_group must be an int, as topk_method 'group_limited_greedy' needs",
    ),
    ("OLMoE-1B-7B-0924", {"clip_qkv": 8.0}, "clip_qkv must be null, got 8.0"),
    ("OLMoE-1B-7B-0924", {"head_dim": 64}, "head_dim must be 128, got 64"),
    ("Qwen1.5-MoE-A2.7B", {"num_experts": 0}, "num_experts must be an integer"),
    ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "top_k must be at most n_experts = 128"),
    ("gpt-oss-20b, not quantised", {"swiglu_limit": 5.0}, "swiglu_limit must be 7.0, got 5.0"),
    ("gpt-oss-20b, not quantised", {"swiglu_alpha": 1.0}, "swiglu_alpha must be 1.702, got 1.0"),
    (
        "gpt-oss-20b, not quantised",
        {"quantization_config": {"quant_method": "mxfp4"}},
        "not supported: 'quantization_config'",
    ),
    ("gemma-2-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be"),
    # Rotary embeddings
    ("Llama-2-7b-hf", scaled(type="su"), "rope_scaling: type must be one of "),
    ("Llama-2-7b-hf", scaled(type="linear"), "rope_scaling: factor is missing"),
    ("Llama-2-7b-hf", scaled(type="linear", factor=0.0), "rope_scaling: .*factor must be positive"),
    ("Llama-2-7b-hf", scaled(rope_type="longrope"), "short_factor is missing"),
    ("Llama-2-7b-hf", {"rope_theta": "10000"}, "rope_theta must be a number"),
    ("Llama-3.1-8B", scaled(rope_type="llama3", factor=8.0), "low_freq_factor is missing"),
    (
        "Phi-3-mini-4k-instruct",
        scaled(type="linear", factor=2.0),
        "type must be one of default, lo",
    ),
    ("Phi-4-mini-instruct", {"partial_rotary_factor": 0.5}, "short_factor must be a list of 32"),
    (
        "Phi-4-mini-instruct",
        {"original_max_position_embeddings": None}
        | scaled(type="longrope", original_max_position_embeddings=8192),
        "original_max_position_embeddings must be 4096, got 8192",
    ),
    ("Phi-4-mini-instruct", {"partial_rotary_factor": 1.5}, "must be more than 0 and at most 1"),
    ("c4ai-command-r-v01", {"use_qk_norm": True}, "use_qk_norm must be False, got True"),
    ("Olmo-3-1025-7B", {"rope_theta": 10000.0}, "rope_theta must be 500000.0, got 10000.0"),
    (
        "Olmo-3-1025-7B",
        {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
        "rope_parameters must be an object for each of full_attention, sliding_attention",
    ),
    # Numbers that do not fit together
    ("gpt2", {"n_head": 5}, "n_heads = 5 must divide d_model = 768"),
    ("gpt2", {"n_head": 1024}, "n_heads = 1024 must divide d_model = 768"),
    ("Llama-2-7b-hf", {"num_key_value_heads": 5}, "n_kv_heads = 5 must divide 32 heads"),
    ("Llama-2-7b-hf", {"head_dim": 63}, "width must be even, got 63"),
    ("Mixtral-8x7B-v0.1", {"num_experts_per_tok": 9}, "top_k must be at most n_experts = 8"),
    ("Qwen2-0.5B", {"layer_types": ["full_attention"]}, "layer_types must be a list of 24"),
    ("Qwen2-0.5B", {"layer_types": ["chunked_attention"] * 24}, "layer_types must be one of "),
    ("Qwen2-0.5B", {"layer_types": ["sliding_attention"] * 24}, "where there is no sliding window"),
    ("gemma-2-2b", {"sliding_window": None}, "where there is no sliding window"),
    # Values that are none
    ("gpt2", {"n_layer": None, "n_embd": 0}, "n_embd must be an integer from 1"),
    ("gpt2", {"resid_pdrop": 1.5}, "resid_pdrop must be a number from 0 to 1"),
    ("gpt2", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ("Llama-2-7b-hf", {"hidden_size": None}, "hidden_size is missing"),
    ("Llama-2-7b-hf", {"hidden_size": 4096.0}, "hidden_size must be an integer"),
    ("Llama-2-7b-hf", {"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
    ("Llama-2-7b-hf", {"rms_norm_eps": -1e-5}, "rms_norm_eps must be a number from 0"),
    ("Mistral-7B-v0.1", {"sliding_window": 0}, "sliding_window must be an integer from 1"),
    (
        "Mixtral-8x7B-v0.1",
        {"output_router_logits": 1},
        "output_router_logits must be true or false",
    ),
    ("gemma-2-2b", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number from"),
    # Absurd sizes
    ("gpt2", {"n_layer": 10**6}, "n_layer must be an integer from 1 to 1000"),
    ("gpt2", {"vocab_size": 10**30}, "vocab_size must be an integer from 1"),
    ("Llama-2-7b-hf", {"num_hidden_layers": 2**62}, "num_hidden_layers must be an integer"),
    ("Mixtral-8x7B-v0.1", {"num_local_experts": 2**20}, "num_local_experts must be an integer"),
]


# Keys that transformers does not read for these models; some are other families'.
UNREAD: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"rotary_pct": 0.25}),
    ("gpt2", {"condition_on_chain": True, "condition_on_species": True}),
    ("Llama-2-7b-hf", {"rope_interleaved": True}),
    ("Llama-2-7b-hf", {"attn_logit_softcapping": 50.0}),
    ("Llama-2-7b-hf", {"auto_map": {"AutoModel": "x.y"}}),
    ("Llama-3.1-8B", {"unsloth_fixed": True, "unsloth_version": "2025.1.5"}),
    ("Mistral-7B-v0.1", {"attention_bias": True}),
    ("Qwen2.5-0.5B", {"use_mrope": True}),
    ("Qwen2-0.5B", {"attention_bias": False}),
    ("Qwen3-0.6B", {"num_experts": 128}),
    ("DeepSeek-V3", {"scoring_func": "softmax", "topk_method": "greedy"}),
    ("gemma-2-2b", {"sliding_window_pattern": 6}),
    ("gemma-2-9b", {"sliding_window_size": 512}),
]
# Keys that change nothing at these values.
SILENT: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"hidden_size": 768, "num_hidden_layers": 12}),
    ("Llama-2-7b-hf", {"pretraining_tp": 2, "is_causal": True, "quantization_config": {}}),
    ("Llama-2-7b-hf", {"layer_types": ["full_attention"] * 32}),
    ("Mistral-7B-v0.1", {"layer_types": ["full_attention"] * 32}),
    ("Mixtral-8x7B-v0.1", {"num_experts": 8}),
]


@pytest.mark.parametrize(("name", "changes"), UNREAD)
def test_a_key_that_nothing_reads_is_named(name: str, changes: dict[str, Any]) -> None:
    listed = ", ".join(f"'{key}'" for key in sorted(changes))
    with pytest.warns(UserWarning, match=f"transformers does not read are left out: {listed}$"):
        found = described(name, **changes)
    assert replace(found, hf_config=None) == replace(described(name), hf_config=None)
    assert found.hf_config.items() >= changes.items()  # and is saved again


@pytest.mark.parametrize(("name", "changes"), SILENT)
def test_keys_at_values_that_change_nothing(name: str, changes: dict[str, Any]) -> None:
    assert replace(described(name, **changes), hf_config=None) == replace(
        described(name), hf_config=None
    )


def test_a_key_of_a_rotary_embedding_that_nothing_reads_is_named() -> None:
    parameters = {"type": "linear", "factor": 2}
    with pytest.warns(UserWarning, match=r"left out: 'rope_scaling\.beta_fast'$"):
        found = described("Llama-2-7b-hf", **scaled(**parameters, beta_fast=32))
    assert found.rotary == described("Llama-2-7b-hf", **scaled(**parameters)).rotary


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with refused_at_most(), pytest.raises(PretrainedError, match=rf"^config\.json: .*{message}"):
        described(name, **changes)
