"""Optimisers: pure functions, `params, state = adamw(params, grads, state, lr=...)`."""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.optim import schedules
    from xformer.optim.accumulate import accumulate
    from xformer.optim.adafactor import AdafactorState, adafactor, adafactor_init
    from xformer.optim.adam import AdamState, adam, adam_init, adamw, adamw_init
    from xformer.optim.clip import clip_by_global_norm
    from xformer.optim.ema import ema
    from xformer.optim.flat import reduced
    from xformer.optim.lion import LionState, lion, lion_init
    from xformer.optim.loss_scale import LossScale
    from xformer.optim.muon import MuonState, muon, muon_init, newton_schulz
    from xformer.optim.optimiser import OPTIMISERS, Optimiser, Rule, decay_matrices, grouped
    from xformer.optim.schedules import Schedule
    from xformer.optim.sgd import SGDState, sgd, sgd_init
    from xformer.optim.sharded import ShardedState, sharded

__all__ = [
    "OPTIMISERS",
    "AdafactorState",
    "AdamState",
    "LionState",
    "LossScale",
    "MuonState",
    "Optimiser",
    "Rule",
    "SGDState",
    "Schedule",
    "ShardedState",
    "accumulate",
    "adafactor",
    "adafactor_init",
    "adam",
    "adam_init",
    "adamw",
    "adamw_init",
    "clip_by_global_norm",
    "decay_matrices",
    "ema",
    "grouped",
    "lion",
    "lion_init",
    "muon",
    "muon_init",
    "newton_schulz",
    "reduced",
    "schedules",
    "sgd",
    "sgd_init",
    "sharded",
]

later(
    __name__,
    accumulate="accumulate",
    adafactor="AdafactorState adafactor adafactor_init",
    adam="AdamState adam adam_init adamw adamw_init",
    clip="clip_by_global_norm",
    ema="ema",
    flat="reduced",
    lion="LionState lion lion_init",
    loss_scale="LossScale",
    muon="MuonState muon muon_init newton_schulz",
    optimiser="OPTIMISERS Optimiser Rule decay_matrices grouped",
    schedules="Schedule",
    sgd="SGDState sgd sgd_init",
    sharded="ShardedState sharded",
)
