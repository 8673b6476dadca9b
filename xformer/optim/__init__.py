"""Optimisers: pure functions, `params, state = adamw(params, grads, state, lr=...)`."""

from xformer.initial import normal, xavier_normal, xavier_uniform
from xformer.optim.adam import AdamState, adam, adam_init, adamw, adamw_init
from xformer.optim.clip import clip_by_global_norm
from xformer.optim.sgd import SGDState, sgd, sgd_init

__all__ = [
    "AdamState",
    "SGDState",
    "adam",
    "adam_init",
    "adamw",
    "adamw_init",
    "clip_by_global_norm",
    "normal",
    "sgd",
    "sgd_init",
    "xavier_normal",
    "xavier_uniform",
]
