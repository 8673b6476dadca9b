"""Primitive operations: `y, cache = op(arrays)`, then `cache.backward(dy)`. One op a file."""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.ops.additive_attention import additive_attention
    from xformer.ops.causal_conv import causal_conv
    from xformer.ops.clamped_swiglu import clamped_swiglu
    from xformer.ops.cross_entropy import cross_entropy
    from xformer.ops.dropout import dropout
    from xformer.ops.embedding import embedding
    from xformer.ops.erf import erf
    from xformer.ops.experts import experts
    from xformer.ops.gated_delta_rule import gated_delta_rule
    from xformer.ops.gelu import gelu
    from xformer.ops.glu import glu
    from xformer.ops.index_add import index_add
    from xformer.ops.info_nce import info_nce
    from xformer.ops.l2_normalize import l2_normalize
    from xformer.ops.layer_norm import layer_norm
    from xformer.ops.linear import linear
    from xformer.ops.linear_cross_entropy import linear_cross_entropy
    from xformer.ops.load_balancing import load_balancing
    from xformer.ops.log_decay import log_decay
    from xformer.ops.log_softmax import log_softmax
    from xformer.ops.lsh_attention import lsh_attention
    from xformer.ops.mse import mse
    from xformer.ops.quick_gelu import quick_gelu
    from xformer.ops.random_bits import RandomKey, random_bits
    from xformer.ops.relu import relu
    from xformer.ops.relu_squared import relu_squared
    from xformer.ops.rms_norm import rms_norm
    from xformer.ops.rope import rope
    from xformer.ops.router_z_loss import router_z_loss
    from xformer.ops.scale import scale
    from xformer.ops.sdpa import sdpa
    from xformer.ops.shaw import shaw
    from xformer.ops.sigmoid import sigmoid
    from xformer.ops.silu import silu
    from xformer.ops.softcap import softcap
    from xformer.ops.softmax import softmax
    from xformer.ops.tanh import tanh
    from xformer.ops.xl_attention import xl_attention

__all__ = [
    "RandomKey",
    "additive_attention",
    "causal_conv",
    "clamped_swiglu",
    "cross_entropy",
    "dropout",
    "embedding",
    "erf",
    "experts",
    "gated_delta_rule",
    "gelu",
    "glu",
    "index_add",
    "info_nce",
    "l2_normalize",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "load_balancing",
    "log_decay",
    "log_softmax",
    "lsh_attention",
    "mse",
    "quick_gelu",
    "random_bits",
    "relu",
    "relu_squared",
    "rms_norm",
    "rope",
    "router_z_loss",
    "scale",
    "sdpa",
    "shaw",
    "sigmoid",
    "silu",
    "softcap",
    "softmax",
    "tanh",
    "xl_attention",
]

later(
    __name__,
    activation="",
    additive_attention="additive_attention",
    causal_conv="causal_conv",
    clamped_swiglu="clamped_swiglu",
    cross_entropy="cross_entropy",
    dropout="dropout",
    embedding="embedding",
    erf="erf",
    experts="experts",
    gated_delta_rule="gated_delta_rule",
    gelu="gelu",
    glu="glu",
    index_add="index_add",
    info_nce="info_nce",
    l2_normalize="l2_normalize",
    layer_norm="layer_norm",
    linear="linear",
    linear_cross_entropy="linear_cross_entropy",
    load_balancing="load_balancing",
    log_decay="log_decay",
    log_softmax="log_softmax",
    lsh_attention="lsh_attention",
    mse="mse",
    quick_gelu="quick_gelu",
    random_bits="RandomKey random_bits",
    relu="relu",
    relu_squared="relu_squared",
    rms_norm="rms_norm",
    rope="rope",
    router_z_loss="router_z_loss",
    scale="scale",
    sdpa="sdpa",
    shaw="shaw",
    sigmoid="sigmoid",
    silu="silu",
    softcap="softcap",
    softmax="softmax",
    tanh="tanh",
    xl_attention="xl_attention",
)
