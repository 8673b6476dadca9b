"""Small models that write texts, of every family and every way of placing tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from block_configs import block_config, changed

from xformer import pretrained, tree
from xformer.backends import Backend
from xformer.layers import EmbedConfig, KVCache, RelativeConfig
from xformer.models import GPT, LanguageModel, Transformer

V = 37
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 20,
    "max_position_embeddings": 40,
}
GPT2: dict[str, Any] = {"vocab_size": V, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 40}
T5: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 12,
    "d_kv": 5,
    "d_ff": 20,
    "num_layers": 2,
    "num_heads": 3,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LATENT = SIZES | {"num_key_value_heads": 3}
LATENT |= {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
LATENT |= {"first_k_dense_replace": 1}
EVERY_SECOND: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 4,
}
# Hugging Face's names of families -> configurations.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"architecture": "GPT2LMHeadModel", **GPT2},
    "gpt_neox": {"architecture": "GPTNeoXForCausalLM", **SIZES, "rotary_pct": 0.5},
    "llama": {"architecture": "LlamaForCausalLM", **SIZES, "rope_scaling": LLAMA3},
    "mistral": {"architecture": "MistralForCausalLM", **SIZES, "sliding_window": 4},
    "mixtral": {"architecture": "MixtralForCausalLM", **SIZES, "num_local_experts": 3},
    "qwen2": {
        "architecture": "Qwen2ForCausalLM",
        **SIZES,
        **{"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", **SIZES, "head_dim": 6},
    "gemma2": {"architecture": "Gemma2ForCausalLM", **SIZES, "head_dim": 6, "sliding_window": 4},
    "gemma3_text": {
        "architecture": "Gemma3ForCausalLM",
        **SIZES,
        **{"head_dim": 6, "sliding_window": 4, "sliding_window_pattern": 2},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "deepseek_v2": {"architecture": "DeepseekV2ForCausalLM", **LATENT, "q_lora_rank": None},
    "deepseek_v3": {
        "architecture": "DeepseekV3ForCausalLM",
        **LATENT,
        **{"q_lora_rank": 8, "n_group": 2, "topk_group": 1},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10},
            **{"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    },
    "smollm3": {
        "architecture": "SmolLM3ForCausalLM",
        **SIZES,
        **{"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 4},
        "pad_token_id": 0,
    },
    "olmo2": {"architecture": "Olmo2ForCausalLM", **SIZES},
    "granite": {
        "architecture": "GraniteForCausalLM",
        **SIZES,
        **{"embedding_multiplier": 3.0, "attention_multiplier": 0.3},
        **{"residual_multiplier": 0.22, "logits_scaling": 5.0},
    },
    "phi3": {
        "architecture": "Phi3ForCausalLM",
        **SIZES,
        **{"partial_rotary_factor": 0.5, "pad_token_id": 0},
    },
    "starcoder2": {
        "architecture": "Starcoder2ForCausalLM",
        **SIZES,
        **{"sliding_window": 4, "tie_word_embeddings": False},
    },
    "olmo3": {"architecture": "Olmo3ForCausalLM", **SIZES, **EVERY_SECOND},
    "cohere": {"architecture": "CohereForCausalLM", **SIZES, "logit_scale": 0.3},
    "cohere2": {"architecture": "Cohere2ForCausalLM", **SIZES, **EVERY_SECOND, "logit_scale": 0.3},
}
CONFIGS["gpt_neox"].pop("num_key_value_heads")
CONFIGS["qwen3_5_text"] = {
    "architecture": "Qwen3_5ForCausalLM",
    **SIZES,
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 13},
    **{"linear_value_head_dim": 3, "full_attention_interval": 2, "head_dim": 8},
}
ROUTED = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 11}
CONFIGS |= {
    "qwen2_moe": {
        "architecture": "Qwen2MoeForCausalLM",
        **SIZES,
        **ROUTED,
        **{"shared_expert_intermediate_size": 7, "mlp_only_layers": [1]},
    },
    "qwen3_moe": {"architecture": "Qwen3MoeForCausalLM", **SIZES, **ROUTED, "head_dim": 6},
    "olmoe": {
        "architecture": "OlmoeForCausalLM",
        **SIZES,
        **{"num_experts": 3, "num_experts_per_tok": 2},
    },
    "gpt_oss": {
        "architecture": "GptOssForCausalLM",
        **SIZES,
        **{"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 6, "sliding_window": 4},
    },
}
# Nothing in these is new to a text that is written, beside the others.
ALIKE = ("llama", "qwen2", "qwen3", "olmo2", "smollm3", "phi3", "starcoder2", "cohere")
ALIKE += ("mixtral", "qwen3_moe", "olmoe", "deepseek_v2")
NAMES = [
    *(name for name in CONFIGS if name not in ALIKE),
    *("sinusoidal", "positions for q, k, v", "no positions", "alibi", "relative bias", "shaw"),
    *("post-norm", "concatenated positions", "bare blocks"),
]
ALL = [*NAMES, "reversible"]  # which no kernel for one token runs
# Padding needs position ids, and position ids need positions that are added to embeddings.
UNPADDED = ("positions for q, k, v", "concatenated positions")
T5_NAMES = ["t5", "t5 1.1", "Transformer", "shared memory"]


CHANGES: dict[str, Callable[[Any, Any], Any]] = {  # of a past's keys and values, by hand
    "the first text": lambda xp, a: a[:1, ...],
    "the last text": lambda xp, a: a[1:, ...],
    "texts in another order": lambda xp, a: xp.flip(a, axis=0),
    "half as large": lambda xp, a: a * 0.5,
    "without the last token": lambda xp, a: a[:, :, :-1, :],
}


def causal(name: str, seed: int = 0) -> tuple[Any, Any]:
    """A decoder and its parameters, in float64, far from uniform."""
    gpt: dict[str, Any] = {"vocab_size": V, "n_layers": 2, "d_model": 12, "n_heads": 3}
    gpt["max_len"] = 40
    blocks = (block_config(12, 3, 20, activation="gelu"),) * 2
    bare = block_config(
        12, 3, 12, down=False, attn_norm=False, output="bias", eps=0.1, eps_inside=False
    )
    plain = EmbedConfig(V, 12, 12, positions="none")
    if name in CONFIGS:
        config = dict(CONFIGS[name])
        model = pretrained.model(
            {"model_type": name, "architectures": [config.pop("architecture")], **config}
        )
    else:
        model = {
            "sinusoidal": lambda: GPT(**gpt, positions="sinusoidal"),
            "positions for q, k, v": lambda: GPT(**gpt, position_mode="qkv"),
            "no positions": lambda: GPT(**gpt, positions="none"),
            "alibi": lambda: LanguageModel(plain, blocks, alibi=True),
            "relative bias": lambda: LanguageModel(
                plain, blocks, relative_bias=RelativeConfig(3, 8, 16, bidirectional=False)
            ),
            "shaw": lambda: LanguageModel(plain, (changed(blocks[0], shaw_max_distance=2),) * 2),
            "post-norm": lambda: GPT(**gpt, norm_placement="post"),
            "concatenated positions": lambda: GPT(**gpt, position_mode="concat", d_positions=5),
            "bare blocks": lambda: LanguageModel(plain, (bare,) * 2),
            "reversible": lambda: GPT(**gpt, reversible=True),
        }[name]()
    return model, lively(model, seed)


def seq2seq(name: str, seed: int = 0) -> tuple[Any, Any]:
    """An encoder-decoder and its parameters, in float64, far from uniform."""
    if name.startswith("t5"):
        more = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        config = T5 | (more if name == "t5 1.1" else {})
        kind = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
        model = pretrained.model(kind | {"is_encoder_decoder": True} | config)
    else:
        shared = name == "shared memory"
        model = Transformer(V, V, 12, 3, 2, 2, 40, shared_memory=shared)
    return model, lively(model, seed)


def lively(model: Any, seed: int) -> Any:
    """Parameters that are all random, the matrices large."""
    rng = np.random.default_rng(seed)

    def drawn(p: np.ndarray) -> np.ndarray:
        return p + rng.normal(size=p.shape) * (0.3 if p.ndim == 1 else 3 / p.shape[0] ** 0.5)

    return tree.map(drawn, model.init(seed, dtype="float64"))


def require_other_arrays(library: Backend, name: str, change: str, dtype: str) -> None:
    """A text of changed arrays goes on as one that has never had others."""
    model, params = causal(name)
    params = tree.map(lambda p: library.asarray(p, dtype), params)
    tokens = np.random.default_rng(0).integers(0, V, (2, 9))
    _, state = model.decode(params, library.asarray(tokens[:, :7]), model.init_state())
    _, state = model.decode(params, library.asarray(tokens[:, 7:8]), state)
    assert all(layer.storage is not None for layer in state.kv_cache)
    changed = [
        [CHANGES[change](library.xp, a) for a in kv_cache[:2]] for kv_cache in state.kv_cache
    ]
    length = state.length - (change == "without the last token")
    new = library.asarray(tokens[: changed[0][0].shape[0], 8:])
    got, wanted = (
        model.decode(params, new, state._replace(kv_cache=kv_cache, length=length))
        for kv_cache in (
            tuple(p._replace(k=k, v=v) for p, (k, v) in zip(state.kv_cache, changed, strict=True)),
            tuple(KVCache(k, v) for k, v in changed),
        )
    )
    for one, other in [
        (got[0], wanted[0]),
        *(
            (getattr(a, kind), getattr(b, kind))
            for a, b in zip(got[1].kv_cache, wanted[1].kv_cache, strict=True)
            for kind in "kv"
        ),
    ]:
        np.testing.assert_allclose(
            library.to_numpy(one), library.to_numpy(other), rtol=1e-5, atol=1e-6
        )
