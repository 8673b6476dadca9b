"""A moving average of parameters."""

from __future__ import annotations

from collections.abc import Sequence

from xformer.checks import number
from xformer.dispatch import overridable
from xformer.optim._checks import all_distinct, rebuilt, side_by_side
from xformer.typing import Array, Tree


def ema(average: Tree, params: Tree, *, decay: float, donate: bool = False) -> Tree:
    """average + (1 - decay) (params - average), after each step; before the first it is params.

    A decay of 0.999 looks back over about 1,000 steps; the average of the last of them often
    generalises better than any one (arXiv:1806.04498). average, params: trees of one structure, as
    torch's AveragedModel with get_ema_multi_avg_fn. donate: the average may be written over, and
    is not to be used again. ValueError for a decay outside [0, 1].
    """
    new, old = side_by_side("ema", params, **{"the average": average})
    share = 1 - number("ema", "decay", decay, low=0, high=1)
    moved = ema_leaves(old, new, share=share, donate=donate and all_distinct(old, new))
    return rebuilt(average, params, old, moved)


@overridable(backward=False)
def ema_leaves(
    average: Sequence[Array], params: Sequence[Array], *, share: float, donate: bool = False
) -> Sequence[Array]:
    """average + share (params - average), of the leaves of trees, of which none is there twice."""
    return [a + share * (p - a) for a, p in zip(average, params, strict=True)]
