"""The exponential moving average (EMA) of parameters."""

from __future__ import annotations

from collections.abc import Sequence

from xformer.base.typing import Array, Tree
from xformer.dispatch import overridable
from xformer.dispatch.checks import number
from xformer.optim._checks import all_distinct, rebuilt, side_by_side


def ema(average: Tree, params: Tree, *, decay: float, donate: bool = False) -> Tree:
    """average + (1 - decay) (params - average), the new average after a training step.

    Start with average = params. A decay of 0.999 averages over about 1,000 steps. Averaged
    parameters often generalise better than the parameters of any single step (arXiv:1806.04498).
    torch's AveragedModel with get_ema_multi_avg_fn uses the same formula.

    average, params: trees of the same structure.
    donate: the average may be overwritten; do not use it afterwards.

    ValueError for a decay outside [0, 1].
    """
    new, old = side_by_side("ema", params, **{"the average": average})
    share = 1 - number("ema", "decay", decay, low=0, high=1)
    moved = ema_leaves(old, new, share=share, donate=donate and all_distinct(old, new))
    return rebuilt(average, params, old, moved)


@overridable(backward=False)
def ema_leaves(
    average: Sequence[Array], params: Sequence[Array], *, share: float, donate: bool = False
) -> Sequence[Array]:
    """average + share (params - average), for the leaves of trees. No array may appear twice."""
    return [a + share * (p - a) for a, p in zip(average, params, strict=True)]
