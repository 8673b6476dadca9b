"""What language models share: the output head, the loss, and a look at their parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from xformer import ops
from xformer.layers.linear import LinearParams
from xformer.layers.stack import StackParams
from xformer.typing import Array


def output_head(x: Array, head: LinearParams | None, table: Array) -> tuple[Array, OutputHeadCache]:
    """logits = x w + b, or x table^T where head is None: an embedding table that is tied.

    x: (B, T, D)   w: (D, V)   table: (V, D)   logits: (B, T, V). ValueError as `ops.linear`.
    """
    params = LinearParams(table.T, None) if head is None else head
    logits, cache = ops.linear(x, *params)
    return logits, OutputHeadCache(cache, head is None)


class OutputHeadCache(NamedTuple):
    """What `output_head` keeps for its backward."""

    linear: Any
    tied: bool

    def backward(self, dlogits: Array) -> tuple[Array, LinearParams | None, Array | None]:
        """Gradients of x, head, table; None for the one that was not used."""
        dx, dw, db = self.linear.backward(dlogits)
        return (dx, None, dw.T) if self.tied else (dx, LinearParams(dw, db), None)


def require_params(
    model: str, stack: StackParams, n_layers: int, norm: str, head: Any, tied: bool
) -> None:
    """ValueError unless the parameters are those of the model's configuration."""
    for what, got, wanted in (
        ("blocks", len(stack.blocks), n_layers),
        ("a final norm", stack.norm is not None, norm == "pre"),
        ("an output head", head is not None, not tied),
    ):
        if got != wanted:
            raise ValueError(f"{model}: params must have {what}: {wanted} by config, got {got}")


def token_loss(
    logits: Array, cache: Any, targets: Array, options: dict[str, Any]
) -> tuple[Array, LossCache]:
    """Cross-entropy of a model's logits; `cache` is the model's, whose backward follows on."""
    loss, loss_cache = ops.cross_entropy(logits, targets=targets, **options)
    return loss, LossCache(loss_cache, cache)


class LossCache(NamedTuple):
    """What a model's `loss` keeps for its backward."""

    loss: Any
    model: Any

    def backward(self, dloss: Array | None = None) -> Any:
        """Gradients of the model's parameters; dloss is 1 unless given."""
        if dloss is None:
            lse = self.loss.lse
            dloss = array_namespace(lse).ones((), dtype=lse.dtype, device=device(lse))
        return self.model.backward(self.loss.backward(dloss))
