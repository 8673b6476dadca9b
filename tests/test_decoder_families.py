"""GPT-2, Llama and its descendants: what transformers computes, its gradients, its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_configs import changed
from huggingface import (
    FLOAT64,
    Values,
    build,
    double_precision,
    judged,
    proof,
    reloaded,
    require_close,
    require_equal,
    rewritten,
    transformers,
)
from libraries import LIBRARIES, only

from xformer import backends, pretrained, tree
from xformer.backends import Backend
from xformer.layers import GatedDeltaNetConfig, LatentAttentionConfig
from xformer.pretrained.reading import read_json

B, T, V = 3, 7, 37
LLAMA: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 11}
OSS = {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 6, "sliding_window": 4}
GPT2: dict[str, Any] = {
    "vocab_size": V,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 32,
    "pad_token_id": 0,
}
SIX_TO_TWO = {"sliding_window_pattern": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2": GPT2,
    "Llama": LLAMA,
    "Mistral": LLAMA | {"sliding_window": 4},
    "Mixtral": LLAMA | {"num_local_experts": 3},
    "Qwen2": LLAMA,
    "Qwen3": LLAMA | {"head_dim": 6},
    "Qwen2Moe": LLAMA | MOE | {"shared_expert_intermediate_size": 7},
    "Qwen3Moe": LLAMA | MOE | {"head_dim": 6},
    "Olmoe": LLAMA | {"num_experts": 3, "num_experts_per_tok": 2},
    "GptOss": LLAMA | OSS,
    "Gemma2": LLAMA | {"head_dim": 6, "sliding_window": 4},
    "Gemma3": LLAMA | {"head_dim": 6, "sliding_window": 4, "num_hidden_layers": 3, **SIX_TO_TWO},
    "SmolLM3": LLAMA | {"no_rope_layer_interval": 2},
    "Olmo2": LLAMA,
    "Granite": LLAMA
    | {
        **{"embedding_multiplier": 3.0, "attention_multiplier": 0.3},
        **{"residual_multiplier": 0.22, "logits_scaling": 5.0},
    },
    "Phi3": LLAMA | {"sliding_window": 4},
    "Starcoder2": LLAMA | {"sliding_window": 4},
    "Olmo3": LLAMA | {"sliding_window": 4, "num_hidden_layers": 4},
    "Cohere": LLAMA | {"logit_scale": 0.3},
    "Cohere2": LLAMA | {"logit_scale": 0.3, "sliding_window": 4, "num_hidden_layers": 4},
}
LATENT: dict[str, Any] = LLAMA | {
    "num_hidden_layers": 3,
    "num_key_value_heads": None,
    "kv_lora_rank": 10,
    "q_lora_rank": 7,
    "qk_nope_head_dim": 6,  # even, as torch.view_as_complex needs
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 6,
    "first_k_dense_replace": 1,
}
LATENT_FAMILIES = {  # all heads have keys of their own
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT | {"n_group": 3, "topk_group": 2},
}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
DELTA |= {"linear_key_head_dim": 13, "linear_value_head_dim": 3, "head_dim": 8}
FAMILIES["Qwen3_5"] = LLAMA | DELTA | {"full_attention_interval": 2}
FAMILIES |= LATENT_FAMILIES
CLASSES_OF = {
    "Gemma3": "Gemma3Text",
    "Qwen3_5": "Qwen3_5Text",
}  # the names of classes, but for the language model
WITHOUT_CLASSIFIER = ("Granite", "Olmoe", "Cohere", "Cohere2")
LM, CLASSES, BARE = "ForCausalLM", "ForSequenceClassification", "Model"
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = "linear_attention"
BY_TYPE = {
    FULL: {"rope_type": "linear", "factor": 2.5, "rope_theta": 300.0},
    SLIDING: {"rope_type": "default", "rope_theta": 7.0},
}


def configured(family: str, changes: dict[str, Any]) -> Any:
    name = CLASSES_OF.get(family, family)
    return getattr(transformers, f"{name}Config")(**(FAMILIES[family] | changes))


def kind(family: str, head: str) -> Any:
    name = family if head == LM else CLASSES_OF.get(family, family)
    return getattr(transformers, "GPT2LMHeadModel" if family + head == "GPT2" + LM else name + head)


def batch(padding: str = "none", length: int = T) -> tuple[Values, np.ndarray]:
    """Inputs of transformers, and which are tokens.

    torch's `padding_idx` gives the row of pad_token_id no gradient: no token that is kept has that
    id. transformers counts positions from the left, unless it is told others.
    """
    rng = np.random.default_rng(0)
    keep = np.ones((B, length), np.bool_)
    for row, n_pads in ((1, 2), (2, 5)):
        places = {"none": slice(0), "left": slice(n_pads), "right": slice(-n_pads, length)}
        keep[row, places[padding]] = False
    inputs = {"input_ids": rng.integers(1, V, keep.shape), "attention_mask": keep.astype(int)}
    inputs["input_ids"][~keep] = 0
    if padding == "left":
        inputs["position_ids"] = np.maximum(np.cumsum(keep, axis=1) - 1, 0)
    return inputs, keep


def forward(inputs: Values, keep: np.ndarray) -> Callable[[Any, Any], tuple[np.ndarray, Any]]:
    return lambda model, params: model.forward(params, inputs["input_ids"], mask=keep)


def prove(
    folder: Path,
    family: str,
    changes: dict[str, Any],
    *,
    head: str = LM,
    padding: str = "left",
    length: int = T,
) -> None:
    inputs, keep = batch(padding, length)
    proof(
        build(kind(family, head), configured(family, changes)),
        folder,
        inputs,
        forward(inputs, keep),
        output="last_hidden_state" if head == BARE else "logits",
        keep=keep,
    )


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(
    ("family", "head"),
    [
        (family, head)
        for family in FAMILIES
        for head in (LM, CLASSES, BARE)
        if not (head == CLASSES and family in WITHOUT_CLASSIFIER)
    ],
)
def test_heads(family: str, head: str, padding: str, tmp_path: Path) -> None:
    prove(tmp_path, family, {"num_labels": 5}, head=head, padding=padding)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f != "GPT2" and f not in LATENT_FAMILIES]
)
def test_key_value_heads_and_tied_heads(
    family: str, kv_heads: int, tied: bool, tmp_path: Path
) -> None:
    changes = {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    prove(tmp_path, family, changes)


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "GPT2": [
        {"tie_word_embeddings": False},
        {"n_inner": 7, "n_head": 1, "n_layer": 1},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
        {"reorder_and_upcast_attn": True, "layer_norm_epsilon": 0.1},
        {"activation_function": "gelu"},
        {"activation_function": "relu"},
        {"activation_function": "tanh"},
    ],
    "Llama": [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"head_dim": 6},
        {"num_key_value_heads": None, "rms_norm_eps": 0.1, "pretraining_tp": 1},
        # SmolLM2
        {"is_llama_config": True, "rope_interleaved": False, "tie_word_embeddings": True},
        {"hidden_act": "gelu"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_act": "relu2"},
        {"hidden_act": "quick_gelu"},
        {"hidden_act": "sigmoid"},
    ],
    "Mistral": [
        {"sliding_window": None},
        {"sliding_window": 1},
        {"sliding_window": T - 1},
        {"head_dim": 6, "hidden_size": 20},
    ],
    "Mixtral": [
        {"num_local_experts": 1, "num_experts_per_tok": 1},
        {"num_local_experts": 4, "num_experts_per_tok": 1},
        {"num_local_experts": 4, "num_experts_per_tok": 4},
        {"sliding_window": 3, "head_dim": 6, "hidden_act": "gelu"},
    ],
    "Qwen2": [
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": [SLIDING, FULL]},
        {"head_dim": 6, "tie_word_embeddings": True},
        {"layer_types": [FULL, FULL], "num_key_value_heads": None, "use_mrope": False},
    ],
    "Qwen3": [
        {"attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": [SLIDING, FULL]},
    ],
    "Qwen2Moe": [
        {"norm_topk_prob": True, "num_experts": 4, "hidden_act": "gelu"},
        {"num_experts_per_tok": 1, "qkv_bias": False, "head_dim": 6},
        {"num_hidden_layers": 4, "decoder_sparse_step": 2},
        {"num_hidden_layers": 3, "mlp_only_layers": [1, 7]},
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 3},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": [FULL, SLIDING]},
    ],
    "Qwen3Moe": [
        {"norm_topk_prob": True, "attention_bias": True, "num_experts_per_tok": 3},
        {"num_hidden_layers": 4, "decoder_sparse_step": 3, "mlp_only_layers": [0]},
        {"use_sliding_window": True, "sliding_window": 3, "hidden_act": "relu"},
    ],
    "Olmoe": [
        {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": None},
        {"num_experts": 4, "num_experts_per_tok": 1, "rms_norm_eps": 0.1, "hidden_act": "gelu"},
    ],
    "GptOss": [
        {"num_key_value_heads": 4, "attention_bias": False},
        {"num_hidden_layers": 3, "sliding_window": 2, "num_experts_per_tok": 3},
        {"layer_types": [FULL, SLIDING], "num_local_experts": 4, "num_experts_per_tok": 1},
        {"layer_types": [FULL, FULL], "rms_norm_eps": 0.1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 12.0}},
        {"rope_theta": 12.0},
        {"hidden_act": "relu", "experts_per_token": 2, "initial_context_length": 4096},
    ],
    "Gemma2": [
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.25},
        {"query_pre_attn_scalar": 7, "attention_bias": True},
        {"layer_types": [FULL, SLIDING], "num_hidden_layers": 2},
        {"num_hidden_layers": 3, "hidden_activation": "gelu"},
    ],
    "Gemma3": [
        {"final_logit_softcapping": 0.25},
        {"query_pre_attn_scalar": 7, "attention_bias": True, "hidden_activation": "gelu"},
        {"layer_types": [FULL, SLIDING, SLIDING]},
        {"num_hidden_layers": 7, "sliding_window_pattern": 6, "sliding_window": 2},
        {"use_bidirectional_attention": True},
        {"use_bidirectional_attention": True, "sliding_window": 5},
        {"use_bidirectional_attention": True, "sliding_window": 2, "rope_parameters": BY_TYPE},
        {"rope_parameters": BY_TYPE},
        {"rope_parameters": BY_TYPE | {SLIDING: None}},
        {"rope_theta": 500.0, "rope_local_base_freq": 20.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    "DeepseekV2": [
        {"q_lora_rank": None, "first_k_dense_replace": 0},
        {"attention_bias": True, "first_k_dense_replace": 3, "rms_norm_eps": 0.1},
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
        {"topk_method": "greedy", "n_group": 2, "topk_group": 1, "num_experts_per_tok": 6},
        {"routed_scaling_factor": 16.0, "n_shared_experts": 1, "hidden_act": "gelu"},
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "output_router_logits": True},
    ],
    "DeepseekV3": [
        {"q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 0},
        {"attention_bias": True, "first_k_dense_replace": 3, "rms_norm_eps": 0.1},
        {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
        {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "hidden_act": "gelu"},
        {"n_group": 2, "topk_group": 2, "num_experts_per_tok": 1},
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "num_nextn_predict_layers": 0},
    ],
    "SmolLM3": [
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        {"no_rope_layers": [0, 1]},
        {"no_rope_layers": [0, 0, 1], "num_key_value_heads": None, "head_dim": 6},
        {"no_rope_layers": [1, 1], "rope_theta": 50.0},
        {"no_rope_layer_interval": 1, "hidden_act": "gelu"},
        {"use_sliding_window": True, "sliding_window": 3},
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": [SLIDING, FULL]},
        {"sliding_window": 3},
    ],
    "Qwen3_5": [
        {"attention_bias": True, "rms_norm_eps": 0.1},
        {"layer_types": [FULL, LINEAR], "tie_word_embeddings": True},
        {"linear_conv_kernel_dim": 2, "linear_num_key_heads": 1},
        {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_theta": 7.0, "mrope_section": [1, 1, 0]}},
    ],
    "Olmo2": [
        {"attention_bias": True, "rms_norm_eps": 0.1},
        {"hidden_act": "gelu", "head_dim": 6},
    ],
    "Granite": [
        {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.1},
        {"hidden_act": "gelu", "head_dim": 6},
        {"embedding_multiplier": 1.0, "residual_multiplier": 1, "attention_multiplier": 1},
        {"residual_multiplier": -1.5, "logits_scaling": 1.0},
    ],
    "Phi3": [
        {"sliding_window": None, "rms_norm_eps": 0.1},
        {"head_dim": 6, "hidden_act": "gelu"},
        {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.5}},
    ],
    "Starcoder2": [
        {"use_bias": False, "norm_epsilon": 0.1},
        {"sliding_window": None, "hidden_act": "gelu", "head_dim": 6},
    ],
    "Cohere": [
        {"attention_bias": True, "layer_norm_eps": 0.1},
        {"hidden_act": "gelu", "logit_scale": 1.0, "head_dim": 6},
    ],
    "Olmo3": [
        {"attention_bias": True, "rms_norm_eps": 0.1},
        {"hidden_act": "gelu", "head_dim": 6, "layer_types": [FULL, SLIDING, FULL, FULL]},
        {"rope_parameters": BY_TYPE},
        {"rope_parameters": BY_TYPE | {SLIDING: None}},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 500000.0},
    ],
    "Cohere2": [
        {"attention_bias": True, "layer_norm_eps": 0.1, "sliding_window_pattern": 2},
        {"hidden_act": "gelu", "head_dim": 6, "layer_types": [FULL, SLIDING, FULL, FULL]},
        {"layer_types": [FULL] * 4},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 30.0}},
    ],
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param(family, changes, id=f"{family}-{','.join(changes)}")
        for family, many in OPTIONS.items()
        for changes in many
    ],
)
def test_options(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    prove(tmp_path, family, changes)


ORIGINAL = 8  # tokens that a model whose rotary embedding is scaled was trained with
TRAINED = {"original_max_position_embeddings": ORIGINAL}
LONGROPE = TRAINED | {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16],
}
YARN: dict[str, Any] = TRAINED | {"rope_type": "yarn", "factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": YARN,
    "yarn, ramp": YARN | {"beta_fast": 2.0, "beta_slow": 0.25, "attention_factor": 0.7},
    "yarn, not truncated": YARN | {"beta_fast": 2, "beta_slow": 0.25, "truncate": False},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    "llama3": TRAINED
    | {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0},
    "longrope": LONGROPE,
    "longrope, factor": LONGROPE | {"factor": 3.0},
    "longrope, attention": LONGROPE | {"attention_factor": 1.3},
}


def rotary(name: str) -> dict[str, Any]:
    """Changes of a configuration: its rotary embedding as transformers 5 writes it."""
    max_len = ORIGINAL if name == "dynamic" else 4 * ORIGINAL
    return {
        "head_dim": 12,
        "max_position_embeddings": max_len,
        "rope_parameters": {"rope_theta": 12.0} | ROPES[name],
    }


def version_4(config: dict[str, Any], key: str = "rope_type") -> dict[str, Any]:
    """A configuration as transformers 4 wrote it; key: "type" at first."""
    old = {name: value for name, value in config.items() if name != "rope_parameters"}
    if "rope_parameters" in config:
        part = dict(config["rope_parameters"])
        if SLIDING in part:  # Gemma 3 and OLMo 3: rope_scaling is of layers without a window
            if config["model_type"] == "gemma3_text":
                old["rope_local_base_freq"] = part[SLIDING]["rope_theta"]
            part = dict(part[FULL])
        old["rope_theta"], scaling = part.pop("rope_theta"), part.pop("rope_type")
        old["rope_scaling"] = None if scaling == "default" else {key: scaling} | part
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    return old | {"transformers_version": "4.40.1"}


@pytest.mark.parametrize("length", [ORIGINAL - 1, ORIGINAL, ORIGINAL + 5])
@pytest.mark.parametrize("name", ROPES)
def test_rotary_scalings(name: str, length: int, tmp_path: Path) -> None:
    prove(tmp_path, "Llama", rotary(name), length=length)


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn, ramp", "yarn, mscale", "yarn, all"])
@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_rotary_scalings_of_latent_attention(family: str, name: str, tmp_path: Path) -> None:
    """YaRN also changes the scale of the scores, if it has mscale_all_dim."""
    part = YARN | {"mscale_all_dim": 0.9} if name == "yarn, all" else ROPES[name]
    max_len = ORIGINAL if name == "dynamic" else 4 * ORIGINAL
    changes = {"max_position_embeddings": max_len, "rope_parameters": {"rope_theta": 12.0} | part}
    prove(tmp_path / "5", family, changes, length=ORIGINAL + 5)
    prove(tmp_path / "4", family, version_4(changes, "type"), length=ORIGINAL + 5)


@pytest.mark.parametrize(
    ("family", "name"),
    [("DeepseekV3", "model.layers.61.eh_proj.weight"), ("Qwen3_5", "mtp.fc.weight")],
)
def test_layers_that_predict_later_tokens_are_left_out(
    family: str, name: str, tmp_path: Path
) -> None:
    """With a warning; transformers leaves them out without one."""
    hf = build(kind(family, LM), configured(family, {}))
    hf.save_pretrained(tmp_path)
    _, want = pretrained.load(tmp_path)
    rewritten(tmp_path, more={name: np.ones((16, 32), np.float32)})
    with pytest.warns(UserWarning, match=f"does not use are left out: '{name}'"):
        _, params = pretrained.load(tmp_path)
    require_equal(params, want)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_scalings_go_by_the_largest_position_given(name: str, tmp_path: Path) -> None:
    ids = np.arange(1, 11).reshape(2, 5)
    places = np.array([[20, 21, 22, 23, 24], [3, 4, 5, 6, 30]])
    hf = build(kind("Llama", LM), configured("Llama", rotary(name)))
    inputs = {"input_ids": ids, "position_ids": places}
    proof(hf, tmp_path, inputs, lambda model, p: model.forward(p, ids, positions=places))


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ROPES)
def test_rotary_scalings_as_of_version_4(name: str, key: str, tmp_path: Path) -> None:
    prove(tmp_path, "Llama", version_4(rotary(name), key), length=ORIGINAL + 5)


OWN_ROPE = ("GPT2", "Phi3", "Gemma3", "Olmo3", "Olmoe", "Qwen3_5", *LATENT_FAMILIES)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in (*OWN_ROPE, "Llama")])
def test_rotary_scalings_of_descendants(family: str, tmp_path: Path) -> None:
    prove(tmp_path, family, rotary("yarn, ramp"), length=ORIGINAL + 5)


@pytest.mark.parametrize("length", [ORIGINAL, ORIGINAL + 5])
@pytest.mark.parametrize("kind", ["longrope", "yarn"])
def test_rotary_scalings_of_phi3(kind: str, length: int, tmp_path: Path) -> None:
    """In old files longrope is called yarn, or su, which transformers 5.24 does not convert whole.

    The trained length is outside the parameters.
    """
    factors = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 8.0]}
    changes = TRAINED | {"hidden_size": 48, "rope_theta": 12.0, "partial_rotary_factor": 0.5}
    changes |= {"rope_scaling": {"type": kind} | factors}
    prove(tmp_path, "Phi3", changes, length=length)
    saved, _ = pretrained.load(tmp_path / "theirs")
    names = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
    old = pretrained.model(FAMILIES["Phi3"] | names | changes)
    assert old.rotary == saved.rotary and saved.rotary.original_max_len == ORIGINAL
    changes["rope_scaling"] |= {"type": "su"}
    assert pretrained.model(FAMILIES["Phi3"] | names | changes).rotary == old.rotary


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ROPES)
def test_folders_of_version_4(name: str, key: str, tmp_path: Path) -> None:
    """The same model is read from both; and written so that transformers reads it again."""
    inputs, keep = batch("left", ORIGINAL + 5)
    hf = build(kind("Llama", LM), configured("Llama", rotary(name)))
    hf.save_pretrained(tmp_path / "5")
    new, params = pretrained.load(tmp_path / "5", dtype="float64")
    path = tmp_path / "5" / "config.json"
    path.write_text(json.dumps(version_4(read_json(path), key)))
    old, _ = pretrained.load(tmp_path / "5")
    assert replace(old, hf_config=None) == replace(new, hf_config=None)
    pretrained.save(old, params, tmp_path / "4")
    with double_precision():
        want = judged(hf, inputs, "logits", keep)
        again = judged(reloaded(hf, tmp_path / "4"), inputs, "logits", keep)
    require_close("reloaded", again.y, want.y, FLOAT64)


BALANCED = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "Qwen3Moe": {"num_experts": 4},
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4},
}


@pytest.mark.parametrize(
    ("family", "padding"),
    [
        (f, p)
        for f in BALANCED
        for p in ("none", "left", "right", "no mask")
        if f == "Mixtral" or p == "left"
    ],
)
def test_balancing_of_experts(family: str, padding: str, tmp_path: Path) -> None:
    """The whole loss: transformers shifts labels by one, and leaves those at -100 out.

    Among them must be each row's first token, which padding would have to foretell.
    """
    changes = BALANCED[family] | {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    inputs, keep = batch("none" if padding == "no mask" else padding)
    if padding == "no mask":
        del inputs["attention_mask"]
    ids = inputs["input_ids"]
    first = np.cumsum(keep, axis=1) == 1
    labels = np.where(keep & ~first, ids, -100)
    targets = np.concatenate([labels[:, 1:], np.full((B, 1), -100)], axis=1)

    def loss(model: Any, params: Any) -> tuple[np.ndarray, Any]:
        assert model.load_balancing_weight == 0.3
        mask = None if padding == "no mask" else keep
        return model.loss(params, ids, targets, mask=mask, ignore_index=-100)

    hf = build(kind(family, LM), configured(family, changes))
    proof(hf, tmp_path, inputs | {"labels": labels}, loss, output="loss")


REQUIRED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("vocab_size", "architectures", "model_type"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults(family: str) -> None:
    """What is absent is as transformers has it; all that its configuration may hold is known."""
    needed = {"num_experts_per_tok": 6} if family == "DeepseekV2" else {}  # None by default
    config = getattr(transformers, f"{CLASSES_OF.get(family, family)}Config")(**needed)
    config.architectures = [kind(family, LM).__name__]
    full = json.loads(json.dumps(config.to_dict()))
    sparse = {name: value for name, value in full.items() if name in (*REQUIRED, *needed)}
    models = [resolved(pretrained.model(each)) for each in (full, version_4(full), sparse)]
    assert models[1] == models[0] and models[2] == models[0]


def resolved(model: Any) -> Any:
    """The model without its source and without defaults that mean the same."""
    blocks = (
        b
        if isinstance(b.attn, LatentAttentionConfig | GatedDeltaNetConfig)
        else changed(b, d_head=b.attn.head_width, n_kv_heads=b.attn.kv_heads)
        for b in model.blocks
    )
    return replace(model, blocks=tuple(blocks), hf_config=None)


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that transformers saved."""
    folder = tmp_path_factory.mktemp(request.param)
    build(kind(request.param, LM), configured(request.param, {})).save_pretrained(folder)
    return folder


@only("numpy-readonly", "array-api-strict", "torch", "jax", "cupy")
def test_libraries(library: Backend, saved: Path) -> None:
    inputs, keep = batch("left")
    ids = inputs["input_ids"]
    model, params = pretrained.load(saved, dtype="float64")
    want, _ = model.forward(params, ids, mask=keep)
    model, params = pretrained.load(saved, backend=library, dtype="float64")
    leaf = next(iter(tree.flatten(params).values()))
    assert backends.backend_of(leaf).name == LIBRARIES[library.name]
    got, _ = model.forward(params, library.asarray(ids), mask=library.asarray(keep))
    require_close("logits", library.to_numpy(got), want, 1e-12)
