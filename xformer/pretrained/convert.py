"""Conversion of llama2.c models to transformers' Llama."""

from __future__ import annotations

from typing import Any

from array_api_compat import device

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.layers import LinearParams
from xformer.pretrained.families import llama2c
from xformer.pretrained.llama2c import TOKENS
from xformer.pretrained.loading import model as model_of


def as_llama(model: Any, params: Any) -> tuple[Any, Any]:
    """(model, params) of a Llama that computes the same function as a llama2.c model.

    RoPE of Llama rotates the pairs of channels (i, i + K/2), RoPE of llama2.c the pairs (2i, 2i +
    1), K the width of a head. So the columns of each head of the query and key weights are
    reordered: 0, 2, 4, ..., 1, 3, 5, ... The other weights stay the same.

    ValueError if the model is not a llama2.c model.
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
        "rms_norm_eps": block.norm.eps,
        "rope_theta": model.rotary.theta,
        "tie_word_embeddings": source["tied"],
        **TOKENS,
    }

    def moved(name: str, node: LinearParams) -> LinearParams:
        if name.endswith((".attn.q", ".attn.kv.k")):
            return node._replace(w=half_split(node.w, block.attn.head_width))
        return node

    return model_of(config), tree.map_nodes(moved, params, LinearParams)


def half_split(w: Array, width: int) -> Array:
    """w (I, H * K) with the columns of each head in the order 0, 2, 4, ..., 1, 3, 5, ...

    width: K, the number of columns of a head.
    """
    xp = array_namespace(w)
    columns = xp.reshape(xp.arange(w.shape[1], device=device(w)), (-1, width // 2, 2))
    order = xp.reshape(xp.permute_dims(columns, (0, 2, 1)), (w.shape[1],))
    return xp.take(w, order, axis=1)
