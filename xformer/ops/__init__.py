"""Primitive operations: `y, cache = op(arrays)`, then `cache.backward(dy)`. One op a file."""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.ops.additive_attention import additive_attention as additive_attention
    from xformer.ops.causal_conv import causal_conv as causal_conv
    from xformer.ops.clamped_swiglu import clamped_swiglu as clamped_swiglu
    from xformer.ops.cross_entropy import cross_entropy as cross_entropy
    from xformer.ops.dropout import dropout as dropout
    from xformer.ops.embedding import embedding as embedding
    from xformer.ops.erf import erf as erf
    from xformer.ops.experts import experts as experts
    from xformer.ops.gated_delta_rule import gated_delta_rule as gated_delta_rule
    from xformer.ops.gelu import gelu as gelu
    from xformer.ops.glu import glu as glu
    from xformer.ops.index_add import index_add as index_add
    from xformer.ops.info_nce import info_nce as info_nce
    from xformer.ops.l2_normalize import l2_normalize as l2_normalize
    from xformer.ops.layer_norm import layer_norm as layer_norm
    from xformer.ops.linear import linear as linear
    from xformer.ops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from xformer.ops.load_balancing import load_balancing as load_balancing
    from xformer.ops.log_decay import log_decay as log_decay
    from xformer.ops.log_softmax import log_softmax as log_softmax
    from xformer.ops.lsh_attention import lsh_attention as lsh_attention
    from xformer.ops.mse import mse as mse
    from xformer.ops.quick_gelu import quick_gelu as quick_gelu
    from xformer.ops.random_bits import RandomKey as RandomKey
    from xformer.ops.random_bits import random_bits as random_bits
    from xformer.ops.relu import relu as relu
    from xformer.ops.relu_squared import relu_squared as relu_squared
    from xformer.ops.rms_norm import rms_norm as rms_norm
    from xformer.ops.rope import rope as rope
    from xformer.ops.router_z_loss import router_z_loss as router_z_loss
    from xformer.ops.scale import scale as scale
    from xformer.ops.sdpa import sdpa as sdpa
    from xformer.ops.shaw import shaw as shaw
    from xformer.ops.sigmoid import sigmoid as sigmoid
    from xformer.ops.silu import silu as silu
    from xformer.ops.softcap import softcap as softcap
    from xformer.ops.softmax import softmax as softmax
    from xformer.ops.tanh import tanh as tanh
    from xformer.ops.xl_attention import xl_attention as xl_attention

later(__name__, "activation")
