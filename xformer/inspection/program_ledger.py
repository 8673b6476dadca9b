"""The memory of a training step on backend numba, in bytes: a program with one arena.

result = program_ledger(model, batch=8, length=128)
print(result.arena, result.peak)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import backends
from xformer.backends.numpy.stand_in import Tally, stand_in
from xformer.base import tree
from xformer.initializers import Shapes
from xformer.inspection.ledger import Same, sizes_of
from xformer.inspection.measure import arguments
from xformer.training.compiled import CompiledSteps
from xformer.training.config import TrainConfig
from xformer.training.loss import loss_of
from xformer.training.state import State


class ProgramLedger(NamedTuple):
    """The bytes of a training step that is a program."""

    params: int  # overwritten by each step
    state: int  # of the optimiser; overwritten by each step
    arena: int  # gradients, arrays saved for backward, and other temporaries
    inputs: int  # a batch and its numbers
    scratch: int  # scratch memory of threads for matmuls

    @property
    def peak(self) -> int:
        """The peak of a step; the program itself takes some MB more of Python's memory."""
        return sum(self)


def program_ledger(
    model: Any,
    *,
    batch: int,
    length: int,
    dtype: str = "float32",
    optimiser: str = "adamw",
) -> ProgramLedger:
    """The memory of a step of `training.train` on backend numba, with donated states.

    The step is recorded but not run, for the number of threads of NumPy's BLAS. Parameters and
    state take no memory.

    batch, length: the number of sequences, and the tokens of each.

    ValueError for sizes below 1, another dtype or optimiser, and a model without a loss. Unusable
    without numba. TypeError for a step that cannot be recorded.
    """
    if (why := backends.unavailable_reason("numba")) is not None:
        raise backends.Unusable(why)
    batch, length = sizes_of(model, batch, length, dtype, optimiser)
    config = TrainConfig(steps=1, optimiser=optimiser)
    pair = config.chosen_optimiser()
    tally = Tally()
    like = tree.map(lambda leaf: stand_in(leaf.shape, dtype, tally), model.init_from(Shapes()))
    params, state = tree.map(_unmade, (like, pair.init(like)))
    one = Same(arguments(model, batch, length, dtype)[1]).batch(0)
    steps = CompiledSteps(loss_of(model), config, backends.get("numpy"), pair, None)
    program, inputs = steps.recorded(State(params, state, None), [one], 1e-3)
    sizes = tree.nbytes(params), tree.nbytes(state)
    input_bytes = sum(x.nbytes for x in inputs) - sum(sizes)
    return ProgramLedger(*sizes, program.plan.nbytes, input_bytes, program.scratch_nbytes)


def _unmade(leaf: Any) -> Any:
    """Zeros like an array; the system allocates their memory only when they are accessed."""
    return np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else leaf
