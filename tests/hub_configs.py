"""config.json of published decoders, as their folders have it, and how many parameters they have.

What is left out are numbers of special tokens and settings of text generation.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def gpt2(**own: Any) -> Config:
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    } | own


def like_llama(kind: str, name: str, **own: Any) -> Config:
    return {
        "architectures": [f"{name}ForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": kind,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
    } | own


def llama(**own: Any) -> Config:
    return like_llama("llama", "Llama", **own)


def llama3(**own: Any) -> Config:
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return llama(
        **{
            "attention_bias": False,
            "attention_dropout": 0.0,
            "eos_token_id": [128001, 128008, 128009],
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rope_scaling": scaling | own.pop("rope_scaling", {}),
            "rope_theta": 500000.0,
            "vocab_size": 128256,
        }
        | own
    )


def smollm2(**own: Any) -> Config:
    return llama(
        attention_bias=False,
        attention_dropout=0.0,
        hidden_size=576,
        initializer_range=0.041666666666666664,
        intermediate_size=1536,
        is_llama_config=True,
        max_position_embeddings=8192,
        num_attention_heads=9,
        num_hidden_layers=30,
        num_key_value_heads=3,
        pretraining_tp=1,
        rope_interleaved=False,
        rope_scaling=None,
        rope_theta=100000,
        vocab_size=49152,
        **{"tie_word_embeddings": True} | own,
    )


def mistral(**own: Any) -> Config:
    return like_llama(
        "mistral",
        "Mistral",
        hidden_size=4096,
        intermediate_size=14336,
        max_position_embeddings=32768,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        **own,
    )


def qwen2(**own: Any) -> Config:
    return like_llama(
        "qwen2",
        "Qwen2",
        **{
            "attention_dropout": 0.0,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        }
        | own,
    )


def deepseek_yarn(mscale: float) -> Config:
    return {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "type": "yarn"},
        **{"mscale": mscale, "mscale_all_dim": mscale},
        "original_max_position_embeddings": 4096,
    }


def deepseek(version: str, **own: Any) -> Config:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    return like_llama(
        f"deepseek_{version.lower()}",
        f"Deepseek{version}",
        **{"attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001},
        **{"max_position_embeddings": 163840, "moe_layer_freq": 1, "pretraining_tp": 1},
        **{"rms_norm_eps": 1e-06, "rope_theta": 10000, "seq_aux": True, "v_head_dim": 128},
        **sizes,
        **own,
    )


def gemma3(**own: Any) -> Config:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "model_type": "gemma3_text",
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 262144,
    } | own


def gemma2(**own: Any) -> Config:
    config = like_llama(
        "gemma2",
        "Gemma2",
        attention_bias=False,
        attention_dropout=0.0,
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        final_logit_softcapping=30.0,
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=8192,
        pad_token_id=0,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-06,
        rope_theta=10000.0,
        sliding_window=4096,
        torch_dtype="float32",
        vocab_size=256000,
        **own,
    )
    del config["tie_word_embeddings"]  # they are tied all the same
    return config


def phi3(**own: Any) -> Config:
    return like_llama(
        "phi3",
        "Phi3",
        **{
            "attention_bias": False,
            "attention_dropout": 0.0,
            "embd_pdrop": 0.0,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096,
            "resid_pdrop": 0.0,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "sliding_window": 2047,
            "vocab_size": 32064,
        }
        | own,
    )


HUB: dict[str, tuple[Config, int]] = {
    "gpt2": (gpt2(), 124_439_808),
    "gpt2-medium": (
        gpt2(n_embd=1024, n_head=16, n_layer=24, n_special=0, predict_special_tokens=True),
        354_823_168,
    ),
    "distilgpt2": (
        gpt2(
            _num_labels=1,
            gradient_checkpointing=False,
            id2label={"0": "LABEL_0"},
            label2id={"LABEL_0": 0},
            n_inner=None,
            n_layer=6,
            transformers_version="4.5.0.dev0",
        ),
        81_912_576,
    ),
    "llama-7b": (
        llama(
            hidden_size=4096,
            intermediate_size=11008,
            max_sequence_length=2048,
            num_attention_heads=32,
            num_hidden_layers=32,
            pad_token_id=0,
            rms_norm_eps=1e-06,
            torch_dtype="float16",
            vocab_size=32000,
        ),
        6_738_415_616,
    ),
    "Llama-2-7b-hf": (
        llama(
            _name_or_path="meta-llama/Llama-2-7b-hf",
            hidden_size=4096,
            intermediate_size=11008,
            max_position_embeddings=4096,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=32,
            pretraining_tp=1,
            rope_scaling=None,
            torch_dtype="float16",
            vocab_size=32000,
        ),
        6_738_415_616,
    ),
    "Llama-3.1-8B": (
        llama3(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32),
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        llama3(
            head_dim=64,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            rope_scaling={"factor": 32.0},
            tie_word_embeddings=True,
        ),
        1_235_814_400,
    ),
    "TinyLlama-1.1B": (
        llama(
            hidden_size=2048,
            intermediate_size=5632,
            max_position_embeddings=2048,
            num_attention_heads=32,
            num_hidden_layers=22,
            num_key_value_heads=4,
            pretraining_tp=1,
            rope_scaling=None,
            torch_dtype="float32",
            vocab_size=32000,
        ),
        1_100_048_384,
    ),
    "SmolLM2-135M": (smollm2(), 134_515_008),
    "SmolLM2-135M-Instruct": (
        smollm2(
            pad_token_id=2,
            **{"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
        ),
        134_515_008,
    ),
    "Mistral-7B-v0.1": (
        mistral(rope_theta=10000.0, sliding_window=4096, vocab_size=32000),
        7_241_732_096,
    ),
    "Mistral-7B-v0.3": (
        mistral(attention_dropout=0.0, rope_theta=1000000.0, sliding_window=None, vocab_size=32768),
        7_248_023_552,
    ),
    "Mixtral-8x7B-v0.1": (
        like_llama(
            "mixtral",
            "Mixtral",
            attention_dropout=0.0,
            hidden_size=4096,
            intermediate_size=14336,
            max_position_embeddings=32768,
            num_attention_heads=32,
            num_experts_per_tok=2,
            num_hidden_layers=32,
            num_key_value_heads=8,
            num_local_experts=8,
            output_router_logits=False,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.02,
            sliding_window=None,
            vocab_size=32000,
        ),
        46_702_792_704,
    ),
    "Qwen2-0.5B": (
        qwen2(max_position_embeddings=131072, sliding_window=131072),
        494_032_768,
    ),
    "Qwen2.5-0.5B": (
        qwen2(max_position_embeddings=32768, sliding_window=32768, use_mrope=False),
        494_032_768,
    ),
    "Qwen2.5-7B": (
        qwen2(
            hidden_size=3584,
            intermediate_size=18944,
            max_position_embeddings=131072,
            max_window_layers=28,
            num_attention_heads=28,
            num_hidden_layers=28,
            num_key_value_heads=4,
            sliding_window=131072,
            tie_word_embeddings=False,
            use_mrope=False,
            vocab_size=152064,
        ),
        7_615_616_512,
    ),
    "Qwen3-0.6B": (
        like_llama(
            "qwen3",
            "Qwen3",
            attention_bias=False,
            attention_dropout=0.0,
            head_dim=128,
            hidden_size=1024,
            intermediate_size=3072,
            max_position_embeddings=40960,
            max_window_layers=28,
            num_attention_heads=16,
            num_hidden_layers=28,
            num_key_value_heads=8,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=None,
            use_sliding_window=False,
            vocab_size=151936,
            **{"tie_word_embeddings": True},
        ),
        596_049_920,
    ),
    "DeepSeek-V2-Lite": (
        deepseek(
            "V2",
            **{"first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944},
            **{"moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64},
            **{"n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16},
            **{"num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16},
            **{"q_lora_rank": None, "routed_scaling_factor": 1.0, "scoring_func": "softmax"},
            **{"topk_group": 1, "topk_method": "greedy", "vocab_size": 102400},
            rope_scaling=deepseek_yarn(0.707),
        ),
        15_706_484_224,
    ),
    # Without its quantization_config: the published files are in fp8.
    "DeepSeek-V3": (
        deepseek(
            "V3",
            **{"ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168},
            **{"intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8},
            **{"n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True},
            **{"num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61},
            **{"num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536},
            **{"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4},
            **{"topk_method": "noaux_tc", "vocab_size": 129280},
            rope_scaling=deepseek_yarn(1.0),
        ),
        671_026_419_200,
    ),
    "SmolLM3-3B": (
        like_llama(
            "smollm3",
            "SmolLM3",
            attention_bias=False,
            attention_dropout=0.0,
            hidden_size=2048,
            intermediate_size=11008,
            layer_types=["full_attention"] * 36,
            max_position_embeddings=65536,
            max_window_layers=28,
            mlp_bias=False,
            no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0] * 9,
            num_attention_heads=16,
            num_hidden_layers=36,
            num_key_value_heads=4,
            pretraining_tp=2,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=5000000.0,
            sliding_window=None,
            use_sliding_window=False,
            vocab_size=128256,
            **{"tie_word_embeddings": True},
        ),
        3_075_098_624,
    ),
    "gemma-3-1b": (
        gemma3(
            hidden_size=1152,
            intermediate_size=6912,
            max_position_embeddings=32768,
            num_attention_heads=4,
            num_hidden_layers=26,
            num_key_value_heads=1,
            sliding_window_pattern=6,
        ),
        999_885_952,
    ),
    "embeddinggemma-300m": (
        gemma3(
            architectures=["Gemma3TextModel"],
            hidden_size=768,
            intermediate_size=1152,
            layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 4,
            max_position_embeddings=2048,
            num_attention_heads=3,
            num_hidden_layers=24,
            num_key_value_heads=1,
            use_bidirectional_attention=True,
            **{"_sliding_window_pattern": 6},
        ),
        302_863_104,
    ),
    "gemma-2-2b": (
        gemma2(
            hidden_size=2304,
            intermediate_size=9216,
            num_attention_heads=8,
            num_hidden_layers=26,
            num_key_value_heads=4,
        ),
        2_614_341_888,
    ),
    "gemma-2-9b": (
        gemma2(
            hidden_size=3584,
            intermediate_size=14336,
            num_attention_heads=16,
            num_hidden_layers=42,
            num_key_value_heads=8,
            sliding_window_size=4096,
        ),
        9_241_705_984,
    ),
    "OLMo-2-0425-1B": (
        like_llama(
            "olmo2",
            "Olmo2",
            attention_bias=False,
            attention_dropout=0.0,
            hidden_size=2048,
            intermediate_size=8192,
            max_position_embeddings=4096,
            num_attention_heads=16,
            num_hidden_layers=16,
            num_key_value_heads=16,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=500000,
            vocab_size=100352,
        ),
        1_484_916_736,
    ),
    "granite-3.1-2b-base": (
        like_llama(
            "granite",
            "Granite",
            attention_bias=False,
            attention_dropout=0.1,
            attention_multiplier=0.015625,
            embedding_multiplier=12.0,
            hidden_size=2048,
            intermediate_size=8192,
            logits_scaling=8.0,
            max_position_embeddings=131072,
            mlp_bias=False,
            num_attention_heads=32,
            num_hidden_layers=40,
            num_key_value_heads=8,
            residual_multiplier=0.22,
            rope_scaling=None,
            rope_theta=5000000.0,
            vocab_size=49155,
            **{"tie_word_embeddings": True},
        ),
        2_533_531_648,
    ),
    "Phi-3-mini-4k-instruct": (phi3(), 3_821_079_552),
    "Phi-4-mini-instruct": (
        phi3(
            max_position_embeddings=131072,
            num_attention_heads=24,
            num_key_value_heads=8,
            partial_rotary_factor=0.75,
            rope_scaling={
                "long_factor": [1.0] * 48,
                "short_factor": [1.0] * 48,
                "type": "longrope",
            },
            sliding_window=262144,
            tie_word_embeddings=True,
            vocab_size=200064,
        ),
        3_836_021_760,
    ),
    "starcoder2-3b": (
        {
            "architectures": ["Starcoder2ForCausalLM"],
            "attention_dropout": 0.1,
            "attention_softmax_in_fp32": True,
            "bos_token_id": 0,
            "embedding_dropout": 0.1,
            "eos_token_id": 0,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 3072,
            "initializer_range": 0.018042,
            "intermediate_size": 12288,
            "layer_norm_epsilon": 1e-05,
            "max_position_embeddings": 16384,
            "mlp_type": "default",
            "model_type": "starcoder2",
            "norm_epsilon": 1e-05,
            "norm_type": "layer_norm",
            "num_attention_heads": 24,
            "num_hidden_layers": 30,
            "num_key_value_heads": 2,
            "residual_dropout": 0.1,
            "rope_theta": 999999.4420358813,
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
            "sliding_window": 4096,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.37.0.dev0",
            "use_bias": True,
            "use_cache": True,
            "vocab_size": 49152,
        },
        3_030_371_328,
    ),
    "c4ai-command-r-v01": (
        {
            "architectures": ["CohereForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 5,
            "eos_token_id": 255001,
            "hidden_act": "silu",
            "hidden_size": 8192,
            "initializer_range": 0.02,
            "intermediate_size": 22528,
            "layer_norm_eps": 1e-05,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "model_max_length": 131072,
            "model_type": "cohere",
            "num_attention_heads": 64,
            "num_hidden_layers": 40,
            "num_key_value_heads": 64,
            "pad_token_id": 0,
            "pretraining_tp": 1,
            "rope_theta": 8000000.0,
            "torch_dtype": "float16",
            "transformers_version": "4.38.2",
            "use_cache": True,
            "use_qk_norm": False,
            "vocab_size": 256000,
        },
        34_980_831_232,
    ),
    "Olmo-3-1025-7B": (
        like_llama(
            "olmo3",
            "Olmo3",
            attention_bias=False,
            attention_dropout=0.0,
            hidden_size=4096,
            intermediate_size=11008,
            layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
            max_position_embeddings=65536,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=32,
            rms_norm_eps=1e-06,
            rope_scaling={
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            rope_theta=500000,
            sliding_window=4096,
            vocab_size=100278,
        ),
        7_298_011_136,
    ),
    "c4ai-command-r7b-12-2024": (
        {
            "architectures": ["Cohere2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 5,
            "cache_implementation": "hybrid",
            "eos_token_id": 255001,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "layer_norm_eps": 1e-05,
            "layer_switch": 4,
            "logit_scale": 0.25,
            "max_position_embeddings": 8192,
            "model_type": "cohere2",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "order_of_interleaved_layers": "local_attn_first",
            "pad_token_id": 0,
            "position_embedding_type": "rope_gptj",
            "rope_scaling": None,
            "rope_theta": 50000,
            "rotary_pct": 1.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.48.0.dev0",
            "use_cache": True,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
            "vocab_size": 256000,
        },
        8_028_033_024,
    ),
}
