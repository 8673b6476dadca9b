"""Further shapes of the gate, beside `benchmarks.shapes`: options and model families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.shapes import BY_NAME as KNOWN
from benchmarks.shapes import LLAMA, MINILM, RELU, SHAPES, TRANSFORMERS, Shape
from xformer import GPT, pretrained

CHAR_GPT = KNOWN["char-gpt"]
BERT = MINILM | {"architectures": ["BertForSequenceClassification"]}
T5: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "is_encoder_decoder": True,
    "d_model": 256,
    "d_kv": 64,
    "d_ff": 1024,
    "num_heads": 4,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "vocab_size": 8000,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
# No padding id: transformers sets the gradient of the padding's embedding to 0.
SMALL = LLAMA | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 8000,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
MIXTRAL = SMALL | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "intermediate_size": 512,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GEMMA2 = SMALL | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "intermediate_size": 1024,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 64,
}
GATE_SHAPES = (
    replace(
        CHAR_GPT,
        name="char-gpt-dropout",
        model=GPT(65, 6, 384, 6, max_len=256, dropout=0.1),
        dropout=True,
    ),
    replace(CHAR_GPT, name="char-gpt-lora", lora_rank=8),
    replace(CHAR_GPT, name="char-gpt-3", batch=3),
    replace(KNOWN["tiny"], name="tiny-3", batch=3),
    replace(
        CHAR_GPT,
        name="char-gpt-lengths",
        lengths=(256, 96, 200, 131, 64, 177, 240, 32),
        rounds=6,
    ),
    Shape(
        "bert-classifier",
        pretrained.model(BERT),
        batch=32,
        length=128,
        rounds=7,
        repeats=1,
        peer=TRANSFORMERS,
    ),
    Shape(
        "t5",
        pretrained.model(T5),
        batch=32,
        length=64,
        target_length=32,
        rounds=15,
        repeats=1,
        tolerance=RELU,
        peer=TRANSFORMERS,
    ),
    Shape(
        "mixtral",
        pretrained.model(MIXTRAL),
        batch=8,
        length=256,
        rounds=10,
        repeats=1,
        peer=TRANSFORMERS,
    ),
    Shape(
        "gemma2",
        pretrained.model(GEMMA2),
        batch=8,
        length=256,
        rounds=10,
        repeats=1,
        peer=TRANSFORMERS,
    ),
)
ALL = (*SHAPES, *GATE_SHAPES)
BY_NAME = {shape.name: shape for shape in ALL}
