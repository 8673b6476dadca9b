"""One vector for each sequence, from a model's hidden states."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer import ops
from xformer.base.choices import require_one_of
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.grad_callback import Ready, report
from xformer.layers.pooling import POOLINGS, pool, pooling_names
from xformer.models.lm_head import zeros_of


def require_pooling(pooling: str | tuple[str, ...], head: Any) -> None:
    """ValueError unless `pooling` is of `layers.pool`, or "pooler" of a head that has it."""
    if isinstance(pooling, tuple):
        pooling_names("pooled", pooling)
    else:
        require_one_of("pooled: pooling", pooling, (*POOLINGS, "pooler"))
    if pooling == "pooler" and not hasattr(head, "pooled"):
        raise ValueError('pooled: pooling "pooler" needs a model with a Pooler')


def pool_hidden(
    x: Array,
    head: Any,
    params: Any,
    *,
    pooling: str | tuple[str, ...],
    normalize: bool,
    mask: Array | None,
    skip: int = 0,
) -> tuple[Array, tuple[Any, Any, Any]]:
    """One vector for each sequence, (B, n D), and the caches of pool, pooler and norm.

    A cache is None if its step does not run.

    x: (B, T, D), hidden states
    head, params: a Pooler and its parameters; used only with pooling "pooler"
    pooling: of `layers.pool`, or "pooler": `head.pooled` of the first token
    normalize: scale vectors to Euclidean norm 1
    mask: (B, T), True = a token, False = padding; None: no padding
    skip: of `layers.pool`; "pooler" does not use it
    """
    pooler = norm = None
    if pooling == "pooler":
        y, pool_cache = pool(x, pooling="first", mask=mask)
        y, pooler = head.pooled(y, params)
    else:
        y, pool_cache = pool(x, pooling=pooling, mask=mask, skip=skip)
    if normalize:
        y, norm = ops.l2_normalize(y)
    return y, (pool_cache, pooler, norm)


@short
class PooledCache(NamedTuple):
    """Saved by `LanguageModel.pooled` for backward: the caches of the model and of each step."""

    hidden: Any  # of `LanguageModel.hidden`
    pool: Any  # of `layers.pool`
    pooler: Any  # of `Pooler.pooled`; None for another pooling
    norm: Any  # of `ops.l2_normalize`; None if the vectors are not normalised
    head: Any  # the head's parameters; if they were not used, their gradient is zeros of this shape

    def backward(self, dy: Array, *, ready: Ready | None = None) -> Any:
        """Gradients of the model's parameters; zeros for a head that was not used.

        ready: of `LossCache.backward`
        """
        if self.norm is not None:
            dy = self.norm.backward(dy)
        if self.pooler is not None:
            dy, dhead = self.pooler.backward(dy)
        else:
            dhead = zeros_of(self.head)
        report(ready, "head", dhead)
        grads, _ = self.hidden.backward_all(self.pool.backward(dy), ready=ready)
        report(ready, "embed", grads.embed)
        return grads._replace(head=dhead)
