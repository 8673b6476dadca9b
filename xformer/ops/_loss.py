"""Shared by the losses."""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.checks import finite, number, whole
from xformer.dispatch.shapes import working_dtype


class LossOptions(NamedTuple):
    """The options of `cross_entropy` after their checks. `loss_options` returns them."""

    ignore_index: int | None
    label_smoothing: float
    z_loss: float
    reduction: str


def loss_options(
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> LossOptions:
    """The options of a call of `cross_entropy` or `linear_cross_entropy`, checked.

    The reference and every kernel call it first. The errors are those of `cross_entropy`.
    """
    label_smoothing = number("cross_entropy", "label_smoothing", label_smoothing, low=0, high=1)
    z_loss = finite("cross_entropy", "z_loss", z_loss)
    if ignore_index is not None and whole(ignore_index) is None:
        raise TypeError(f"cross_entropy: ignore_index must be an int, got {ignore_index!r}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f'cross_entropy: reduction must be "mean", "sum" or "none", got {reduction!r}'
        )
    return LossOptions(ignore_index, label_smoothing, z_loss, reduction)


def one(like: Array) -> Array:
    """An array () of 1, the gradient of a scalar loss with respect to itself."""
    return array_namespace(like).ones((), dtype=working_dtype(like), device=device(like))
