"""Optimisers: pure functions, `params, state = adamw(params, grads, state, lr=...)`."""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.optim import schedules as schedules
    from xformer.optim.accumulate import accumulate as accumulate
    from xformer.optim.adafactor import AdafactorState as AdafactorState
    from xformer.optim.adafactor import adafactor as adafactor
    from xformer.optim.adafactor import adafactor_init as adafactor_init
    from xformer.optim.adam import AdamState as AdamState
    from xformer.optim.adam import adam as adam
    from xformer.optim.adam import adam_init as adam_init
    from xformer.optim.adam import adamw as adamw
    from xformer.optim.adam import adamw_init as adamw_init
    from xformer.optim.clip import clip_by_global_norm as clip_by_global_norm
    from xformer.optim.ema import ema as ema
    from xformer.optim.flat import reduced as reduced
    from xformer.optim.lion import LionState as LionState
    from xformer.optim.lion import lion as lion
    from xformer.optim.lion import lion_init as lion_init
    from xformer.optim.loss_scale import LossScale as LossScale
    from xformer.optim.muon import MuonState as MuonState
    from xformer.optim.muon import muon as muon
    from xformer.optim.muon import muon_init as muon_init
    from xformer.optim.muon import newton_schulz as newton_schulz
    from xformer.optim.optimiser import OPTIMISERS as OPTIMISERS
    from xformer.optim.optimiser import Optimiser as Optimiser
    from xformer.optim.optimiser import Rule as Rule
    from xformer.optim.optimiser import decay_matrices as decay_matrices
    from xformer.optim.optimiser import grouped as grouped
    from xformer.optim.schedules import Schedule as Schedule
    from xformer.optim.sgd import SGDState as SGDState
    from xformer.optim.sgd import sgd as sgd
    from xformer.optim.sgd import sgd_init as sgd_init
    from xformer.optim.sharded import ShardedState as ShardedState
    from xformer.optim.sharded import sharded as sharded

later(__name__)
