"""What a training step of backend numba holds in memory: a program, with one arena.

found = program_ledger(model, batch=8, length=128)
print(found.arena, found.peak)

In bytes, as `xformer.ledger`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import backends, tree
from xformer.backends.numpy.stand_in import Tally, stand_in
from xformer.initializers import Shapes
from xformer.ledger import Same, sizes_of
from xformer.measure import arguments
from xformer.training.compiled import CompiledSteps
from xformer.training.config import TrainConfig
from xformer.training.loss import loss_of
from xformer.training.state import State


class ProgramLedger(NamedTuple):
    """Bytes of a training step that is a program."""

    params: int  # written over by each step
    state: int  # of the optimiser; written over
    arena: int  # all between: gradients, what backward needs, results
    inputs: int  # a batch and its numbers
    scratch: int  # that threads keep for products

    @property
    def peak(self) -> int:
        """The most that a step holds; a program itself is some MB of Python's."""
        return sum(self)


def program_ledger(
    model: Any,
    *,
    batch: int,
    length: int,
    dtype: str = "float32",
    optimiser: str = "adamw",
) -> ProgramLedger:
    """The accounts of a step of `training.train` on backend numba, states donated.

    The step is recorded, for as many threads as NumPy's BLAS has, and not run: parameters and state
    are not made. Other arguments and errors as of `ledger`; Unusable without numba, TypeError for a
    step that cannot be recorded.
    """
    if (why := backends.unavailable_reason("numba")) is not None:
        raise backends.Unusable(why)
    network = model.network
    batch, length = sizes_of(network, batch, length, dtype, optimiser)
    config = TrainConfig(steps=1, optimiser=optimiser)
    own = config.chosen_optimiser()
    tally = Tally()
    like = tree.map(lambda leaf: stand_in(leaf.shape, dtype, tally), network.init_from(Shapes()))
    params, kept = tree.map(_unmade, (like, own.init(like)))
    one = Same(arguments(network, batch, length, dtype)[1]).batch(0)
    steps = CompiledSteps(loss_of(network), config, backends.get("numpy"), own, None)
    program, inputs = steps.recorded(State(params, kept, None), [one], 1e-3)
    sizes = tree.nbytes(params), tree.nbytes(kept)
    given = sum(x.nbytes for x in inputs) - sum(sizes)
    return ProgramLedger(*sizes, program.plan.nbytes, given, program.scratch_nbytes)


def _unmade(leaf: Any) -> Any:
    """Zeros in memory of their own, which takes none before it is touched."""
    return np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else leaf
