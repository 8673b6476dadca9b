"""A moving average of parameters."""

from __future__ import annotations

from typing import Any

from xformer import tree
from xformer.checks import number
from xformer.optim._checks import require_matching


def ema(average: Any, params: Any, *, decay: float) -> Any:
    """average + (1 - decay) (params - average), after each step; before the first it is params.

    A decay of 0.999 looks back over about 1,000 steps; the average of the last of them often
    generalises better than any one (arXiv:1806.04498). average, params: trees of one structure, as
    torch's AveragedModel with get_ema_multi_avg_fn. ValueError for a decay outside [0, 1].
    """
    require_matching("ema", params, average, "the average")
    new = 1 - number("ema", "decay", decay, low=0, high=1)
    return tree.map(lambda a, p: a + new * (p - a), average, params)
