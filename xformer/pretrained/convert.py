"""Models of llama2.c as transformers' Llama."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

from xformer import tree
from xformer.layers import LinearParams
from xformer.pretrained.families import llama2c
from xformer.pretrained.llama2c import TOKENS
from xformer.pretrained.loading import model as model_of
from xformer.typing import Array


def as_llama(model: Any, params: Any) -> tuple[Any, Any]:
    """The same function as a Llama, whose rotary pairs are i and i + K/2 instead of 2i and 2i + 1.

    The columns of queries and keys change places; everything else stays. ValueError for a model
    that is none of llama2.c's.
    """
    source = model.hf_config or {}
    if source.get("model_type") != llama2c.MODEL_TYPE:
        raise ValueError(
            f"as_llama: the model must be one of llama2.c, got {source.get('model_type')}"
        )
    block = model.blocks[0]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": source["vocab_size"],
        "hidden_size": source["d_model"],
        "intermediate_size": source["d_ff"],
        "num_hidden_layers": source["n_layers"],
        "num_attention_heads": source["n_heads"],
        "num_key_value_heads": source["n_kv_heads"],
        "max_position_embeddings": source["max_len"],
        "rms_norm_eps": block.eps,
        "rope_theta": model.rotary.theta,
        "tie_word_embeddings": source["tied"],
        **TOKENS,
    }

    def moved(name: str, node: LinearParams) -> LinearParams:
        if name.endswith((".attn.q", ".attn.kv.k")):
            return node._replace(w=half_split(node.w, block.head_width))
        return node

    return model_of(config), tree.map_nodes(moved, params, LinearParams)


def half_split(w: Array, width: int) -> Array:
    """w (I, H * K), each head's columns 0, 2, 4, ... before 1, 3, 5, ...; K = width."""
    xp = array_namespace(w)
    columns = xp.reshape(xp.arange(w.shape[1], device=device(w)), (-1, width // 2, 2))
    order = xp.reshape(xp.permute_dims(columns, (0, 2, 1)), (w.shape[1],))
    return xp.take(w, order, axis=1)
