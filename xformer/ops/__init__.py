"""Primitive operations: `y, cache = op(arrays)`, then `cache.backward(dy)`. One op a file."""

from xformer.ops.cross_entropy import cross_entropy
from xformer.ops.dropout import dropout
from xformer.ops.embedding import embedding
from xformer.ops.erf import erf
from xformer.ops.gelu import gelu
from xformer.ops.index_add import index_add
from xformer.ops.layer_norm import layer_norm
from xformer.ops.linear import linear
from xformer.ops.log_softmax import log_softmax
from xformer.ops.mse import mse
from xformer.ops.random_bits import Key, random_bits
from xformer.ops.relu import relu
from xformer.ops.sdpa import sdpa
from xformer.ops.sigmoid import sigmoid
from xformer.ops.silu import silu
from xformer.ops.softmax import softmax
from xformer.ops.tanh import tanh

__all__ = [
    "Key",
    "cross_entropy",
    "dropout",
    "embedding",
    "erf",
    "gelu",
    "index_add",
    "layer_norm",
    "linear",
    "log_softmax",
    "mse",
    "random_bits",
    "relu",
    "sdpa",
    "sigmoid",
    "silu",
    "softmax",
    "tanh",
]
